"""Who may read a ledger: its owner alone, or the group if the folder is shared with the group (X4).

A ledger has the names of entities and the ids of messages, but no bodies and no keys.
"""

from __future__ import annotations

import stat
from pathlib import Path


def make_ledger_folder(directory: Path) -> None:
    """Makes the folder of a ledger, for its owner alone, if it does not exist. An existing folder is not changed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def file_mode(directory: Path) -> int:
    """Returns the permissions of a new file in the folder of a ledger: for its owner alone.

    If the group may write to the folder, several users share the ledger on purpose: then the group may read the file.
    """
    return 0o640 if directory.stat().st_mode & stat.S_IWGRP else 0o600
