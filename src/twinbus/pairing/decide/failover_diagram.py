"""Draws the failover table for docs/guides/failover-machine.md: `python -m twinbus.pairing.decide.failover_diagram`."""

from __future__ import annotations

import sys

from twinbus.pairing.decide.failover import TABLE, EntityMode, Trigger


def diagram() -> str:
    """Return the changes of mode as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {EntityMode.HEALTHY}"]
    for (mode, trigger), transition in TABLE.items():
        if transition.mode is not mode:
            lines.append(f"    {mode} --> {transition.mode}: {trigger}")
    return "\n".join(lines) + "\n"


def table() -> str:
    """Return every cell as a Markdown table: the next mode, if the mode changes, and the actions."""
    lines = [f"| | {' | '.join(EntityMode)} |", "| --- " * (len(EntityMode) + 1) + "|"]
    lines += [f"| {trigger} | {' | '.join(_cell(mode, trigger) for mode in EntityMode)} |" for trigger in Trigger]
    return "\n".join(lines) + "\n"


def _cell(mode: EntityMode, trigger: Trigger) -> str:
    transition = TABLE[mode, trigger]
    change = [f"**→ {transition.mode}**"] if transition.mode is not mode else []
    return "; ".join([*change, *transition.actions])


if __name__ == "__main__":
    sys.stdout.write(f"```mermaid\n{diagram()}```\n\n{table()}")
