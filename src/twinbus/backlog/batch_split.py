"""Decide how encoded messages share batches of limited size, and which messages fit into no batch (S9).

A batch holds each message as a data section. Beside the sections, a batch has an `envelope` of fixed size. Messages
keep their order, and as few batches as possible are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

# Bytes before the message in a data section: three for the descriptor, then constructor and length of a binary.
SHORT_SECTION_BYTES: Final = 5
LONG_SECTION_BYTES: Final = 8
_LONGEST_SHORT_BYTES: Final = 255

BATCH_ENVELOPE_BYTES: Final = 1024
"""The bytes of a batch beside its messages: the ids of the first message, each of at most 128 characters."""


class BatchParts(NamedTuple):
    """Positions of messages. `groups` has one tuple for each batch; `oversized` are the messages that fit into none."""

    groups: tuple[tuple[int, ...], ...]
    oversized: tuple[int, ...]


def section_size(size: int) -> int:
    """Return how many bytes an encoded message of `size` bytes takes in a batch."""
    return size + (SHORT_SECTION_BYTES if size <= _LONGEST_SHORT_BYTES else LONG_SECTION_BYTES)


def split_batch(sizes: Sequence[int], limit: int, *, envelope: int = 0) -> BatchParts:
    """Split encoded messages, in their order, into as few batches as possible. All sizes are in bytes.

    `envelope` is the size of a batch without messages. A message that fits the limit alone, but not as a section of a
    batch, forms a group of its own.
    """
    groups: list[tuple[int, ...]] = []
    oversized: list[int] = []
    group: list[int] = []
    room = limit - envelope
    for position, size in enumerate(sizes):
        if size > limit:
            oversized.append(position)
            continue
        section = section_size(size)
        if section > room and group:
            groups.append(tuple(group))
            group, room = [], limit - envelope
        group.append(position)
        # `room` is negative after a message that is larger than the room: no other message joins its group.
        room -= section
    if group:
        groups.append(tuple(group))
    return BatchParts(tuple(groups), tuple(oversized))
