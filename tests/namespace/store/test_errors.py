"""Errors of SQLite and the file system become errors that say what, where, and what to do."""

import errno
import os
from pathlib import Path

import apsw
import pytest

from twinbus.errors import OperatorError
from twinbus.namespace.store.errors import (
    StoreConflictError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    store_error,
)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (apsw.CorruptError("database disk image is malformed"), StoreDamagedError),
        (apsw.NotADBError("file is not a database"), StoreDamagedError),
        (apsw.FullError("database or disk is full"), StoreFullError),
        (os_error(errno.ENOSPC), StoreFullError),
        (os_error(errno.EDQUOT), StoreFullError),
        (apsw.BusyError("database is locked"), StoreInUseError),
        (apsw.ConstraintError("UNIQUE constraint failed"), StoreConflictError),
        (apsw.ReadOnlyError("attempt to write a readonly database"), StoreError),
        (os_error(errno.EACCES), StoreError),
        (apsw.IOError("disk I/O error"), StoreError),
    ],
)
def test_an_error_names_the_file_and_says_what_to_do(error: apsw.Error | OSError, kind: type) -> None:
    told = store_error(error, Path("/data/primary.db"), "committing")
    assert type(told) is kind
    assert isinstance(told, OperatorError)
    assert "/data/primary.db" in told.text
    assert str(told) == (f"{told.text}. {told.hint}" if told.hint else told.text)
    assert told.hint or kind is StoreConflictError


def test_the_error_for_damage_says_how_to_recover_data() -> None:
    told = store_error(apsw.CorruptError("database disk image is malformed"), Path("/data/primary.db"), "reading")
    assert str(told) == (
        "The store is damaged (SQLite: database disk image is malformed): /data/primary.db. Keep a copy of all files "
        "primary.db* first. Then put a backup of all of them in their place. Or go on without what is damaged: twinbus "
        "serve --accept-damage lists what is lost, and keeps the damaged files. Or save by hand what can be read: "
        'sqlite3 primary.db ".recover" | sqlite3 primary-recovered.db'
    )
