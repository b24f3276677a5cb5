"""Error output of the command line: prints what failed and what the user can do, without a traceback."""

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

from twinbus.cli.interrupts import SIGNALLED, end_interrupted, interrupts_bounded, is_interrupted
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError, OptionError, TwinbusError
from twinbus.extras import missing_extra

# The exit codes of all verbs; docs/guides/exit-codes.md has them for each verb.
FAILED = 1
"""The command itself failed. Also, by clause L3, a ledger verb that finds lost messages."""
WRONG_USAGE = 2
"""Options or arguments are wrong, or do not go together. Typer uses the same code."""
ATTENTION = 3
"""The command did its work, and found something that needs attention."""
BROKEN = 4
"""The command did its work, and found that nothing can work."""
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class WrongUsageError(OperatorError):
    """Options or arguments of the command line are wrong, or do not go together. The exit code is WRONG_USAGE."""


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
    """Print any error that is raised inside the `with` block, and exit with the exit code for the error."""
    try:
        with interrupts_bounded():
            yield
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        end_interrupted()
    except typer.Abort as abort:
        # A question that was answered with no, or with Ctrl-C.
        if isinstance(abort.__context__, KeyboardInterrupt):
            end_interrupted()
        raise
    except Exception as raised:
        if is_interrupted(raised):
            end_interrupted()
        error = (missing_extra(raised) if isinstance(raised, ImportError) else None) or raised
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            # The process that reads stdout (`| head`) has ended. Without this line, Python would try to flush the
            # remaining output at exit, and would fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None
        print_error(error, debug=debug)
        raise typer.Exit(WRONG_USAGE if isinstance(error, WrongUsageError | OptionError) else FAILED) from None


def _stdout_is_closed() -> bool:
    """Return whether the process that reads stdout has ended.

    This check is needed because a broken network connection raises the same error.
    """
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
