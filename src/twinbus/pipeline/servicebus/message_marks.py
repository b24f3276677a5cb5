"""The annotations that the broker sets on a message: its number, its times, its state.

Planning, filtering and completing need only these. So they are read from the encoded message, without its other parts,
and also from a message whose other parts cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from twinbus.amqp import (
    MESSAGE_ANNOTATIONS,
    AmqpError,
    decode,
    read_map_header,
    read_routing_fields,
    section_at,
    skip,
)
from twinbus.connect import MessageState, ReceivedMessage

SEQUENCE_NUMBER: Final = "x-opt-sequence-number"
ENQUEUED: Final = "x-opt-enqueued-time"
SCHEDULED: Final = "x-opt-scheduled-enqueue-time"
PARTITION_KEY: Final = "x-opt-partition-key"
STATE: Final = "x-opt-message-state"
LOCKED_UNTIL: Final = "x-opt-locked-until"
_BROKERS: Final = {
    name.encode(): name for name in (SEQUENCE_NUMBER, ENQUEUED, SCHEDULED, PARTITION_KEY, STATE, LOCKED_UNTIL)
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# The first and the last millisecond of the years 1 to 9999, in ms since 1970.
_FIRST_INSTANT, _LAST_INSTANT = -62_135_596_800_000, 253_402_300_799_999
# Type codes of AMQP. The key of a broker's annotation is usually a symbol of at most 255 bytes, its value one of the
# other two types.
_SYMBOL, _LONG, _TIMESTAMP = 0xA3, 0x81, 0x83


class MessageStart(NamedTuple):
    """The values of a message before its properties that only a row needs, and where its properties begin."""

    state: str | None
    """The value of the column `state`; None if Twinbus does not know the state."""
    scheduled: int | None
    """Scheduled enqueue time in ms."""
    partition_key: str | None
    time_to_live: int | None
    delivery_count: int | None
    end: int


class MessageMarks(NamedTuple):
    """The values of a message that a read needs before it makes a row of the message."""

    number: int | None
    """The sequence number; None if it cannot be decoded."""
    enqueued: int | None
    """Enqueued time in ms."""
    state: MessageState | None
    """None if the broker reports a state that Twinbus does not know."""
    locked_until: int | None
    """End of the receiver's lock in ms."""
    start: MessageStart | None = None
    """What else was read from the start of the message; None if only its annotations were read."""

    @property
    def is_active(self) -> bool:
        return self.state is MessageState.ACTIVE

    @property
    def enqueued_time(self) -> datetime | None:
        """The value of the column `enqueued_time`."""
        if self.enqueued is None or not _FIRST_INSTANT <= self.enqueued <= _LAST_INSTANT:
            return None
        return _EPOCH + timedelta(milliseconds=self.enqueued)


def plain_marks(raw: bytes) -> MessageMarks:
    """Returns the marks of any message, also of a damaged one."""
    found = broker_annotations(raw)
    number, enqueued, locked_until = found.get(SEQUENCE_NUMBER), found.get(ENQUEUED), found.get(LOCKED_UNTIL)
    return MessageMarks(
        number if isinstance(number, int) else None,
        enqueued if isinstance(enqueued, int) else None,
        known_state(found.get(STATE, 0)),
        locked_until if isinstance(locked_until, int) else None,
    )


def session_of(message: ReceivedMessage) -> str | None:
    """Returns the session of a message; None if it has none, or if it cannot be decoded."""
    try:
        return read_routing_fields(message.raw).group_id
    except AmqpError:
        return None


_STATES: Final = {state.value: state for state in MessageState}
STATE_TEXTS: Final = {state: state.name.lower() for state in MessageState}
"""The value of the column `state` for each state."""


def known_state(value: Any) -> MessageState | None:
    """Returns the state of an annotation; None if Twinbus does not know it."""
    return _STATES.get(int(value)) if isinstance(value, int) else None


def broker_annotations(raw: bytes) -> dict[str, Any]:
    """Returns the annotations that the broker sets, without those that cannot be decoded.

    Decodes no other annotations: even if an annotation of the sender cannot be decoded, the sequence number must be
    returned.
    """
    found: dict[str, Any] = {}
    try:
        pos = 0
        while pos < len(raw):
            code, start, pos = section_at(raw, pos)
            if code == MESSAGE_ANNOTATIONS:
                _take_annotations(raw, start, found)
                break
    except (AmqpError, IndexError):
        pass  # the column `error` of the row names the broken section
    return found


def start_sections(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields code, start of the value, and end of each section before the properties: header and annotations.

    Raises AmqpError if a section is broken, and ValueError if they are not in their order.
    """
    last = pos = 0
    while pos < len(raw):
        code, start, end = section_at(raw, pos)
        if code > MESSAGE_ANNOTATIONS:
            return
        if code <= last:
            raise ValueError("the sections are not in their order")
        yield code, start, end
        last, pos = code, end


def annotations_in(raw: bytes, start: int) -> dict[str, Any]:
    """Returns the annotations that the broker sets from the section whose map is at `start`.

    Raises AmqpError or IndexError if the map is broken.
    """
    found: dict[str, Any] = {}
    _take_annotations(raw, start, found)
    return found


def _take_annotations(raw: bytes, start: int, found: dict[str, Any]) -> None:
    count, at = read_map_header(raw, start)
    for _ in range(count >> 1):
        at = _take_annotation(raw, at, found)


def _take_annotation(raw: bytes, key: int, found: dict[str, Any]) -> int:
    """Adds the annotation at `key` if it is one of the broker's. Returns the position after it."""
    if raw[key] == _SYMBOL:  # usual, and its bytes are enough
        value = key + 2 + raw[key + 1]
        name = _BROKERS.get(raw[key + 2 : value])
    else:
        value, name = skip(raw, key), annotation_name(raw, key)
    end = skip(raw, value)
    if name is not None:
        if raw[value] in {_LONG, _TIMESTAMP}:
            found[name] = int.from_bytes(raw[value + 1 : end], signed=True)
        else:
            with suppress(AmqpError):  # as if the broker had not set it
                found[name] = decode(raw, value)[0]
    return end


def annotation_name(raw: bytes, key: int) -> str | None:
    """Returns the name of the annotation at `key` if it is one of the broker's."""
    try:
        name = decode(raw, key)[0]
    except AmqpError:
        return None
    return _BROKERS.get(name.encode()) if isinstance(name, str) else None


def microseconds(millis: int) -> int:
    """Returns the instant of a column of Spark. Raises ValueError if the column cannot have it."""
    if not _FIRST_INSTANT <= millis <= _LAST_INSTANT:
        raise ValueError(f"{millis} ms since 1970 is not within the years 1 to 9999")
    return millis * 1000
