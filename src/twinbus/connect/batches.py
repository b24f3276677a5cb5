"""Many made few: messages packed into batches for sending, delivery ids joined into runs for settling; and few made
fewer, where one of many spoils a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from twinbus.amqp.message_builder import batch_payload, message
from twinbus.amqp.message_sections import BATCH_FORMAT, Properties
from twinbus.amqp.routing_fields import read_envelope
from twinbus.connect.errors import MessageSizeExceededError

T = TypeVar("T")
R = TypeVar("R")

_SMALL: Final = 256  # a data section takes 5 bytes more than its content below this, 8 from there on
_EMPTY_BODY: Final = len(b"\x00\x53\x77\x40")


@dataclass(frozen=True, slots=True)
class Batch:
    """One transfer; the messages it carries are `messages[first:end]` of what was packed."""

    payload: bytes
    message_format: int
    first: int
    end: int


def pack(messages: Sequence[bytes], limit: int) -> list[Batch]:
    """Transfers of at most `limit` bytes that carry all messages, in their order."""
    batches: list[Batch] = []
    first, size = 0, 0
    for index, raw in enumerate(messages):
        length = len(raw)
        if length > limit:
            raise MessageSizeExceededError(f"a message of {length} bytes; the link takes {limit}")
        needed = length + (5 if length < _SMALL else 8)
        if index == first:
            size = len(_envelope(raw)) + needed
        elif size + needed > limit:
            batches.append(_batch(messages, first, index))
            first, size = index, len(_envelope(raw)) + needed
        else:
            size += needed
    if first < len(messages):
        batches.append(_batch(messages, first, len(messages)))
    return batches


def _batch(messages: Sequence[bytes], first: int, end: int) -> Batch:
    if end - first == 1:
        return Batch(messages[first], 0, first, end)
    payload = batch_payload(messages[first:end], before=_envelope(messages[first]))
    return Batch(payload, BATCH_FORMAT, first, end)


def _envelope(raw: bytes) -> bytes:
    """The sections before the messages: who they are for, as the first of them says it; the service routes by it."""
    inner = read_envelope(raw)
    if inner.message_id is None and inner.group_id is None and inner.partition_key is None:
        return b""
    annotations = None if inner.partition_key is None else {"x-opt-partition-key": inner.partition_key}
    properties = Properties(message_id=inner.message_id, group_id=inner.group_id)
    return message(message_annotations=annotations, properties=properties)[:-_EMPTY_BODY]


def runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive delivery ids. The ids of a run that wraps around make two runs."""
    found: list[tuple[int, int]] = []
    first = last = -2
    for number in sorted(ids):
        if number != last + 1:
            if last >= 0:
                found.append((first, last))
            first = number
        last = number
    if last >= 0:
        found.append((first, last))
    return found


async def halving(
    parts: Sequence[T], ask: Callable[[Sequence[T]], Awaitable[R]], refusal: type[Exception]
) -> list[tuple[Sequence[T], R | None]]:
    """Asks for all; where it is refused for one of them, for each half. None is the answer to a single one refused."""
    answers: list[tuple[Sequence[T], R | None]] = []
    waiting = [parts] if parts else []
    while waiting:
        part = waiting.pop()
        try:
            answers.append((part, await ask(part)))
        except refusal:
            if len(part) == 1:
                answers.append((part, None))
            else:
                middle = len(part) // 2
                waiting += (part[middle:], part[:middle])
    return answers
