"""Errors of a store. Each error names the file and says what the operator can do.

The cause is the disk or the file, which the operator can repair, and not a wrong call by the namespace.
"""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Final

import apsw

from twinbus.errors import OperatorError

_SHOWN = 20
"""Findings in the text of an error."""

DAMAGE_ERRORS: Final = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError, apsw.SQLError, apsw.MismatchError)
"""Errors of SQLite that only a damaged file causes: the statements are always the same."""

TOO_LARGE: Final = (apsw.NoMemError, apsw.TooBigError)
"""Errors of SQLite for a length that no value of a store has. They may have another cause too."""

UNREADABLE: Final = (TypeError, ValueError, AttributeError, OverflowError, struct.error)
"""Errors of values that have another type, or text that is not UTF-8."""


class StoreError(OperatorError):
    """The store failed. If it failed during a commit, nothing of the commit was stored."""

    def __init__(self, what: str, path: Path | None = None, hint: str = "") -> None:
        super().__init__(f"{what}: {path}" if path else what, hint)
        self.path = path


class StoreInUseError(StoreError):
    """Another process, or another store object of this process, uses the file."""


class StoreDamagedError(StoreError):
    """The file does not contain what the store wrote."""


class StoreVersionError(StoreError):
    """A newer version of Twinbus wrote the file, with a layout that this version does not know."""


class StoreGoneError(StoreError):
    """A file of the store, or its folder, was removed or replaced while the store was open."""

    def __init__(self, what: str, path: Path) -> None:
        super().__init__(
            f"{what} was removed or replaced while it was in use",
            path,
            "Nothing was acknowledged since. Put the data folder back as it was (if it was renamed, rename it back;"
            " otherwise use a backup), then start again. A start without the folder begins with an empty namespace.",
        )


class StoreFullError(StoreError):
    """The disk is full."""


class StoreConflictError(StoreError):
    """A commit would overwrite a stored row: a second writer, or a bug. Nothing of the commit was stored."""


def damaged_error(path: Path, *what: str) -> StoreDamagedError:
    """Return the error for a damaged file: what was found, and how to go on."""
    shown = "; ".join(what[:_SHOWN]) + (f"; and {len(what) - _SHOWN} more" if len(what) > _SHOWN else "")
    return StoreDamagedError(
        f"The store is damaged ({shown})",
        path,
        f"Keep a copy of all files {path.name}* first. Then put a backup of all of them in their place. Or go on"
        " without what is damaged: twinbus serve --accept-damage lists what is lost, and keeps the damaged files. Or"
        f" save by hand what can be read: {recover_command(path)}",
    )


def recover_command(path: Path) -> str:
    """Return the shell command that copies what SQLite can read of a damaged file into a new file."""
    return f'sqlite3 {path.name} ".recover" | sqlite3 {path.stem}-recovered{path.suffix}'


def is_cut_short(error: Exception) -> bool:
    """Whether the file ends in the middle of a page. SQLite reports this as an error of the disk."""
    return isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHORT_READ


def damage_text(error: Exception) -> str:
    """Return the text of an error of SQLite that damage caused, without the name of its kind."""
    if is_cut_short(error):
        return "it is cut short, in the middle of a page"
    return f"SQLite: {str(error).partition(': ')[2] or error}"


def store_error(error: apsw.Error | OSError, path: Path, doing: str) -> StoreError:
    """Return the StoreError for an error of SQLite or of the file system that occurred while `doing`."""
    if isinstance(error, DAMAGE_ERRORS) or is_cut_short(error):
        return damaged_error(path, damage_text(error))
    match error:
        case apsw.FullError() | OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return StoreFullError(f"The disk is full while {doing}", path, "Make room, then start again.")
        case apsw.ConstraintError():
            return StoreConflictError(f"A stored row would be overwritten while {doing} ({error})", path)
        case apsw.ReadOnlyError() | apsw.PermissionsError() | PermissionError() | OSError(errno=errno.EROFS):
            return StoreError(
                f"The store cannot be written while {doing} ({error})",
                path,
                "Mount the file system for writing, and give this user the right to the file and its folder.",
            )
        case apsw.CantOpenError():
            return StoreError(
                f"The store cannot be opened while {doing} ({error})",
                path,
                "Check that the folder exists and may be written.",
            )
        case apsw.BusyError() | apsw.LockedError():
            return StoreInUseError(
                f"Another program has the store locked while {doing}", path, "Close what has the file open."
            )
        case apsw.NoMemError():
            return StoreError(f"Out of memory while {doing}", path, "Give the process more memory.")
        case _:
            return StoreError(
                f"The store failed while {doing} ({error})",
                path,
                "Check the disk (dmesg, free space), then start again: what was acknowledged is on disk.",
            )
