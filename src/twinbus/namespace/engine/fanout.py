"""Which subscriptions of a topic take a message, and in which copies: each by its rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from twinbus.namespace.engine.overlays import dead_letter_properties, merged
from twinbus.namespace.engine.rules.view import MessageView

if TYPE_CHECKING:
    from twinbus.namespace.engine.subscription import Published, Subscription

_REASON: Final = "FilterException"
"""What the documentation calls the error of a filter that cannot be evaluated."""


class FanOut(NamedTuple):
    """Who takes the message as it is, who takes changed copies, and whose rules could not be evaluated."""

    as_it_is: list[Subscription]
    copies: list[tuple[Subscription, Published]]
    dead: list[tuple[Subscription, bytes | None]]
    """With the properties that tell why, for those who dead-letter what their rules fail on."""


def fan_out(message: Published, takers: Sequence[Subscription], now: int, new_token: Callable[[], bytes]) -> FanOut:
    found = FanOut([], [], [])
    view = MessageView(message.raw, now=now, seq=message.origin_seq, ttl=message.ttl, new_token=new_token)
    for taker in takers:
        if taker.rules.takes_everything:
            found.as_it_is.append(taker)
            continue
        selection = taker.rules.select(view)
        if selection.as_it_is:
            found.as_it_is.append(taker)
        for copy in selection.copies:
            changed = message._replace(ttl=copy.ttl, session=copy.session, raw=copy.raw)
            found.copies.append((taker, changed))
        if selection.fault is not None and taker.description.dead_lettering_on_filter_errors:
            found.dead.append((taker, merged(None, dead_letter_properties(_REASON, selection.fault))))
    return found
