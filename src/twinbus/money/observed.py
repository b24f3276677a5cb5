"""What a ledger shows of a period, as the input of a forecast for what really happened (L4, M4).

A `Scenario` without `Observed` describes a plan: all messages have one size, and all outages have one length.
`Observed` replaces these values with sums over the real messages, outages and syphons. `twinbus.pipeline` reads them
from a ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from twinbus.ledger.entries import billable_units  # pure, unlike `twinbus.ledger`


@dataclass(frozen=True, slots=True)
class MessageMix:
    """The sums of a number of messages of any sizes."""

    messages: int
    units: int
    """Billable units of one operation on each of these messages."""
    bytes: int
    copies: int
    """Receives of these messages: one per message to a queue, one per subscription for a message to a topic."""

    @classmethod
    def uniform(cls, size: int, subscriptions: int = 0) -> MessageMix:
        """Returns the mix of messages that all have the same size."""
        return cls(1, billable_units(1, [size]), size, max(subscriptions, 1))

    def with_more_bytes(self, each: int) -> MessageMix:
        """Returns the mix of the same messages and units with `each` bytes more in each of them, or fewer."""
        return MessageMix(self.messages, self.units, max(self.bytes + each * self.messages, 0), self.copies)


NO_SIZE: Final = MessageMix(1, 1, 0, 1)
"""The mix of calls that carry no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedOutage:
    """One outage. Failovers that overlap in time are one outage."""

    seconds: float
    """From the first failover to the last restore, or to the end of the ledger."""
    drain_seconds: float = 0.0
    """From the last restore until the last diverted message was back on the primary."""
    diverted: int
    failovers: int
    """Number of failovers: an entity that three processes failed over counts three times."""
    restored: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The facts of a ledger that a forecast uses."""

    outages: tuple[ObservedOutage, ...] = ()
    sent: MessageMix | None = None
    """The messages that the primary accepted directly; None if there was none."""
    diverted: MessageMix | None = None
    """The messages that the backlog accepted, with the bytes that diverting adds; None if there was none."""
    syphon_seconds: float | None = None
    """Running time of all standing syphons together; None if it is not known."""
    drains: int | None = None
    """Number of syphons that ran until the backlog was empty; None if it is not known."""

    def with_options(self, *, message_size: int | None = None, subscriptions: int | None = None) -> Observed:
        """Returns the same facts with the size or the subscriptions that a user gave instead of the real ones."""

        def changed(mix: MessageMix | None) -> MessageMix | None:
            if mix is None:
                return None
            if message_size is not None:
                units = mix.messages * billable_units(1, [message_size])
                mix = replace(mix, units=units, bytes=mix.messages * message_size)
            return mix if subscriptions is None else replace(mix, copies=mix.messages * max(subscriptions, 1))

        return replace(self, sent=changed(self.sent), diverted=changed(self.diverted))
