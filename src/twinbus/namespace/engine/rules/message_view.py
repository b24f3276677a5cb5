"""The properties of a published message by name, for rules. Properties are decoded when first used, the body never.

Names of properties are case-insensitive: they are looked up in lower case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from twinbus.amqp import DecodeError, Properties, Sections, split_sections
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.values import Duration, from_amqp
from twinbus.values import Timestamp

MAX_STEPS: Final = 1 << 17
"""The most work of the rules of one subscription on one message, in steps of about 0.2 µs (X1). Only work that grows
with the message is counted: LIKE, texts that are joined or compared, and copies for actions; and that of correlation
filters, because there may be very many of them. The steps of copies bound their memory too."""
MAX_TOPIC_STEPS: Final = 16 * MAX_STEPS
"""The most work of the rules of all subscriptions of a topic on one message. Half of it is divided equally among the
subscriptions. The other half is for those that need more, in their order."""

_CHARACTERS_PER_STEP: Final = 512
_COPIED_BYTES_PER_STEP: Final = 64
"""So the copies for the actions of one subscription have at most 8 MiB: 32 copies of a message of 250 KB."""
_MAX_DURATION: Final = Duration(922_337_203_685_477)
_MAX_TIMESTAMP: Final = Timestamp(253_402_300_799_999)


class MessageView:
    """One message that is being published, as the rules of subscriptions read it."""

    __slots__ = (
        "_annotations_read",
        "_application_read",
        "_properties",
        "_sections",
        "_unreadable",
        "most_steps",
        "new_token",
        "now",
        "raw",
        "seq",
        "steps_left",
        "ttl",
        "user",
    )

    def __init__(self, raw: bytes, *, now: int, seq: int, ttl: int | None, new_token: Callable[[], bytes]) -> None:
        self.raw = raw
        self.now = now
        self.seq = seq
        self.ttl = ttl
        self.new_token = new_token
        self.user: dict[str, Any] | None = None
        """Application properties by name in lower case; None until `read_user`."""
        self.most_steps = self.steps_left = MAX_STEPS
        """How much the rules of this subscription may do, and may still do. `RuleSet.select` sets both."""
        self._sections: Sections | None = None
        self._properties: Properties | None = None
        self._annotations_read: dict[Any, Any] | None = None
        self._application_read: dict[str, Any] | None = None
        self._unreadable: dict[str, str] | None = None
        """The sections that could not be decoded, and why: a second rule does not decode them again."""

    def spend(self, characters: int) -> None:
        """Count the work of copying or comparing so many characters. Raises RuleEvaluationError if it is too much."""
        self.spend_steps(1 + characters // _CHARACTERS_PER_STEP)

    def spend_copy(self, size: int) -> None:
        """Count bytes of a copy for an action, which is also stored. Raises RuleEvaluationError if it is too much."""
        self.spend_steps(size // _COPIED_BYTES_PER_STEP)

    def spend_steps(self, steps: int) -> None:
        """Count work, in steps of about 0.2 µs. Raises RuleEvaluationError if the rules have done too much."""
        self.steps_left -= steps
        if self.steps_left < 0:
            self.steps_left = -1
            raise RuleEvaluationError(
                f"the rules of the subscription take more than {self.most_steps} steps for this message; "
                "long texts, patterns with LIKE, and actions on large messages take the most"
            )

    @property
    def sections(self) -> Sections:
        if self._sections is None:
            self._sections = split_sections(self.raw)
        return self._sections

    @property
    def properties(self) -> Properties:
        if self._properties is None:
            self._properties = self._decoded("properties")
        return self._properties

    def read_user(self) -> dict[str, Any]:
        """Decode the application properties, and return them by name in lower case."""
        self.user = by_lower_name(self.application)
        return self.user

    @property
    def application(self) -> dict[str, Any]:
        """The application properties as they were sent. The caller must not change them."""
        if self._application_read is None:
            self._application_read = self._decoded("application_properties")
        return self._application_read

    def annotation(self, name: str) -> Any:
        return self.annotations.get(name)

    @property
    def annotations(self) -> dict[Any, Any]:
        """The message annotations. The caller must not change them."""
        if self._annotations_read is None:
            self._annotations_read = self._decoded("message_annotations")
        return self._annotations_read

    def _decoded(self, section: str) -> Any:
        """Return a section. Raises RuleEvaluationError: accepting a message does not decode all its fields.

        A section that cannot be decoded is decoded only once, however many rules need it.
        """
        failure = self._unreadable.get(section) if self._unreadable else None
        if failure is None:
            try:
                return getattr(self.sections, section)
            except DecodeError as error:
                failure = f"the message cannot be read: {error.description}"
                self._unreadable = {**(self._unreadable or {}), section: failure}
        raise RuleEvaluationError(failure)

    def named(self, name: str) -> Any:
        """Return the value of a property whose name an expression computed."""
        scope, dot, rest = name.lower().partition(".")
        if dot and scope == "sys":
            reader = SYSTEM_PROPERTIES.get(rest)
            if reader is None:
                raise RuleEvaluationError(f"there is no system property '{rest}'")
            return reader(self)
        user = self.user if self.user is not None else self.read_user()
        return user.get(rest if dot and scope == "user" else name.lower())


def by_lower_name(properties: dict[str, Any]) -> dict[str, Any]:
    return {name.lower(): from_amqp(value) for name, value in properties.items()}


def _id_text(value: str | UUID | bytes | int | None) -> str | None:
    """Return an id as text: the service has no other type for ids."""
    if value is None or isinstance(value, str):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)


def _property(field: str) -> Callable[[MessageView], Any]:
    return lambda view: getattr(view.properties, field)


def _expires(view: MessageView) -> Timestamp:
    return _MAX_TIMESTAMP if view.ttl is None else Timestamp(view.now + view.ttl)


SYSTEM_PROPERTIES: Final[dict[str, Callable[[MessageView], Any]]] = {
    "messageid": lambda view: _id_text(view.properties.message_id),
    "correlationid": lambda view: _id_text(view.properties.correlation_id),
    "sessionid": _property("group_id"),
    "replyto": _property("reply_to"),
    "replytosessionid": _property("reply_to_group_id"),
    "to": _property("to"),
    "label": _property("subject"),
    "subject": _property("subject"),
    "contenttype": _property("content_type"),
    "partitionkey": lambda view: view.annotation("x-opt-partition-key"),
    "viapartitionkey": lambda view: view.annotation("x-opt-via-partition-key"),
    "transactionpartitionkey": lambda view: view.annotation("x-opt-via-partition-key"),
    "timetolive": lambda view: _MAX_DURATION if view.ttl is None else Duration(view.ttl),
    "expiresatutc": _expires,
    "scheduledenqueuetimeutc": lambda view: view.annotation("x-opt-scheduled-enqueue-time"),
    "enqueuedtimeutc": lambda view: Timestamp(view.now),
    "sequencenumber": lambda view: view.seq,
    "enqueuedsequencenumber": lambda view: view.seq,
    "deliverycount": lambda view: 0,
    "size": lambda view: len(view.raw),
}
"""The functions that read the system properties of a published message, by name in lower case."""
