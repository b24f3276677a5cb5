"""The main program of the process that `ServerProcess` starts: does what `twinbus serve` does, with options in JSON.

The program does not use the parser of the command line: loading that parser and parsing the options would take a fifth
of the time until the server is ready.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from twinbus.errors import OperatorError
from twinbus.namespace import configure_logging, make_serve_plan, print_ready_json, serve_until_stopped
from twinbus.printable import printable


def main() -> None:
    """Serve the namespaces that the first argument describes, until SIGTERM or until the parent process is gone."""
    options = json.loads(sys.argv[1])
    data, config = options["data"], options["config"]
    try:
        read_plan = partial(
            make_serve_plan,
            data=None if data is None else Path(data),
            memory=data is None,
            namespaces=options["namespaces"],
            host="127.0.0.1",
            config=None if config is None else Path(config),
            host_names=options["host_names"],
            jwks=None if options["jwks"] is None else Path(options["jwks"]),
            audiences=options["audiences"],
            issuers=options["issuers"],
        )
        plan = read_plan()
        configure_logging(options["log_level"], keys=plan.keys)
        serve_until_stopped(plan, print_ready_json, read_again=read_plan, exit_with_stdin=True)
    except OperatorError as error:
        sys.stderr.write(printable(f"{error}\n", newlines=True))
        sys.exit(1)
