"""`twinbus doctor --conformance`: compare a namespace with what Twinbus assumes, print the differences and the cost.

`conformance_checks` has the assumptions and makes the observations.
"""

from __future__ import annotations

import asyncio
import json as json_text
import os
import signal
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import typer

import twinbus
from twinbus.cli import connections
from twinbus.cli.errors import ATTENTION
from twinbus.cli.interrupts import SIGNALLED
from twinbus.cli.spinner import spinner
from twinbus.cli.terminal import console
from twinbus.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twinbus.cli.conformance_checks import Conformance


def check_conformance(connection_string: str, seconds: float, *, json: bool) -> None:
    """Observe the namespace and print the result. Raises typer.Exit with 3 if something differs or is left behind."""
    from twinbus.cli.conformance_checks import Conformance  # noqa: PLC0415 - slow

    result = Conformance(connections.namespace_name("primary", connection_string))
    began = datetime.now(UTC)
    try:
        with spinner("observing the namespace in scratch entities"):
            asyncio.run(_observed(connection_string, seconds, result))
    finally:
        for path in result.left:
            typer.echo(printable(f"{path} could not be removed: remove it by hand"), err=True)
    if json:
        typer.echo(json_text.dumps(_report(result, began)))
    else:
        _print(result)
    if result.differences or result.left:
        raise typer.Exit(ATTENTION)


async def _observed(connection_string: str, seconds: float, result: Conformance) -> None:
    from twinbus.cli.conformance_checks import observe  # noqa: PLC0415 - slow

    task = asyncio.ensure_future(observe(connection_string, seconds, result))
    loop, received = asyncio.get_running_loop(), list[signal.Signals]()

    def stop(number: signal.Signals) -> None:
        """Cancel the task, which then removes the scratch entities. A second signal ends the process at once."""
        if received:
            os._exit(SIGNALLED + number)
        received.append(number)
        typer.echo("removing the scratch entities …", err=True)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        raise typer.Exit(SIGNALLED + received[0]) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _highest_cost(units: int) -> tuple[Decimal, str]:
    """Return what the units cost at most in the standard tier: at the price of its most expensive band."""
    from twinbus.money import Prices  # noqa: PLC0415

    prices = Prices.default()
    scale = prices.tier("standard").operations
    highest = max((band.price for band in scale.bands), default=Decimal(0)) if scale is not None else Decimal(0)
    return units * highest / (scale.per if scale is not None else 1), prices.currency


def _report(result: Conformance, began: datetime) -> dict[str, Any]:
    cost, currency = _highest_cost(result.units)
    return {
        "twinbus": twinbus.__version__,
        "time": began.isoformat(timespec="seconds"),
        "namespace": result.namespace,
        "tier": result.tier,
        "state": "differs" if result.differences else "agrees",
        "observations": [{**one._asdict(), "agrees": one.agrees} for one in result.observations],
        "differences": len(result.differences),
        "operations": result.operations,
        "units": result.units,
        "cost_at_most": float(cost),
        "currency": currency,
        "left": result.left,
    }


def _print(result: Conformance) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow, and not needed with --json

    shown = console()
    shown.print(f"namespace  {printable(result.namespace)}, tier {printable(result.tier or 'not known')}")
    cost, currency = _highest_cost(result.units)
    shown.print(f"cost       {result.operations} operations, {result.units} units: at most {cost:.6f} {currency}")
    if result.differences:
        shown.print()
        shown.print(_table(result))
    count, different = len(result.observations), len(result.differences)
    text = Text(f"all {count} assumptions agree", "bold green")
    if different:
        text = Text(f"{different} of {count} assumptions differ", "bold yellow")
    shown.print()
    shown.print(text)


def _table(result: Conformance) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 - slow, and not needed with --json

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("assumption", "expected", "observed"):
        table.add_column(name, overflow="fold")
    for one in result.differences:
        table.add_row(one.check, one.expected, printable(one.observed))
    return table
