"""Decide how encoded messages share batches of limited size, and which messages fit into no batch (S9).

A batch holds each message as a data section. A batch has a fixed `envelope` beside its sections. Messages keep their
order, and as few batches as possible are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

# The head of a data section: three bytes for its descriptor, then constructor and length of a binary.
SHORT_SECTION_BYTES: Final = 5
LONG_SECTION_BYTES: Final = 8
_LONGEST_SHORT_BYTES: Final = 255


class BatchParts(NamedTuple):
    """Positions of messages, grouped into batches within the limit; and the messages that fit into no batch."""

    groups: tuple[tuple[int, ...], ...]
    oversized: tuple[int, ...]


def section_size(size: int) -> int:
    """Return what an encoded message of this size takes in a batch."""
    return size + (SHORT_SECTION_BYTES if size <= _LONGEST_SHORT_BYTES else LONG_SECTION_BYTES)


def split_batch(sizes: Sequence[int], limit: int, *, envelope: int = 0) -> BatchParts:
    """Split encoded messages into as few batches as keep their order. `envelope` is what a batch takes beside them.

    A message that fits the limit alone, but not as a section of a batch, forms a group of its own.
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
        # Negative after a message that is larger than the room: no other message joins its group.
        room -= section
    if group:
        groups.append(tuple(group))
    return BatchParts(tuple(groups), tuple(oversized))
