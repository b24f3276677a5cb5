"""What a `$management` request becomes: its map read with names in the errors, and the event with its reply.

Which operation means what is in operations and rule_operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple
from uuid import UUID

from twinbus.amqp.errors import DecodeError
from twinbus.amqp.routing_fields import Envelope, read_envelope
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.events import Event
from twinbus.namespace.front.requests import Reply

MAX_LONG: Final = 2**63 - 1
MAX_INT: Final = 2**31 - 1
NOTHING: Final = Reply(204, "No content")

Respond = Callable[[Any], Reply]


class BadRequestError(Exception):
    """The request's body is not what its operation takes."""


class Translated(NamedTuple):
    """What a request asks of the engine, the claim it needs, and how the engine's result becomes a reply.

    `held` is the session that the asker has to hold by a link of the same connection: that somebody does is not enough.
    """

    claim: Claim
    event: Callable[[Callable[[Any], None]], Event]
    respond: Respond
    held: str | None = None


class Body:
    """A request's map, read with names in the errors."""

    def __init__(self, operation: str, entries: dict[Any, Any]) -> None:
        self._operation = operation
        self._entries = {str(key): value for key, value in entries.items()}

    def number(self, name: str, default: int | None = None, least: int = -MAX_LONG - 1, most: int = MAX_LONG) -> int:
        value = self._entries.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a number, not {value!r}.")
        if not least <= value <= most:
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be from {least} to {most}, not {value!r}.")
        return int(value)

    def text(self, name: str) -> str | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a string, not {value!r}.")
        return value

    def needed_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise BadRequestError(f"'{self._operation}' needs '{name}'.")
        return value

    def blob(self, name: str) -> bytes | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, bytes):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be binary.")
        return value

    def properties(self, name: str) -> dict[str, Any] | None:
        value = self._entries.get(name)
        if value is not None and not isinstance(value, dict):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a map.")
        return {str(key): entry for key, entry in value.items()} if value else None

    def many(self, name: str, kind: type) -> tuple[Any, ...]:
        value = self._entries.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(entry, kind) for entry in value):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a list of {kind.__name__}.")
        return tuple(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        numbers = self.many(name, int)
        if any(isinstance(number, bool) or not 0 <= number <= MAX_LONG for number in numbers):
            raise BadRequestError(f"'{name}' of '{self._operation}' has to be a list of sequence numbers.")
        return tuple(map(int, numbers))

    def tokens(self, name: str) -> tuple[bytes, ...]:
        return tuple(token.bytes_le for token in self.many(name, UUID))

    def messages(self) -> tuple[Envelope, ...]:
        envelopes = []
        for entry in self.many("messages", dict):
            raw = {str(key): value for key, value in entry.items()}.get("message")
            if not isinstance(raw, bytes):
                raise BadRequestError(f"Each of 'messages' of '{self._operation}' needs 'message' as binary.")
            try:
                envelopes.append(read_envelope(raw))
            except DecodeError as error:
                raise BadRequestError(f"A message of '{self._operation}' is malformed: {error.description}") from error
        return tuple(envelopes)
