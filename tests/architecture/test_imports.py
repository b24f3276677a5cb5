"""Who may import whom: the contracts of pyproject.toml, shown in full when one is broken."""

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from .source import ROOT


def test_every_import_keeps_to_the_order_of_the_rooms() -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS
