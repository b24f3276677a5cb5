"""`twinbus demo`: its options, its signals and how it ends. What happens is in `story`, what it proves in `verdict`."""

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
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from twinbus.cli.errors import SIGNALLED, Debug, errors_reported
from twinbus.cli.syphon import Engine
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError

if TYPE_CHECKING:
    from rich.console import Console

    from twinbus.cli.demo.script import DemoOptions, DemoResult

NOT_PROVEN: Final = 3
_PATIENCE_SECONDS: Final = 60.0


def demo(
    rate: Annotated[float, typer.Option(min=1, max=500, help="Messages a second, for all entities together.")] = 60.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long the primary is away.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the messages: the same seed sends the same ones.")] = 1,
    engine: Annotated[
        Engine, typer.Option(help="What brings the backlog home, and adds up the ledger.")
    ] = Engine.SPARK,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for ledger, tables, report and logs, which stays.", show_default="one that goes"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end; what happens goes to stderr.")
    ] = False,
    debug: Debug = False,
) -> None:
    """An outage, live: killed, diverted, brought home, accounted for.

    Two local namespaces, a pair, senders and receivers; the primary is killed with -9 and comes back.

    Everything is real: the commands that are shown are run.

    Ends with 0 when every message arrived once and the books say so, with 3 when not, with 1 when it could not work.

    Examples:
      twinbus demo
      twinbus demo --rate 200 --seconds 30 --keep ./demo
      twinbus demo --engine native --json
    """
    with errors_reported(debug=debug):
        from twinbus.cli.demo.finale import print_results, summary  # noqa: PLC0415 - slow
        from twinbus.cli.demo.script import DemoOptions  # noqa: PLC0415
        from twinbus.cli.demo.verdict import judge  # noqa: PLC0415

        if engine is Engine.SPARK and util.find_spec("pyspark") is None:
            raise OperatorError(
                "pyspark is not installed",
                "Install it: pip install 'twinbus[spark]'. Or do without: twinbus demo --engine native.",
            )
        # Its own texts are marked up; those of others are escaped where they are put in.
        shown = console(stderr=json, markup=True)
        asked = DemoOptions(rate, seconds, seed, engine)
        with _folder(keep) as folder:
            found = _run(asked, folder, shown)
            proof = judge(found.kept, found.sums)
            page = _page(found.page, stays=keep is not None)
        print_results(shown, found, proof, keep, page)
        if json:
            typer.echo(json_text.dumps(summary(asked, found, proof, keep, page)))
        if proof.problems:
            raise typer.Exit(NOT_PROVEN)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The one that was named, which has to be new or empty, or one that goes in the end."""
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
            raise OperatorError(f"--keep {keep} is not empty", "Name a folder that is, or that is not there yet.")
    except OSError as error:
        raise OperatorError(f"--keep {keep} cannot be used: {error.strerror}", "Name a folder of yours.") from error
    yield keep.absolute()


def _run(asked: DemoOptions, folder: Path, shown: Console) -> DemoResult:
    # What the SDK and the pair log would tear the picture.
    logging.basicConfig(filename=folder / "application.log", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with asyncio.Runner() as runner:
        return runner.run(_obeying(asked, folder, shown))


async def _obeying(asked: DemoOptions, folder: Path, shown: Console) -> DemoResult:
    """The story, unless a signal breaks it off. After a second one, or a while, nothing is waited for."""
    from twinbus.cli.demo.display import make_display  # noqa: PLC0415 - slow
    from twinbus.cli.demo.processes import DemoProcesses  # noqa: PLC0415
    from twinbus.cli.demo.script import run_demo  # noqa: PLC0415

    show = make_display(shown)
    world = DemoProcesses(folder, show.command, show.say)
    broken: list[int] = []

    def signalled(number: int) -> None:
        if broken:
            cut_off(number)
        broken.append(number)
        telling.cancel()
        asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, cut_off, number)

    def cut_off(number: int) -> None:
        world.kill()
        os._exit(SIGNALLED + number)

    async def told_of() -> DemoResult:
        async with world:
            return await run_demo(asked, world, show)

    telling = asyncio.ensure_future(told_of())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled, number)
    try:
        return await telling
    except asyncio.CancelledError:
        shown.print("broken off: all its processes have ended")
        raise typer.Exit(SIGNALLED + broken[0]) from None


def _page(made: Path | None, *, stays: bool) -> Path | None:
    """Where the report is to be found after the folder has gone: one place, for the last demo's."""
    if made is None or stays:
        return made
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinbus"
    cache.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(made, cache / "demo.html"))
