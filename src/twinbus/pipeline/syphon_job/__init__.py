"""The syphon as a Spark job (D2): a driver plans, lanes in Spark's tasks move the messages.

The first use of a name below loads the module of that name; `SparkSyphon` also loads pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twinbus.pipeline.syphon_job.driver import SparkSyphon, SparkSyphonOptions
    from twinbus.pipeline.syphon_job.messages import SyphonJob

__all__ = ["SparkSyphon", "SparkSyphonOptions", "SyphonJob"]

_MODULES: Final = {"SparkSyphon": "driver", "SparkSyphonOptions": "driver", "SyphonJob": "messages"}

if not TYPE_CHECKING:  # if a type checker saw this function, it would accept every name from this package

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
