"""The append-only record of every operation, message movement and state change. docs/ledger.md has the schema."""

from twinbus.ledger.balance import Balance, Message, balance
from twinbus.ledger.entries import OK, UNKNOWN, Entry, Move, Role, Stage
from twinbus.ledger.errors import LedgerUnavailableError, LedgerUnreadableError
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.reading import Problem, read_ledger
from twinbus.ledger.recorder import Ledger
from twinbus.ledger.running import RunningOperation

__all__ = [
    "OK",
    "UNKNOWN",
    "Balance",
    "Entry",
    "Ledger",
    "LedgerOptions",
    "LedgerUnavailableError",
    "LedgerUnreadableError",
    "Message",
    "Move",
    "Problem",
    "Role",
    "RunningOperation",
    "Stage",
    "balance",
    "read_ledger",
]
