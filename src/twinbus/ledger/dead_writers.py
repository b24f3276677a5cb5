"""Writers that have ended, and the open segments that they left.

A writer locks its open segment until it seals the segment or its process ends, however the process ends. So on the same
host a free lock proves that the writer is dead. The lock of a process on another host may not be visible here, and a
copied segment has no lock. There a writer counts as dead after a time of silence (L1).

A writer that opens a segment seals the segments that dead writers left. As the last line it appends an `ended` entry:
a program that sees only the sealed segments then knows that this writer is dead.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from twinbus.ledger.entries import Closed, Ended
from twinbus.ledger.failing_marks import failing_writers, is_abandoned
from twinbus.ledger.json_lines import EntryError, decode_entry, encode_entry
from twinbus.ledger.segments import Segment, list_segments, sync_folder, write_all
from twinbus.storage_location import StorageLocation

_log = logging.getLogger("twinbus.ledger")

SILENCE: Final = timedelta(minutes=15)
"""A writer on another host counts as dead after this time without a write, if the caller gives no other time."""
SEALED_AT_ONCE: Final = 32
"""How many segments `seal_abandoned` seals in one call. Each takes a sync, and a flush waits for them."""
_CHUNK: Final = 64 * 1024


def own_host() -> str:
    """Returns the name of this host as it is in the names of segments."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:63] or "unknown"


# --- which writers are dead ------------------------------------------------------------------------------------------


def dead_writers(
    directory: str | os.PathLike[str], *, silence: timedelta = SILENCE, now: float | None = None
) -> frozenset[str]:
    """Returns the names of the writers in a directory that will not write again. Changes nothing.

    A writer is dead if its last line is `closed` or `ended`. A writer of this host is also dead if no process locks its
    open segment, or the mark that it cannot write (`failing_marks`). No lock shows the state of a writer on another
    host, or of a shipped segment. Such a writer counts as dead if the time of its newest segment is `silence` before
    `now` (seconds since the epoch; the default is the current time). A writer renews this time while it is idle; the
    time of a shipped segment stays as it is.

    The current time is that of the file system, if this process may make a file in the directory: the clock of this
    machine may be wrong. Otherwise it is the time of this machine.

    `directory` may be the URL of an object store. The time of a segment is there the time when it was shipped.
    """
    if (location := StorageLocation.parse(directory)).is_url:
        from twinbus.ledger.shipped_ledger import ShippedLedger  # noqa: PLC0415 - rarely needed

        return ShippedLedger(location).dead_writers((time.time() if now is None else now) - silence.total_seconds())
    newest = _newest_segments(Path(directory))
    silent_since = (time.time() if now is None else now) - silence.total_seconds()
    host = own_host()
    dead = {writer for writer, segment in newest.items() if _is_dead(segment, host, silent_since)}
    if dead and now is None:
        # Asked only if a writer is dead: most of these have ended, whatever the time is.
        silent_since = _time_of_file_system(Path(directory)) - silence.total_seconds()
        dead = {writer for writer in dead if _is_dead(newest[writer], host, silent_since)}
    failing = [writer for writer in failing_writers(Path(directory)) if _host_of(writer) == host]
    return frozenset(dead).union(writer for writer in failing if is_abandoned(Path(directory), writer))


def unfinished_writers(directory: str | os.PathLike[str]) -> frozenset[str]:
    """Returns the names of the writers whose last segment is not in this directory.

    The newest segment of such a writer is sealed, and its last line is neither `closed` nor `ended`. A writer opens its
    next segment before it seals one. So this is a copy of segments, and the next one is elsewhere, or a Twinbus wrote
    the ledger that sealed its segment when it was idle.
    """
    newest = _newest_segments(Path(directory))
    return frozenset(writer for writer, segment in newest.items() if not segment.is_open and not _is_finished(segment))


def _is_finished(segment: Segment) -> bool:
    try:
        with segment.path.open("rb") as file:
            return _has_ended(file.fileno())
    except OSError:
        return False  # this user may not read it, or it was removed for the disk budget


def _newest_segments(directory: Path) -> dict[str, Segment]:
    newest: dict[str, Segment] = {}
    for segment in list_segments(directory):
        known = newest.get(segment.writer)
        if known is None or segment.number >= known.number:
            newest[segment.writer] = segment
    return newest


def _time_of_file_system(directory: Path) -> float:
    """Returns the time that a file gets that is made in this directory now; the time of this machine, if none can be.

    The file has no name, or only for a moment.
    """
    try:
        with TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def _host_of(writer: str) -> str:
    return writer.partition("-")[2].rsplit("-", 2)[0]


def _is_dead(segment: Segment, host: str, silent_since: float) -> bool:
    if segment.is_open:
        try:
            with _locked(segment.path, os.O_RDONLY, fcntl.LOCK_SH) as file:
                if file is None:
                    return False
                return segment.host == host or os.fstat(file).st_mtime <= silent_since
        except OSError:
            pass  # the segment was sealed since the listing, or this user may not read it
    for path in (segment.sealed_path, segment.path):
        try:
            with path.open("rb") as found:
                status = os.fstat(found.fileno())
                return _has_ended(found.fileno()) or status.st_mtime <= silent_since
        except OSError:
            continue
    return False


def _has_ended(file: int) -> bool:
    """Returns whether the last whole line is `closed` or `ended`."""
    end = _end_of_last_line(file)
    start = max(0, end - _CHUNK)
    return ends_writer(os.pread(file, end - start, start))


def ends_writer(tail: bytes) -> bool:
    """Returns whether the last line of these bytes, the end of a segment, is `closed` or `ended`."""
    line = tail.removesuffix(b"\n").rpartition(b"\n")[2]
    try:
        return isinstance(decode_entry(line), Closed | Ended)
    except EntryError:
        return False


# --- sealing ---------------------------------------------------------------------------------------------------------


def seal_abandoned(segments: Iterator[Segment], host: str, silent_seconds: float, by: str) -> bool:
    """Seals open segments whose writer has ended, at most SEALED_AT_ONCE. Returns whether it has looked at all of them.

    `by` is the name of the writer that does this. On this host, a writer has ended if no process locks its segment. The
    lock of a process on another host may not be visible here, so a segment of another host must also have had no write
    for `silent_seconds`.
    """
    sealed: list[Segment] = []
    for segment in segments:
        try:
            may_have_ended = segment.host == host or time.time() - segment.path.stat().st_mtime > silent_seconds
            if may_have_ended and _seal(segment, by):
                sealed.append(segment)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("ledger: %s is left open by its writer and cannot be sealed: %s", segment.path, error)
        if len(sealed) == SEALED_AT_ONCE:
            break
    if sealed:
        directory = sealed[0].path.parent
        try:
            sync_folder(directory)
        except OSError as error:  # after a power failure these segments may be open again
            _log.warning("ledger: %s cannot be synced: %s", directory, error)
    return len(sealed) < SEALED_AT_ONCE


def _seal(segment: Segment, by: str) -> bool:
    """Seals a segment without syncing its new name. Returns False if a process locks the segment."""
    with _locked(segment.path, os.O_RDWR | os.O_APPEND, fcntl.LOCK_EX) as file:
        if file is None:
            return False
        os.ftruncate(file, _end_of_last_line(file))
        ended = Ended(
            at=int(time.time() * 1000),
            # The same id if another writer appended this line too and ended before it could rename the file.
            id=f"{segment.writer.rpartition('-')[2]}-ended-{segment.number}",
            writer=segment.writer,
            by=by,
            segment=segment.number,
        )
        write_all(file, encode_entry(ended).encode())
        os.fsync(file)
        segment.path.rename(segment.sealed_path)
    return True


@contextmanager
def _locked(path: Path, flags: int, lock: int) -> Iterator[int | None]:
    """Opens and locks the file at a path; None if another process has locked it.

    Raises FileNotFoundError if the file is not at this path any more: its writer sealed it.
    """
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        # The writer renames its segment before it releases the lock.
        if os.fstat(file).st_ino != path.stat().st_ino:
            raise FileNotFoundError(path)
        yield file
    finally:
        # Closing is not enough if another thread has forked: its child has the file open, too.
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _end_of_last_line(file: int) -> int:
    """Returns the position after the last newline."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _CHUNK)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
