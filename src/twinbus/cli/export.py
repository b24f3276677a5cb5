"""`twinbus export`: write the entities of a running namespace as a Config.json of Microsoft's emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.fault import Authority, Connection
from twinbus.cli.network import credential_name, credential_option
from twinbus.printable import printable


@credential_option
def export(
    connection_string: Connection,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write instead of stdout.")] = None,
    ca: Authority = None,
    debug: Debug = False,
) -> None:
    """Write the entities of a running namespace as a Config.json.

    `twinbus serve --config` and Microsoft's emulator read it. What the format cannot express, such as keys, is listed
    on stderr.

    Examples:
      twinbus export -o Config.json
      twinbus export | less
    """
    with errors_reported(debug=debug):
        import json  # noqa: PLC0415 - other verbs start without these

        from twinbus.connect import ConnectionStringError  # noqa: PLC0415
        from twinbus.errors import OperatorError  # noqa: PLC0415
        from twinbus.namespace import NamespaceHttpClient  # noqa: PLC0415

        try:
            client = NamespaceHttpClient(connection_string, ca=ca, credential=credential_name())
            found = client.request("GET", "/$config")
        except ConnectionStringError as error:
            raise WrongUsageError(
                str(error), "`twinbus serve` prints the connection string of each namespace."
            ) from error
        text = json.dumps(found["config"], indent=2)
        if output is None:
            typer.echo(text)
        else:
            try:
                output.write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                raise OperatorError(f"{output} cannot be written: {error.strerror}") from error
        for line in found["left_out"]:
            typer.echo(printable(f"left out: {line}"), err=True)
