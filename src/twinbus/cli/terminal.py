"""Makes all output printable, so that text of messages, peers or files cannot control the terminal (X3).

Output is written in one of two ways. For each way, there is one place in the code that makes the output printable.

- Text written to `sys.stdout` and `sys.stderr`: by `typer.echo`, prompts, logs, warnings and tracebacks. `protect`
  puts a `PrintableStream` around both.
- Text drawn by Rich, which adds its own escape sequences. Rich converts every text to a `Text` before it measures and
  styles the text, and `Text` removes five control characters with the function `strip_control_codes`. `protect`
  replaces that function with one that calls `printable`, also for the consoles that Typer makes. Rich then writes to
  the original stream, not to the `PrintableStream`.

Spark's JVM is a separate process and writes to the same terminal. In a local session, `pipeline/log4j2.properties`
replaces the same characters in all text that Log4j writes. Text that the JVM, or a Python worker of Spark, writes to
its standard error without Log4j is not changed. On a cluster, the operator's own Log4j configuration applies.

Rich also interprets markup (`[red]`) and emoji names (`:bug:`). `console` makes consoles that interpret neither; a
caller can enable markup.
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
    """A text stream that makes text printable and writes it to another stream. Line breaks and tabs are not changed.

    The class has no attribute `buffer`: bytes written to a `buffer` would not be made printable.
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
        """Call `reconfigure` of the other stream, if that stream has such a method."""
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
    """Return the interpreter's original stream, without our `PrintableStream` and without the proxies of Rich."""
    while isinstance(stream, PrintableStream) or hasattr(stream, "rich_proxied_file"):
        stream = stream._below if isinstance(stream, PrintableStream) else stream.rich_proxied_file
    return cast(TextIO, stream)


def protect() -> None:
    """Make all further output of this process printable. A second call changes nothing."""
    from rich import control  # noqa: PLC0415 - slow, and not needed when only the verbs are imported

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PrintableStream):
            protected = PrintableStream(stream)
            # A character that does not exist in the terminal's encoding is written as an escape and raises no error.
            protected.reconfigure(errors="backslashreplace")
            setattr(sys, name, protected)
    for module in (control, sys.modules.get("rich.text")):
        if module is not None:
            # `rich.text` has its own reference to the function, so both modules are changed.
            vars(module)["strip_control_codes"] = _without_controls


@contextmanager
def still_protected() -> Iterator[None]:
    """Make output printable inside the `with` block, where `Live` or `status` of Rich is active.

    They replace stdout and stderr with streams that interpret escape sequences, so these streams are wrapped, too.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(Any, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def console(*, stderr: bool = False, markup: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that shows text without changes: no emoji names, no highlighting, markup only if enabled."""
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
