"""How the command line tells a person that something went wrong: what it is and what to do, never a trace."""

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
"""And the number of the signal that ended it, as shells have it."""
Debug = Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")]


def print_error(error: BaseException, *, debug: bool = False) -> None:
    """One error, on stderr."""
    from rich.text import Text  # noqa: PLC0415 - slow, and wanted only when something is wrong

    shown = console(stderr=True, soft_wrap=True)
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TwinbusError):
        text = error.text if isinstance(error, OperatorError) else str(error)
    shown.print(Text.assemble(("error:", "bold red"), f" {text}"))
    hint = getattr(error, "hint", "")
    if not hint and not isinstance(error, TwinbusError) and not debug:
        hint = "This was not foreseen; --debug shows where it happened."
    if hint:
        shown.print(Text.assemble(("hint:", "bold"), f" {hint}"))


@contextmanager
def errors_reported(*, debug: bool) -> Iterator[None]:
    """Any error inside ends the program with a message instead of a trace."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # `| head`, which has seen enough. What is left in the buffer is not tried again when the program ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None
        print_error(error, debug=debug)
        raise typer.Exit(FAILED) from None


def _stdout_is_closed() -> bool:
    """Whether the other end of stdout is closed: a connection may break too."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
