"""Who may import whom: the contracts of pyproject.toml, shown in full when one is broken."""

import ast
import subprocess
import sys
from pathlib import Path

from .source import PACKAGE, ROOT, Source, sources


def test_every_import_keeps_to_the_order_of_the_rooms() -> None:
    # In a process of its own: it sets up logging anew, which would silence the loggers of tests that follow.
    program = Path(sys.executable).with_name("lint-imports")
    command = [str(program), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Imports of another room's inner module, each with its reason. A room's face is its `__init__`.
ENTRIES = "the face also loads what writes to the disk; the importer is pure"
NO_SPARK = "the face also names modules that load pyspark; a contract forbids that"
INSIDE = {
    ("twinbus.__main__", "twinbus.cli.main"): "the entry point of the program",
    ("twinbus.answers.ledger_state", "twinbus.pipeline.ingested_segments"): NO_SPARK,
    ("twinbus.answers.report", "twinbus.pipeline.report_data"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.actual_cost"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.bill_facts"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.ingested_segments"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.report_data"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.result_tables"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.snapshots"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.table_storage"): NO_SPARK,
    ("twinbus.answers.results", "twinbus.pipeline.timeline_buckets"): NO_SPARK,
    ("twinbus.cli.syphon", "twinbus.pipeline.syphon_job"): "a room within the room, with a face of its own",
    ("twinbus.money.forecast", "twinbus.ledger.entries"): ENTRIES,
    ("twinbus.money.forecast_vs_actual", "twinbus.ledger.entries"): ENTRIES,
    ("twinbus.money.observed", "twinbus.ledger.entries"): ENTRIES,
    ("twinbus.namespace.engine.delivery", "twinbus.ledger.entries"): ENTRIES,
    ("twinbus.namespace.engine.queries", "twinbus.ledger.entries"): ENTRIES,
    ("twinbus.namespace.engine.send_checks", "twinbus.ledger.entries"): ENTRIES,
}
# Submodules that are public by themselves: part of the face of their room.
PUBLIC = {"twinbus.pipeline.servicebus", "twinbus.pipeline.session"}


def test_rooms_import_each_other_only_by_their_faces() -> None:
    found = {
        (source.module, target)
        for source in sources(PACKAGE)
        for target in imported_modules(source)
        if source.module.count(".")
        and target.count(".") > 1
        and room_of(target) != room_of(source.module)
        and target not in PUBLIC
    }
    assert found == INSIDE.keys(), "import from the room's __init__, or list the import with its reason"


def imported_modules(source: Source) -> set[str]:
    """Return the modules of twinbus that a file imports, also inside functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            names = {f"{node.module}.{alias.name}" for alias in node.names if alias.name not in face_names(node.module)}
            found.update(filter(is_module, names))
    return {name for name in found if name.startswith("twinbus.")}


def face_names(room: str) -> frozenset[str]:
    """Return what a room's `__init__` offers. A function may have the name of its module there."""
    path = ROOT / "src" / Path(*room.split(".")) / "__init__.py"
    if not path.is_file():
        return frozenset()
    assigned = [
        node.value
        for node in Source(path).tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    return frozenset(name for value in assigned for name in ast.literal_eval(value))


def is_module(name: str) -> bool:
    path = ROOT / "src" / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def room_of(module: str) -> str:
    return module.split(".")[1]
