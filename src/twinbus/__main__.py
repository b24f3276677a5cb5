"""`python -m twinbus`: the command line, where its script is not on the path."""

from twinbus.cli.main import app

if __name__ == "__main__":
    app()
