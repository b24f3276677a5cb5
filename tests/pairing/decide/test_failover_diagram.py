"""The diagram and the table in the guide are those of the code."""

from __future__ import annotations

from pathlib import Path

from twinbus.pairing.decide.failover import EntityMode, Trigger
from twinbus.pairing.decide.failover_diagram import diagram, table

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "failover-machine.md"


def test_the_guide_holds_the_diagram_and_the_table_as_drawn() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert f"```mermaid\n{diagram()}```\n" in text
    assert table() in text


def test_every_mode_is_drawn_and_every_trigger_has_its_row() -> None:
    assert all(f"--> {mode}" in diagram() for mode in EntityMode)
    assert all(f"| {trigger} |" in table() for trigger in Trigger)
