"""`twinbus ledger ship`: copy the sealed segments of a ledger to an object store (D6)."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.cli.errors import ATTENTION, Debug, errors_reported, print_error
from twinbus.cli.interrupts import stop_on_signals
from twinbus.cli.ledger import ledger_readable, refuse_no_ledger
from twinbus.cli.local_paths import path_or_url
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.printable import printable
from twinbus.storage_location import StorageLocation

if TYPE_CHECKING:
    from twinbus.ledger import ShippedSegments, Shipping


def ship(
    directory: Annotated[Path, typer.Argument(help="Directory of the ledger.", show_default=False)],
    target: Annotated[
        StorageLocation,
        typer.Argument(parser=path_or_url, help="URL of an object store, or a directory.", show_default=False),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Keep running: ship segments when they are sealed.")] = False,
    every: Annotated[float, typer.Option(min=1, help="With --follow: seconds between two looks.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Copy the sealed segments of a ledger to an object store, each exactly once.

    It can be interrupted and repeated. Several processes may ship to the same URL.

    A segment that is there with another content is named and not replaced.

    URLs: s3://bucket/path, az://container/path, abfss://container@account.dfs.core.windows.net/path.

    Credentials are in the usual environment variables of AWS and Azure.

    Exit code: 0 if all sealed segments are there; 3 if a segment there differs; 1 on an error.

    Examples:
      twinbus ledger ship ./ledger s3://bucket/ledger
      twinbus ledger ship ./ledger az://container/ledger --follow
    """
    from twinbus.ledger import Shipping  # noqa: PLC0415 - slow

    with errors_reported(debug=debug):
        with ledger_readable(directory):
            refuse_no_ledger(directory)
        shipping = Shipping(directory, target)
        with spinner(f"shipping {directory} to {target}"):
            found = _shipped(shipping, target)
        _print(found, target, json)
        if follow:
            found = _follow(shipping, found, target, every, json=json, debug=debug)
        if found.differing:
            raise typer.Exit(ATTENTION)


def _shipped(shipping: Shipping, target: StorageLocation) -> ShippedSegments:
    """Ship once. Raise OperatorError if the ledger cannot be read, or the target cannot be written."""
    try:
        return shipping.ship()
    except OSError as error:
        raise OperatorError(
            f"shipping to {target} failed at {error.filename or 'a new file'}: {error.strerror}",
            "Check the two directories: their permissions, and the room on the disk.",
        ) from error


def _follow(
    shipping: Shipping, found: ShippedSegments, target: StorageLocation, every: float, *, json: bool, debug: bool
) -> ShippedSegments:
    """Ship new segments until a signal. After an error of the store or the disk, print the error and try again."""
    stopping = stop_on_signals()
    told = found.differing
    while not stopping.wait(every):
        try:
            found = _shipped(shipping, target)
        except OperatorError as error:
            print_error(error, debug=debug)
            continue
        if found.copied or found.differing != told:
            told = found.differing
            _print(found, target, json)
    return found


def _print(found: ShippedSegments, target: StorageLocation, json: bool) -> None:
    if json:
        values = {"copied": found.copied, "bytes": found.copied_bytes, "present": found.present, "open": found.open}
        typer.echo(json_text.dumps({**values, "differing": list(found.differing)}))
        return
    typer.echo(printable(f"shipped to {target}"))
    for label, count in (("copied", found.copied), ("bytes", found.copied_bytes), ("present", found.present)):
        typer.echo(f"{label:12} {count:>14,}")
    if found.open:
        typer.echo(f"{'open':12} {found.open:>14,}  shipped when they are sealed")
    for name in found.differing:
        typer.echo(printable(f"  {name} differs there. It is not replaced: compare the two, and remove the wrong one."))
