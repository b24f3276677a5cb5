"""The process behind a local namespace: all that `twinbus serve` does, asked for in JSON by its parent.

It is not started by way of the command line because reading options there takes a fifth of the time to be ready.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from twinbus.errors import OperatorError
from twinbus.namespace import configure_logging, make_serve_plan, print_ready_json, serve_until_stopped
from twinbus.printable import printable


def main() -> None:
    """Serve what the first argument asks for, until SIGTERM or until the parent is gone."""
    asked = json.loads(sys.argv[1])
    data, config = asked["data"], asked["config"]
    try:
        plan = make_serve_plan(
            data=None if data is None else Path(data),
            memory=data is None,
            namespaces=asked["namespaces"],
            host="127.0.0.1",
            config=None if config is None else Path(config),
            host_names=asked["host_names"],
        )
        configure_logging(asked["log_level"], keys=plan.keys)
        serve_until_stopped(plan, print_ready_json, exit_with_stdin=True)
    except OperatorError as error:
        sys.stderr.write(printable(f"{error}\n", newlines=True))
        sys.exit(1)
