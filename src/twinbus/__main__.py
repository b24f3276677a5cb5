"""`python -m twinbus` runs the command line, also where the script `twinbus` is not on the PATH."""

from twinbus.cli.main import app

if __name__ == "__main__":
    app()
