"""The append-only record of every operation, message movement and state change. docs/ledger.md has the schema."""

from twinbus.ledger.entries import OK, UNKNOWN, Entry, Move, Role, Stage
from twinbus.ledger.errors import LedgerUnavailableError, LedgerUnreadableError
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.recorder import Ledger
from twinbus.ledger.running import RunningOperation

__all__ = [
    "OK",
    "UNKNOWN",
    "Entry",
    "Ledger",
    "LedgerOptions",
    "LedgerUnavailableError",
    "LedgerUnreadableError",
    "Move",
    "Role",
    "RunningOperation",
    "Stage",
]
