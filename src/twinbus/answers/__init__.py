"""Answers from the result tables of the pipeline, without Spark and without a JVM (D7). Needs the extra `tables` only.

The first use of a name below loads the module that defines it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinbus.extras import missing_extra

if TYPE_CHECKING:
    from twinbus.answers.freshness import Freshness, LedgerState, ResultState, age_text, judge_freshness
    from twinbus.answers.ledger_state import ledger_states
    from twinbus.answers.report import report_data
    from twinbus.answers.results import BalanceAnswer, Results
    from twinbus.answers.window import HourWindow

__all__ = [
    "BalanceAnswer",
    "Freshness",
    "HourWindow",
    "LedgerState",
    "ResultState",
    "Results",
    "age_text",
    "judge_freshness",
    "ledger_states",
    "report_data",
]

_MODULES = {
    "freshness": ("Freshness", "LedgerState", "ResultState", "age_text", "judge_freshness"),
    "ledger_state": ("ledger_states",),
    "report": ("report_data",),
    "results": ("BalanceAnswer", "Results"),
    "window": ("HourWindow",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ImportError as error:
        raise missing_extra(error, "tables") or error from error
