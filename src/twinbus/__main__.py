"""The script `twinbus`, and `python -m twinbus` where the script is not on the PATH: both run the command line."""

from __future__ import annotations

import os
import sys
from typing import Final

from twinbus.extras import missing_extra

_INTERRUPTED: Final = 130


def main() -> None:
    """Run the command line. If its packages are not installed, print how to install them, and exit with 1."""
    try:
        from twinbus.cli.main import app  # noqa: PLC0415 - its packages may be missing
    except ImportError as error:
        missing = missing_extra(error, "cli")
        if missing is None:
            raise
        sys.stderr.write(f"error: {missing.text}\nhint: {missing.hint}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        os._exit(_INTERRUPTED)
    app()


if __name__ == "__main__":
    main()
