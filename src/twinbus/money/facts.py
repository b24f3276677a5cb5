"""What the entries of a ledger say about its messages (L4): the counts that explain a difference from a forecast.

Every number here is counted from entries. `twinbus.pipeline` counts them; `forecast_vs_actual` uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

SHORT_POLL: Final = 0.9
"""A poll that ends before this share of the long poll was cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFacts:
    """How often diverted messages passed one stage, compared by message id with the copies in the backlog.

    For all ids together: passed = stored - missing + unsure + foreign + again.
    """

    missing: int = 0
    """Stored copies without a successful entry of this stage."""
    dead_lettered: int = 0
    """The missing copies that were dead-lettered. They are part of `missing`."""
    unsure: int = 0
    """Copies whose store had an unknown outcome, and that passed this stage."""
    foreign: int = 0
    """Messages that passed this stage and that the ledger never stored in the window."""
    again: int = 0
    """Messages that passed this stage more often than copies of them were stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """Counts of a ledger. A field counts messages of successful calls, unless its description says otherwise."""

    sent: int = 0
    """Sent to the primary directly."""
    diverted: int = 0
    scheduled: int = 0
    """Scheduled on the primary."""
    returned: int = 0
    resubmitted: int = 0
    """Dead letters that were stored in the backlog again."""
    dead_lettered: int = 0
    """Messages that were moved to a dead-letter queue of the backlog."""
    copies: Mapping[str, CopyFacts] = field(default_factory=dict)
    """By stage: `return_primary` and `complete_backlog`."""
    short_polls: int = 0
    """Empty receives on the backlog that were cut short."""
    manage: Mapping[str, int] = field(default_factory=dict)
    """Calls of the management API, by the role of the program that made them."""
    deliverable: int = 0
    """Receives that the messages on the primary need: one for each queue or subscription that gets a message."""
    subscriptions: int = 0
    """Subscriptions with receives."""
    settled: int = 0
    """Messages of the primary that a receiver abandoned, deferred, released or dead-lettered."""
