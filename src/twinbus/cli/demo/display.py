"""Shows commands, events and the state while the demo runs: as a live screen on a terminal, otherwise as lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from twinbus.cli.demo.monitor import DemoState, SecondCounts
from twinbus.cli.demo.screen import draw_screen
from twinbus.cli.spinner import shown_meanwhile
from twinbus.cli.terminal import still_protected

_LINE_SECONDS: Final = 2.0


class TextDisplay:
    """Prints one line per event, and regularly a line with the state."""

    refresh_seconds: float = 0.5

    def __init__(self, console: Console) -> None:
        self.console = console
        self._next = 0.0

    def chapter(self, title: str) -> None:
        self.console.print(f"\n[bold]{escape(title)}[/]")

    def command(self, line: str) -> None:
        self._print(f"[bold cyan]$[/] {escape(line)}")

    def event(self, text: str) -> None:
        self._print(f"  {escape(text)}")

    def show_state(self, state: DemoState, seconds: Sequence[SecondCounts]) -> None:
        if state.seconds < self._next:
            return
        self._next = state.seconds + _LINE_SECONDS
        direct, diverted, received = state.rates
        states = ", ".join(f"{one.path} {one.state.replace('_', ' ')}" for one in state.entities)
        self.event(
            f"{state.seconds:4.0f} s  to primary {direct:.0f}/s, to backlog {diverted:.0f}/s, "
            f"received {received:.0f}/s, waiting {state.waiting}, home {state.returned}, "
            f"errors {state.errors}; {states}"
        )

    @contextmanager
    def live(self, ports: Mapping[str, int]) -> Iterator[None]:
        yield

    def pipeline(self, text: str) -> None:
        """Show the text about a batch of the pipeline."""
        self.event(f"pipeline: {text}")

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Show what the demo does inside the block, and for how long: again every few seconds."""
        began = time.monotonic()

        def show(over: threading.Event) -> None:
            while not over.wait(_LINE_SECONDS):
                self.event(f"{what} … {time.monotonic() - began:.0f} s")

        with shown_meanwhile(show):
            yield

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False)


class LiveDisplay(TextDisplay):
    """Shows a live screen on a terminal. Lines for events are printed above the live screen and are not overwritten."""

    refresh_seconds = 0.25

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._ports: Mapping[str, int] = {}

    def command(self, line: str) -> None:
        super().command(_wrapped(line, self.console.width - 2, " \\"))

    def event(self, text: str) -> None:
        super().event(_wrapped(text, self.console.width - 2))

    def show_state(self, state: DemoState, seconds: Sequence[SecondCounts]) -> None:
        if self._live is not None:
            drawn = draw_screen(state, seconds, self._ports, self.console.width)
            self._live.update(drawn, refresh=True)

    @contextmanager
    def live(self, ports: Mapping[str, int]) -> Iterator[None]:
        self._ports = ports
        with Live(console=self.console, auto_refresh=False) as self._live, still_protected():
            yield
        self._live = None

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        # The spinner turns while the event loop waits for a process.
        with self.console.status(escape(what)), still_protected():
            yield


def _wrapped(text: str, width: int, mark: str = "") -> str:
    """Break a line between words. `mark` ends each line but the last: a shell takes lines that end with a backslash."""
    lines = wrap(text, max(20, width - 4 - len(mark)), break_long_words=False, break_on_hyphens=False)
    return f"{mark}\n    ".join(lines)


def make_display(console: Console) -> TextDisplay:
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else TextDisplay(console)
