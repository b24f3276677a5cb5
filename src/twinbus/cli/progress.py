"""Shows the progress of a syphon: a live table on a terminal, lines elsewhere, or JSON (Y9)."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import typer

from twinbus.cli.tables import print_table
from twinbus.cli.terminal import console, still_protected
from twinbus.printable import printable

if TYPE_CHECKING:
    from rich.console import Group

    from twinbus.syphon import LeftMessages, Progress

LINE_SECONDS: Final = 5.0
TABLE_SECONDS: Final = 0.5
# The most rows of a live table, which must fit on the screen. The table shows only the number of further rows.
_MOST_ROWS: Final = 20


class Display(Protocol):
    """Shows the progress of a syphon. `seconds` is the time between two calls of `show`."""

    seconds: float

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, progress: Progress) -> None: ...

    def end(self, progress: Progress) -> None: ...


def display(*, json: bool, seconds: float) -> Display:
    return JsonDisplay(seconds) if json else TableDisplay() if sys.stdout.isatty() else LineDisplay(seconds)


class LineDisplay:
    """Prints a line at each call of `show`, if the line differs from the last printed line."""

    def __init__(self, seconds: float = LINE_SECONDS) -> None:
        self.seconds = seconds
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, progress: Progress) -> None:
        line = "; ".join([headline(progress), *(f"{path}: {what}" for path, what in destinations(progress))])
        if line != self._last:
            typer.echo(printable(f"{datetime.now(UTC):%H:%M:%S}Z {line}"))
            self._last = line

    def end(self, progress: Progress) -> None:
        self._last = ""
        self.show(progress)
        if progress.left:
            typer.echo("\nnot home:")
        for one in progress.left[:_MOST_ROWS]:
            count, where, why, step = left_texts(one)
            typer.echo(printable(f"{count:>9}  {where}: {why}"))
            typer.echo(printable(f"{'':11}{step}"))
        if more := more_left(progress):
            typer.echo(f"{'':11}{more}")


class JsonDisplay(LineDisplay):
    """Prints one JSON object per line. The last object has `"ended": true`."""

    def show(self, progress: Progress) -> None:
        self._print(progress, ended=False)

    def end(self, progress: Progress) -> None:
        self._print(progress, ended=True)

    def _print(self, progress: Progress, *, ended: bool) -> None:
        typer.echo(
            json.dumps({"at": datetime.now(UTC).isoformat(timespec="seconds"), "ended": ended, **as_json(progress)})
        )


class TableDisplay(LineDisplay):
    """Shows a table on a terminal, and draws it again at the same place for each change."""

    def __init__(self) -> None:
        super().__init__(TABLE_SECONDS)

    def __enter__(self) -> Self:
        from rich.live import Live  # noqa: PLC0415 - slow, and needed on a terminal only

        self._stack = ExitStack()
        self._live = self._stack.enter_context(Live(console=console(), auto_refresh=False))
        self._stack.enter_context(still_protected())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, progress: Progress) -> None:
        self._live.update(_drawn(progress), refresh=True)

    def end(self, progress: Progress) -> None:
        self.show(progress)
        if progress.left:
            self._stack.close()  # below the live table, which is not drawn again
            columns = ("messages", "not home: destination", "why", "what to do")
            rows = [left_texts(one) for one in progress.left[:_MOST_ROWS]]
            print_table(columns, rows, wrapped={"not home: destination", "why", "what to do"})
            if more := more_left(progress):
                console().print(more)


def _drawn(progress: Progress) -> Group:
    from rich.console import Group  # noqa: PLC0415 - slow
    from rich.table import Table as Rows  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from twinbus.syphon import MessageCounts  # noqa: PLC0415

    states = {one.path: one for one in progress.not_ready}
    # Messages that an earlier run has put aside may be for a destination of which nothing was counted in this run.
    nothing = dict.fromkeys(progress.aside_by_destination, MessageCounts())
    shown = sorted((nothing | progress.by_destination).items(), key=lambda item: -item[1].returned)
    columns = {
        "returned": [tally.returned for _, tally in shown],
        "put aside": [progress.aside_by_destination.get(path, 0) for path, _ in shown],
        "dead-lettered": [tally.dead_lettered for _, tally in shown],
        "kept": [tally.kept for _, tally in shown],
    }
    # A column of zeros would take room from the paths.
    columns = {title: counts for title, counts in columns.items() if title == "returned" or any(counts)}
    rows = Rows()
    # A long path continues on the next line and is never cut.
    rows.add_column("destination", overflow="fold")
    for title in columns:
        rows.add_column(title, justify="right", no_wrap=True)
    rows.add_column("state", min_width=10)
    for number, (path, _) in enumerate(shown[:_MOST_ROWS]):
        state = states.get(path)
        shown_state = "ready" if state is None else printable(_state(state))
        rows.add_row(printable(path or "(none)"), *(f"{counts[number]:,}" for counts in columns.values()), shown_state)
    more = [Text(f"… and {len(shown) - _MOST_ROWS} more")] if len(shown) > _MOST_ROWS else []
    return Group(rows, *more, Text(headline(progress)))


# --- texts -----------------------------------------------------------------------------------------------------------


def headline(progress: Progress) -> str:
    total = progress.total
    parts = [f"{progress.state}: {total.returned} returned, {progress.rate:.0f}/s"]
    if progress.remaining is not None:
        parts.append(f"{progress.remaining} remaining")
    if progress.seconds_left is not None and progress.remaining:
        ends = datetime.now(UTC) + timedelta(seconds=progress.seconds_left)
        parts.append(f"about {duration(progress.seconds_left)} left (until {ends:%H:%M:%S}Z)")
    for count, what in (
        (progress.aside, "put aside"),
        (total.dead_lettered, "dead-lettered"),
        (total.kept, "kept: this transport would change them"),
        (total.possible_duplicates, "possibly delivered twice in this run"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if progress.lanes_lost:
        died = "1 lane died" if progress.lanes_lost == 1 else f"{progress.lanes_lost} lanes died"
        missing = "what they moved is not in these numbers" if progress.lanes_uncounted else "counted from the ledger"
        parts.append(f"{died}: {missing}")
    if progress.audit is not None:
        # Without a verdict, the text is a line of its own, after the messages that are left.
        parts.append(f"audit: {'not made' if progress.audit['verdict'] is None else progress.audit['text']}")
    return ", ".join(parts)


def destinations(progress: Progress) -> list[tuple[str, str]]:
    states = {one.path: one for one in progress.not_ready}
    found = [
        (path or "(none)", f"{tally.returned}{f' ({_state(states[path])})' if path in states else ''}")
        for path, tally in sorted(progress.by_destination.items())
    ]
    return found[:_MOST_ROWS] + ([("…", f"{len(found) - _MOST_ROWS} more")] if len(found) > _MOST_ROWS else [])


def _state(state: Any) -> str:
    left = max(0.0, state.until - time.monotonic())
    cause = f": {state.cause}" if state.cause is not None else ""
    return f"{state.readiness.value}{cause}, tried again in {duration(left)}"


def left_texts(left: LeftMessages) -> tuple[str, str, str, str]:
    """Return the number of messages, where they are or should be, why, and the next step."""
    count = "?" if left.messages is None else f"{left.messages:,}"
    return count, left.queue or left.destination or "(none)", left.why, left.next_step


def more_left(progress: Progress) -> str:
    more = len(progress.left) - _MOST_ROWS
    return f"… and {more:,} more; --json lists them all" if more > 0 else ""


def duration(seconds: float) -> str:
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s" if minutes else f"{left} s"


def as_json(progress: Progress) -> dict[str, Any]:
    """Return the progress as a dict for JSON."""
    return {
        "state": progress.state,
        "seconds": round(progress.seconds, 3),
        "rate": round(progress.rate, 1),
        "remaining": progress.remaining,
        "seconds_left": None if progress.seconds_left is None else round(progress.seconds_left, 1),
        "held": progress.held,
        "aside": progress.aside,
        "aside_by_destination": dict(progress.aside_by_destination),
        "lanes_lost": progress.lanes_lost,
        "lanes_uncounted": progress.lanes_uncounted,
        "total": asdict(progress.total),
        "by_destination": {path: asdict(tally) for path, tally in progress.by_destination.items()},
        "not_ready": {one.path: {"state": one.readiness.value, "cause": one.cause} for one in progress.not_ready},
        "operations": progress.operations,
        "left": [asdict(one) for one in progress.left],
        **({} if progress.audit is None else {"audit": progress.audit}),
    }
