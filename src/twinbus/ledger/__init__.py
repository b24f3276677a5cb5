"""The append-only record of every operation, message movement and state change. docs/ledger.md has the schema.

Pure modules import `twinbus.ledger.entries` instead: this package also loads the code that writes to the disk.
"""

from twinbus.ledger.balance import STAGE_EFFECTS, Balance, MessageKey, balance
from twinbus.ledger.dead_writers import SILENCE, dead_writers
from twinbus.ledger.entries import (
    ENTRY_KINDS,
    OK,
    SCHEMA_VERSION,
    UNIT_BYTES,
    UNKNOWN,
    Closed,
    Dropped,
    Ended,
    Entry,
    Fact,
    Gap,
    Intent,
    Metered,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
    State,
    billable_units,
    result_of_failure,
)
from twinbus.ledger.json_lines import EntryError, decode_entry, encode_entry, id_text, operation_prefix
from twinbus.ledger.ledger import Ledger, LedgerUnavailableError
from twinbus.ledger.options import LedgerOptionError, LedgerOptions
from twinbus.ledger.running_operation import RunningOperation
from twinbus.ledger.segments import (
    OPEN_SUFFIX,
    SEALED_SUFFIX,
    LedgerUnreadableError,
    LineProblem,
    list_segments,
    read_ledger,
)
from twinbus.ledger.verdict import Judgement, Verdict, judge_ledger

__all__ = [
    "ENTRY_KINDS",
    "OK",
    "OPEN_SUFFIX",
    "SCHEMA_VERSION",
    "SEALED_SUFFIX",
    "SILENCE",
    "STAGE_EFFECTS",
    "UNIT_BYTES",
    "UNKNOWN",
    "Balance",
    "Closed",
    "Dropped",
    "Ended",
    "Entry",
    "EntryError",
    "Fact",
    "Gap",
    "Intent",
    "Judgement",
    "Ledger",
    "LedgerOptionError",
    "LedgerOptions",
    "LedgerUnavailableError",
    "LedgerUnreadableError",
    "LineProblem",
    "MessageKey",
    "Metered",
    "Move",
    "Movement",
    "Operation",
    "Outcome",
    "Role",
    "RunningOperation",
    "SegmentHeader",
    "Stage",
    "State",
    "Verdict",
    "balance",
    "billable_units",
    "dead_writers",
    "decode_entry",
    "encode_entry",
    "id_text",
    "judge_ledger",
    "list_segments",
    "operation_prefix",
    "read_ledger",
    "result_of_failure",
]
