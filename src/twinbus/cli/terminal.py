"""Makes all output printable, so that no text from outside controls the terminal (X3).

Output is written in one of two ways. Each way has one place that makes it printable.

- Text written to `sys.stdout` and `sys.stderr`: by `typer.echo`, prompts, logs, warnings and tracebacks. `protect`
  puts a `PrintableStream` around both.
- Text drawn by Rich, which writes escape sequences of its own. Rich puts every text into a `Text` before it is measured
  and styled, and `Text` takes five control characters out of it with `strip_control_codes`. `protect` puts `printable`
  in the place of that function, also for the consoles that Typer makes. Rich then writes to the stream below ours.

Spark's JVM is a process of its own and writes to the same terminal. In a local session `pipeline/log4j2.properties`
replaces the same characters in everything that Log4j writes. What the JVM, or a Python worker of Spark, writes to its
standard error without Log4j is not changed. On a cluster the operator's own Log4j configuration applies.

Rich also reads markup (`[red]`) and emoji names (`:bug:`). `console` makes consoles that read neither; a caller can
enable markup.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOBase
from typing import TYPE_CHECKING, Any, TextIO, cast

from twinbus.printable import printable

if TYPE_CHECKING:
    from rich.console import Console


class PrintableStream(TextIOBase):
    """A text stream on top of another one. Everything written to it is printable; line breaks and tabs stay.

    It has no `buffer`: bytes written there would not be made printable.
    """

    def __init__(self, below: TextIO) -> None:
        self._below = below

    def write(self, text: str) -> int:
        self._below.write(printable(text, newlines=True))
        return len(text)

    def flush(self) -> None:
        self._below.flush()

    def fileno(self) -> int:
        return self._below.fileno()

    def isatty(self) -> bool:
        return self._below.isatty()

    def writable(self) -> bool:
        return True

    def reconfigure(self, **options: Any) -> None:
        """Reconfigure the stream below, if it has this method."""
        if (reconfigure := getattr(self._below, "reconfigure", None)) is not None:
            reconfigure(**options)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property of the streams of the interpreter, too
        return self._below.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # likewise
        return self._below.errors

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream that Rich writes to. Rich looks for this attribute."""
        return lowest(self)


def lowest(stream: object) -> TextIO:
    """Return the interpreter's stream below our wrapper and Rich's proxies."""
    while isinstance(stream, PrintableStream) or hasattr(stream, "rich_proxied_file"):
        stream = stream._below if isinstance(stream, PrintableStream) else stream.rich_proxied_file
    return cast(TextIO, stream)


def protect() -> None:
    """Make all further output of this process printable. Calling it again changes nothing."""
    from rich import control  # noqa: PLC0415 - slow, and not needed when only the verbs are imported

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PrintableStream):
            protected = PrintableStream(stream)
            # A character that the terminal's encoding lacks becomes an escape instead of an error.
            protected.reconfigure(errors="backslashreplace")
            setattr(sys, name, protected)
    for module in (control, sys.modules.get("rich.text")):
        if module is not None:
            # rich.text imports the function from rich.control by name.
            vars(module)["strip_control_codes"] = _without_controls


@contextmanager
def still_protected() -> Iterator[None]:
    """Wrap the streams that Rich installs inside `Live` and `status`: those interpret escape sequences."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(Any, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console(*, stderr: bool = False, markup: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that shows text as it is: no emoji names, no highlighting, markup only if enabled."""
    from rich.console import Console  # noqa: PLC0415 - slow

    return Console(
        file=lowest(sys.stderr if stderr else sys.stdout),
        markup=markup,
        soft_wrap=soft_wrap,
        emoji=False,
        highlight=False,
    )


def _without_controls(text: str, *_: object) -> str:
    # Rich measures a cell before it expands the tabs, so a tab would break the columns of a table.
    return printable(text, newlines=True).replace("\t", "\\t")
