"""The page onto the disk: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from twinbus.errors import OperatorError


def refuse_unwritable(path: Path) -> None:
    """Told before the work, not after it."""
    if path.is_dir():
        raise OperatorError(f"{path} is a folder", "Name a file: -o report.html.")
    if not path.parent.is_dir():
        raise OperatorError(f"{path.parent} is no folder", "Make it first, or name another place for the report.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OperatorError(f"{path.parent} cannot be written by this user", "Name another place for the report.")


def write_page(path: Path, text: str) -> None:
    """In the place of what was there before; who reads that meanwhile keeps it."""
    refuse_unwritable(path)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        made.unlink(missing_ok=True)
