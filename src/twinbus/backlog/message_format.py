"""The format of a message in the backlog: some properties become aliases, and are restored from aliases (S7, Y3).

A backlog queue must not act on some properties of a diverted message: a session id would need a session queue, a
scheduled time would delay the message, and the time to live could end in the backlog. So diverting clears these
properties and stores their values in application properties, the aliases:

    session id                x-ms-sessionid
    time to live              x-ms-timetolive                in ticks of 100 ns
    scheduled enqueue time    x-ms-scheduledenqueuetimeutc   a timestamp
    destination               x-ms-path                      always
    compressed body           x-twinbus-packed               the algorithm; our own addition (S9)

The .NET client's paired namespaces use the same names, so each client can read messages that the other client wrote.

`divert` and `restore` work on plain data: `MessageFields`. They do not depend on an SDK, and do not read the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from twinbus.errors import CallerError, OperatorError
from twinbus.values import TICKS_PER_MILLISECOND, Char, Described, Long, Symbol, Timestamp

PATH_PROPERTY: Final = "x-ms-path"
SESSION_ID_PROPERTY: Final = "x-ms-sessionid"
TIME_TO_LIVE_PROPERTY: Final = "x-ms-timetolive"
SCHEDULED_TIME_PROPERTY: Final = "x-ms-scheduledenqueuetimeutc"
COMPRESSION_PROPERTY: Final = "x-twinbus-packed"
RESERVED_PROPERTIES: Final = (
    PATH_PROPERTY,
    SESSION_ID_PROPERTY,
    TIME_TO_LIVE_PROPERTY,
    SCHEDULED_TIME_PROPERTY,
    COMPRESSION_PROPERTY,
)

_TIMESPAN: Final = "com.microsoft:timespan"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

PropertyName = str | bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFields:
    """The fields of a message that diverting may change. None means not set.

    `time_to_live` is in milliseconds, as in the AMQP header. The two times are milliseconds since the epoch, UTC.
    """

    session_id: str | None = None
    time_to_live: int | None = None
    scheduled_enqueue_time: int | None = None
    absolute_expiry_time: int | None = None
    application_properties: Mapping[PropertyName, object] = field(default_factory=dict)


class AliasInUseError(CallerError, ValueError):
    """The message already uses application properties that diverting needs.

    Example: `except AliasInUseError as error: print(error.names)`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"the message cannot be diverted: it uses the application properties {', '.join(names)}; rename them"
        )
        self.names = tuple(names)


class AliasError(OperatorError):
    """A message in the backlog lacks an alias or has one of a wrong type (Y6)."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}", "Mend the message and resubmit it.")
        self.name = name


class RestoredMessage(NamedTuple):
    """A message from the backlog with the properties that its sender gave it."""

    path: str
    """The entity to which the sender sent the message."""
    message: MessageFields
    compression: str | None
    """The algorithm of a compressed body; None if the body is not compressed."""


def divert(message: MessageFields, path: str, compression: str | None = None) -> MessageFields:
    """Return the fields of the copy for the backlog. Raises AliasInUseError if the message uses a reserved property."""
    properties = message.application_properties
    if taken := [name for name in RESERVED_PROPERTIES if name in properties or name.encode() in properties]:
        raise AliasInUseError(taken)
    aliases: dict[PropertyName, object] = {PATH_PROPERTY: path}
    if message.session_id is not None:
        aliases[SESSION_ID_PROPERTY] = message.session_id
    if message.time_to_live is not None:
        aliases[TIME_TO_LIVE_PROPERTY] = Long(message.time_to_live * TICKS_PER_MILLISECOND)
    if message.scheduled_enqueue_time is not None:
        aliases[SCHEDULED_TIME_PROPERTY] = Timestamp(message.scheduled_enqueue_time)
    if compression is not None:
        aliases[COMPRESSION_PROPERTY] = compression
    return MessageFields(
        # The expiry time of a message with a time to live is cleared together with the time to live. Without a time to
        # live, the expiry time is not changed.
        absolute_expiry_time=message.absolute_expiry_time if message.time_to_live is None else None,
        application_properties={**properties, **aliases},
    )


def restore(message: MessageFields) -> RestoredMessage:
    """Undo `divert`. Raises AliasError if the path is missing or an alias has a wrong type (Y6).

    Values must have AMQP types. If an SDK decodes strings or timestamps into other types, its caller converts them.
    """
    aliases: dict[str, object] = {}
    properties: dict[PropertyName, object] = {}
    for name, value in message.application_properties.items():
        plain = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
        if plain in RESERVED_PROPERTIES:
            aliases[plain] = value
        else:
            properties[name] = value
    return RestoredMessage(
        _path(aliases),
        MessageFields(
            session_id=_string(aliases, SESSION_ID_PROPERTY, message.session_id),
            time_to_live=_milliseconds(aliases, message.time_to_live),
            scheduled_enqueue_time=_instant(aliases, message.scheduled_enqueue_time),
            absolute_expiry_time=message.absolute_expiry_time,
            application_properties=properties,
        ),
        _string(aliases, COMPRESSION_PROPERTY, None),
    )


def _path(aliases: Mapping[str, object]) -> str:
    path = _string(aliases, PATH_PROPERTY, None)
    if not path:
        raise AliasError(PATH_PROPERTY, "is missing" if path is None else "is empty")
    return path


def _string(aliases: Mapping[str, object], name: str, unset: str | None) -> str | None:
    if name not in aliases:
        return unset
    value = aliases[name]
    if not isinstance(value, str) or isinstance(value, Symbol | Char):
        raise _wrong_type(name, value, "a string")
    return value


def _milliseconds(aliases: Mapping[str, object], unset: int | None) -> int | None:
    if TIME_TO_LIVE_PROPERTY not in aliases:
        return unset
    value = aliases[TIME_TO_LIVE_PROPERTY]
    ticks = value.value if isinstance(value, Described) and value.descriptor == _TIMESPAN else value
    if not isinstance(ticks, int) or type(ticks) not in (int, Long) or ticks < 0:
        raise _wrong_type(TIME_TO_LIVE_PROPERTY, value, "a span in ticks: a long, or com.microsoft:timespan")
    # Rounded up, so that a message never expires too early.
    return -(-int(ticks) // TICKS_PER_MILLISECOND)


def _instant(aliases: Mapping[str, object], unset: int | None) -> int | None:
    if SCHEDULED_TIME_PROPERTY not in aliases:
        return unset
    value = aliases[SCHEDULED_TIME_PROPERTY]
    if isinstance(value, Timestamp):
        return int(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return (value - _EPOCH) // timedelta(milliseconds=1)
    raise _wrong_type(SCHEDULED_TIME_PROPERTY, value, "a timestamp")


def _wrong_type(name: str, value: object, wanted: str) -> AliasError:
    return AliasError(name, f"is {value!r}, not {wanted}")
