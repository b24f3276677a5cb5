"""Error output of the command line: what failed and what to do, without a traceback."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from twinbus.cli.terminal import console
from twinbus.errors import OperatorError, TwinbusError

FAILED = 1
SIGNALLED = 128
"""Exit code after a signal: this plus the signal's number, as in shells."""
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def print_error(error: BaseException, *, debug: bool = False) -> None:
    """Print one error and its hint to stderr."""
    from rich.text import Text  # noqa: PLC0415 - slow, and needed for errors only

    shown = console(stderr=True, soft_wrap=True)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TwinbusError):
        text = error.text if isinstance(error, OperatorError) else str(error)
    shown.print(Text.assemble(("error:", "bold red"), f" {text}"))
    hint = getattr(error, "hint", "")
    if not hint and not isinstance(error, TwinbusError) and not debug:
        hint = "This is an unexpected error; --debug shows where it happened."
    if hint:
        shown.print(Text.assemble(("hint:", "bold"), f" {hint}"))


@contextmanager
def errors_reported(*, debug: bool) -> Iterator[None]:
    """Turn any error inside into a printed message and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # The reader (`| head`) has ended. Without this, Python would try to flush the rest at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None
        print_error(error, debug=debug)
        raise typer.Exit(FAILED) from None


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout is gone. A broken network connection raises the same error."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
