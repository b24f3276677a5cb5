"""How diverted messages share transfers, and which fit none (S9). Sizes come in; encoding is the driver's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

# A batch holds each message as a data section: three bytes for its descriptor, then a binary's constructor and length.
SHORT_SECTION: Final = 5
LONG_SECTION: Final = 8
LONGEST_SHORT: Final = 255


class Parts(NamedTuple):
    """Groups of positions, in order, each within the limit; and the positions of messages too large for any."""

    groups: tuple[tuple[int, ...], ...]
    oversized: tuple[int, ...]


def section_size(size: int) -> int:
    """What an encoded message of this size takes in a batch."""
    return size + (SHORT_SECTION if size <= LONGEST_SHORT else LONG_SECTION)


def split(sizes: Sequence[int], limit: int, *, envelope: int = 0) -> Parts:
    """As few parts as keep the order. `envelope` is what a batch takes beside its sections.

    A message that fits alone, but not as a section, goes alone: it needs no envelope.
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
        # Below zero after one that is larger than the room: nothing joins it.
        room -= section
    if group:
        groups.append(tuple(group))
    return Parts(tuple(groups), tuple(oversized))


class Tally(NamedTuple):
    """What became of a batch, by the ids of its messages: what PartialSendError tells when a part fails."""

    safe: tuple[object, ...]
    unsafe: tuple[object, ...]

    @property
    def partial(self) -> bool:
        """Some are safe and some are not; otherwise the part's own error, or success, tells it all."""
        return bool(self.safe) and bool(self.unsafe)


def tally(ids: Sequence[object], parts: Parts, taken: int) -> Tally:
    """After the first `taken` groups were taken and the next one failed, or none is left."""
    safe = {position for group in parts.groups[:taken] for position in group}
    return Tally(
        tuple(identity for position, identity in enumerate(ids) if position in safe),
        tuple(identity for position, identity in enumerate(ids) if position not in safe),
    )
