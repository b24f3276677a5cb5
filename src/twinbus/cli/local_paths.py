"""Options and arguments that are paths refuse URLs (D6): `s3://bucket` would become a local folder named `s3:`.

A parameter that takes a URL too has the type `StorageLocation` instead of `Path`, and the parser `path_or_url`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typer.models import TyperPath

from twinbus.storage_location import LocationError, StorageLocation, refuse_url

if TYPE_CHECKING:
    from typer._click import Command


def path_or_url(given: str) -> StorageLocation:
    """Return the location. Raise BadParameter for a URL that cannot be used, and for a path that cannot be read."""
    try:
        found = StorageLocation.parse(given)
    except LocationError as error:
        raise typer.BadParameter(str(error)) from None
    if not found.is_url:
        _LocalPath().convert(found.text, None, None)
    return found


class _LocalPath(TyperPath):
    """The type of a parameter that is a local path."""

    def convert(self, value: str | os.PathLike[str], param: Any, ctx: Any) -> Any:
        try:
            return super().convert(refuse_url(value), param, ctx)
        except LocationError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from None


def refuse_urls(command: Command) -> None:
    """Make every path parameter of a command, and of the commands below it, refuse URLs."""
    for one in command.params:
        if type(one.type) is TyperPath:
            local = _LocalPath()
            vars(local).update(vars(one.type))
            one.type = local
    if isinstance(command, TyperGroup):
        for below in command.commands.values():
            refuse_urls(below)
