"""The mode table drawn as a Mermaid state diagram: `python -m twinbus.pairing.diagram`. It decides nothing."""

from __future__ import annotations

import sys

from twinbus.pairing.failover import TABLE, Decision, Mode, Trigger


def diagram() -> str:
    """Every cell of the table that changes the mode or does something; what a mode passes over is not drawn."""
    lines = ["stateDiagram-v2", f"    [*] --> {Mode.HEALTHY}"]
    lines += [_arrow(mode, trigger, decision) for (mode, trigger), decision in TABLE.items() if _drawn(mode, decision)]
    return "\n".join(lines) + "\n"


def _drawn(mode: Mode, decision: Decision) -> bool:
    return decision.mode is not mode or bool(decision.actions)


def _arrow(mode: Mode, trigger: Trigger, decision: Decision) -> str:
    doing = f" / {', '.join(decision.actions)}" if decision.actions else ""
    return f"    {mode} --> {decision.mode}: {trigger}{doing}"


if __name__ == "__main__":
    sys.stdout.write(diagram())
