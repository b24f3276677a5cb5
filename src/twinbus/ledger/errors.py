"""What the ledger raises. When, is decided elsewhere."""

from __future__ import annotations

from pathlib import Path

from twinbus.errors import CallerError, OperatorError


class LedgerUnavailableError(OperatorError):
    """The ledger cannot be written, and `on_error` is "stop"."""

    def __init__(self, directory: Path, cause: str) -> None:
        super().__init__(
            f"the ledger in {directory} cannot be written: {cause}",
            "Make room, or put the directory back; writing is tried again every second.",
        )
        self.directory = directory
        self.cause = cause


class LedgerOptionError(CallerError, ValueError):
    """An option of the ledger is out of range or of a wrong type."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}; it must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed


class EntryError(CallerError, ValueError):
    """A line that is no entry of this schema."""


class LedgerUnreadableError(OperatorError):
    """A line of a segment is no entry; nothing is passed over in silence."""

    def __init__(self, file: Path, line: int, cause: str) -> None:
        super().__init__(f"{file}, line {line}: {cause}", "Read it with a newer Twinbus, or mend the file by hand.")
        self.file = file
        self.line = line
        self.cause = cause
