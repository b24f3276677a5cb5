"""Everything that runs on Spark. No other package of Twinbus imports pyspark (installed by the extra `twinbus[spark]`).

The first use of a name below loads the module of that name; most of these modules load pyspark.
`twinbus.pipeline.session`, `twinbus.pipeline.servicebus` and `twinbus.pipeline.syphon_job` are not among these names:
import them directly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from twinbus.extras import missing_extra

if TYPE_CHECKING:
    from twinbus.pipeline.actual_cost import ActualCost
    from twinbus.pipeline.audit import SparkAudit
    from twinbus.pipeline.batch_turns import BatchTurns
    from twinbus.pipeline.checkpoints import refuse_unusable_checkpoints
    from twinbus.pipeline.cost_facts import compute_actual_cost
    from twinbus.pipeline.ingest import ingest_ledger
    from twinbus.pipeline.ingested_segments import SEGMENTS
    from twinbus.pipeline.jobs import (
        JOBS,
        LedgerJob,
        current_result,
        follow_jobs,
        off_clocks,
        read_history,
        result_over_history,
        why_incomplete,
    )
    from twinbus.pipeline.report_data import (
        BUCKET_WIDTHS,
        LATENCY_EDGES,
        ReportData,
        RowValues,
        Timeline,
        TopRows,
        WriterClock,
    )
    from twinbus.pipeline.report_queries import collect_report_data
    from twinbus.pipeline.result_tables import JUDGED
    from twinbus.pipeline.results import write_results
    from twinbus.pipeline.run import CommittedBatch, PipelineRun
    from twinbus.pipeline.sinks import write_to_database
    from twinbus.pipeline.snapshots import TablesVersion
    from twinbus.pipeline.submitted import separate_stderr
    from twinbus.pipeline.table_storage import TablesBusyError, TableStorage
    from twinbus.pipeline.tables import OPERATIONS, PROBLEMS, SCHEMAS, Tables
    from twinbus.pipeline.time_window import TimeWindow
    from twinbus.pipeline.writer_states import WriterStates

__all__ = [
    "BUCKET_WIDTHS",
    "JOBS",
    "JUDGED",
    "LATENCY_EDGES",
    "OPERATIONS",
    "PROBLEMS",
    "SCHEMAS",
    "SEGMENTS",
    "ActualCost",
    "BatchTurns",
    "CommittedBatch",
    "LedgerJob",
    "PipelineRun",
    "ReportData",
    "RowValues",
    "SparkAudit",
    "TableStorage",
    "Tables",
    "TablesBusyError",
    "TablesVersion",
    "TimeWindow",
    "Timeline",
    "TopRows",
    "WriterClock",
    "WriterStates",
    "collect_report_data",
    "compute_actual_cost",
    "current_result",
    "follow_jobs",
    "ingest_ledger",
    "off_clocks",
    "read_history",
    "refuse_unusable_checkpoints",
    "result_over_history",
    "separate_stderr",
    "why_incomplete",
    "write_results",
    "write_to_database",
]

_MODULES = {
    "actual_cost": ("ActualCost",),
    "audit": ("SparkAudit",),
    "batch_turns": ("BatchTurns",),
    "checkpoints": ("refuse_unusable_checkpoints",),
    "cost_facts": ("compute_actual_cost",),
    "ingest": ("ingest_ledger",),
    "ingested_segments": ("SEGMENTS",),
    "jobs": (
        "JOBS", "LedgerJob", "current_result", "follow_jobs", "off_clocks", "read_history", "result_over_history",
        "why_incomplete",
    ),
    "report_data": ("BUCKET_WIDTHS", "LATENCY_EDGES", "ReportData", "RowValues", "Timeline", "TopRows", "WriterClock"),
    "report_queries": ("collect_report_data",),
    "result_tables": ("JUDGED",),
    "results": ("write_results",),
    "run": ("CommittedBatch", "PipelineRun"),
    "sinks": ("write_to_database",),
    "snapshots": ("TablesVersion",),
    "submitted": ("separate_stderr",),
    "table_storage": ("TableStorage", "TablesBusyError"),
    "tables": ("OPERATIONS", "PROBLEMS", "SCHEMAS", "Tables"),
    "time_window": ("TimeWindow",),
    "writer_states": ("WriterStates",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    except ImportError as error:
        raise missing_extra(error, "spark") or error from error
