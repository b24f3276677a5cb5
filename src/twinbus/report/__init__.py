"""The page that a person reads after an outage: `twinbus report` (D5).

The first use of a name below loads the module that defines it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinbus.report.formatting import clock_text, unknown_clock_text
    from twinbus.report.page import ReportInfo, check_writable, render_page, write_page
    from twinbus.report.verdict import judge_report

__all__ = [
    "ReportInfo",
    "check_writable",
    "clock_text",
    "judge_report",
    "render_page",
    "unknown_clock_text",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "verdict" if name == "judge_report" else "formatting" if name.endswith("_text") else "page"
    return getattr(import_module(f"{__name__}.{module}"), name)
