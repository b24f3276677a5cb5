"""The standard error of a program that `spark-submit` has started.

`spark-submit` joins the standard error of a Python program with its own standard output. A program that prints a result
for another program would mix its warnings with the result. So `separate_stderr` lets this process write its errors
through the JVM, whose standard error is the one of `spark-submit`. The file itself cannot be opened a second time: two
processes that write to a file from different positions overwrite each other's text.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import util
from io import TextIOBase
from typing import Any, TextIO

from twinbus.pipeline.session import is_submitted


class JvmStderr(TextIOBase):
    """A text stream that writes to the standard error of the JVM, and to `below` if the JVM does not answer."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._stream: Any = None

    def write(self, text: str) -> int:
        try:
            if self._stream is None:
                from pyspark import SparkContext  # noqa: PLC0415  # slow; needed only if there is something to write

                SparkContext._ensure_initialized()  # connects to the JVM that runs
                self._stream = SparkContext._jvm.System.err  # type: ignore[union-attr]
            # `print` of a text with a line break at its end; `println` would add another.
            self._stream.print(text)
        except Exception:  # py4j raises errors of many kinds if the JVM has ended; the text must not be lost
            self._below.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(ValueError):  # closed at the end of the interpreter
            self._below.flush()

    def fileno(self) -> int:
        return self._below.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property of the streams of the interpreter, too
        return self._below.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # likewise
        return self._below.errors


def separate_stderr() -> None:
    """Lets `sys.stderr` write to the standard error of `spark-submit`. Does nothing in any other program."""
    if is_submitted() and not isinstance(sys.stderr, JvmStderr) and util.find_spec("pyspark") is not None:
        sys.stderr = JvmStderr(sys.stderr)
