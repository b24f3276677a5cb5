"""Finds commits in SQLite's write-ahead log that SQLite ignores because the log is damaged before them.

SQLite reads the log up to the first frame whose checksum does not match. What comes after it is either the rest of a
commit that a crash interrupted, or one or more complete commits behind damage. A commit is synced before the next one
is written. So if a frame follows the last frame of a commit, that commit was complete, and the store had acknowledged
it. Only the commit that was written last can be one that a power loss interrupted.

The layout of the log: a header of 32 bytes, then frames of 24 bytes and a page each. Header and frames carry two random
numbers ("salts"), which change when SQLite starts the log again from its beginning. A frame with other salts is left
over from before. The last frame of a commit has the size of the database in its header; in other frames the size is 0.
See https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Final

_HEADER: Final = Struct(">8I")
_FRAME: Final = Struct(">6I")
_MAGICS: Final = {0x377F0682: "<", 0x377F0683: ">"}


@dataclass(frozen=True, slots=True)
class LogFrame:
    """One frame of the log. `ends_commit` is True for the last frame of a commit."""

    page: int
    ends_commit: bool
    is_current: bool
    """Whether the frame has the salts of the log, so that it was written since the log was started."""


@dataclass(frozen=True, slots=True)
class Log:
    """The frames of a log. An empty or missing log has no frames."""

    header_is_damaged: bool
    frames: tuple[LogFrame, ...]

    def lost_commits(self, valid_frames: int) -> int:
        """Return how many acknowledged commits are behind the frames that SQLite can read."""
        behind = [frame for frame in self.frames[valid_frames:] if frame.is_current]
        return sum(frame.ends_commit for frame in behind[:-1])

    def pages(self, valid_frames: int) -> set[int]:
        """Return the pages that are in the readable part of the log."""
        return {frame.page for frame in self.frames[:valid_frames]}


def read_log(store: Path, page_size: int) -> Log:
    """Read the headers of the frames in the log of a store. Call this before the store is opened."""
    path = store.with_name(store.name + "-wal")
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Log(False, ())
    with file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return Log(False, ())  # the log was being started
        salts = _HEADER.unpack(header)[4:6]
        frames = []
        at = _HEADER.size
        while len(found := os.pread(file.fileno(), _FRAME.size, at)) == _FRAME.size:
            page, size, *rest = _FRAME.unpack(found)
            frames.append(LogFrame(page, size > 0, tuple(rest[:2]) == salts))
            at += _FRAME.size + page_size
        # SQLite syncs the header before it writes the first frame. So a header without frames may be unfinished.
        return Log(bool(frames) and not _is_valid(header), tuple(frames))


def _is_valid(header: bytes) -> bool:
    """Whether the checksum of the header is right: two sums over its words, in the byte order that its magic names."""
    order = _MAGICS.get(int.from_bytes(header[:4], "big"))
    if order is None:
        return False
    words = Struct(order + "6I").unpack(header[:24])
    first = second = 0
    for even, odd in zip(words[::2], words[1::2], strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return (first, second) == _HEADER.unpack(header)[6:8]
