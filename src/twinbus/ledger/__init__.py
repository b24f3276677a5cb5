"""The append-only record of every operation, message movement and state change. docs/ledger.md has the schema."""

from twinbus.ledger.balance import Balance, Message, balance
from twinbus.ledger.entries import OK, UNKNOWN, Entry, Move, Role, Stage
from twinbus.ledger.ledger import Ledger, LedgerUnavailableError
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.running_operation import RunningOperation
from twinbus.ledger.segments import LedgerUnreadableError, Problem, read_ledger

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
