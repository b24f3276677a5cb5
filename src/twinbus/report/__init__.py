"""The page that a person reads after an outage: `twinbus report` (D5).

The first use of a name below loads the module `page`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinbus.report.page import ReportInfo, check_writable, render_page, write_page

__all__ = ["ReportInfo", "check_writable", "render_page", "write_page"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.page"), name)
