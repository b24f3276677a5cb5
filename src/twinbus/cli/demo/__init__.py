"""`twinbus demo`: options, signals and exit codes. `script` has the steps, `verdict` checks the result."""

from __future__ import annotations

import asyncio
import json as json_text
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from twinbus.cli.engine import Engine
from twinbus.cli.errors import ATTENTION, Debug, errors_reported
from twinbus.cli.interrupts import SIGNALLED
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.extras import install_line, is_installed, require

if TYPE_CHECKING:
    from rich.console import Console

    from twinbus.cli.demo.script import DemoOptions, DemoResult

_PATIENCE_SECONDS: Final = 60.0


def demo(
    rate: Annotated[float, typer.Option(min=1, max=500, help="Messages per second, over all entities.")] = 60.0,
    seconds: Annotated[float, typer.Option(min=1, help="Duration of the outage.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the messages: the same seed sends the same messages.")] = 1,
    engine: Annotated[
        Engine, typer.Option(help="What moves the backlog home and reconciles the ledger.")
    ] = Engine.SPARK,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps ledger, tables, report and logs.", show_default="a temporary one"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; progress goes to stderr.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show an outage live: messages are diverted, moved home and accounted for.

    Runs two local namespaces, a pair, senders and receivers. The primary is killed with -9 and comes back.

    Everything is real: the demo runs the commands that it shows.

    Exit code: 0 if every message arrived once and the ledger agrees, 3 if not, 1 if the demo could not run.

    Examples:
      twinbus demo
      twinbus demo --rate 200 --seconds 30 --keep ./demo
      twinbus demo --engine native --json
    """
    with errors_reported(debug=debug):
        require("serve")
        from twinbus.cli.demo.finale import print_places, print_results, summary  # noqa: PLC0415 - slow
        from twinbus.cli.demo.script import DemoOptions  # noqa: PLC0415
        from twinbus.cli.demo.verdict import judge  # noqa: PLC0415

        if engine is Engine.SPARK and not is_installed("pyspark"):
            raise OperatorError(
                "the demo uses Spark, and pyspark is not installed",
                f"Install it: {install_line('cli', 'serve', 'spark')}\nOr run without it: twinbus demo --engine native",
            )
        # The demo's own texts contain markup. Markup in other texts, such as errors, is escaped before it is inserted.
        shown = console(stderr=json, markup=True)
        options = DemoOptions(rate, seconds, seed, engine)
        with _folder(keep) as folder:
            found = _run(options, folder, shown)
            proof = judge(found.kept, found.sums, found.sums["incomplete"])
            print_results(shown, found, proof)
            page = found.page if keep is not None or found.page is None else keep_page(found.page)
        print_places(shown, found, keep, page)
        if json:
            typer.echo(json_text.dumps(summary(options, found, proof, keep, page)))
        if proof.problems:
            raise typer.Exit(ATTENTION)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder `keep`, which must be new or empty. If `keep` is None, yield a temporary folder."""
    if keep is None:
        made = Path(tempfile.mkdtemp(prefix="twinbus-demo-"))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise OperatorError(f"--keep {keep} is not empty", "Name a new or an empty folder.")
    except OSError as error:
        raise OperatorError(
            f"--keep {keep} cannot be used: {error.strerror}", "Name a folder that you may write to."
        ) from error
    yield keep.absolute()


def _run(options: DemoOptions, folder: Path, shown: Console) -> DemoResult:
    # Log lines of the SDK and the pair would break the live display.
    logging.basicConfig(filename=folder / "application.log", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with asyncio.Runner() as runner:
        return runner.run(_run_until_signal(options, folder, shown))


async def _run_until_signal(options: DemoOptions, folder: Path, shown: Console) -> DemoResult:
    """Run the demo. A signal cancels the demo. The process is ended after a second signal, or if the clean-up takes
    longer than `_PATIENCE_SECONDS`.
    """
    from twinbus.cli.demo.display import make_display  # noqa: PLC0415 - slow
    from twinbus.cli.demo.processes import DemoProcesses  # noqa: PLC0415
    from twinbus.cli.demo.script import run_demo  # noqa: PLC0415

    show = make_display(shown)
    world = DemoProcesses(folder, show.command, show.event)
    signals: list[int] = []

    def signalled(number: int) -> None:
        if signals:
            cut_off(number)
        signals.append(number)
        running.cancel()
        asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, cut_off, number)

    def cut_off(number: int) -> None:
        world.kill()
        os._exit(SIGNALLED + number)

    async def run() -> DemoResult:
        async with world:
            return await run_demo(options, world, show)

    running = asyncio.ensure_future(run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled, number)
    try:
        return await running
    except asyncio.CancelledError:
        shown.print("cancelled: all processes of the demo have ended")
        raise typer.Exit(SIGNALLED + signals[0]) from None


def keep_page(made: Path) -> Path:
    """Copy the report out of the demo's temporary folder, and return the path of the copy.

    The copy is in the user's cache. If that cannot be written, or the user has no home folder, the copy is in a new
    temporary folder.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinbus"
        cache.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, cache / "demo.html"))
    except (OSError, RuntimeError):
        return Path(shutil.copy(made, Path(tempfile.mkdtemp(prefix="twinbus-report-")) / "demo.html"))
