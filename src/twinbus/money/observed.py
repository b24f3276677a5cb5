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
    """The sums of a number of messages of any sizes, and of their copies.

    A message to a queue has one copy, a message to a topic one in each subscription.
    """

    messages: int
    units: int
    """Billable units of one operation on each of these messages."""
    bytes: int
    copies: int
    copy_units: int
    copy_bytes: int

    @classmethod
    def uniform(cls, size: int, subscriptions: int = 0) -> MessageMix:
        """Returns the mix of messages that all have the same size and the same number of copies."""
        units, copies = billable_units(1, [size]), max(subscriptions, 1)
        return cls(1, units, size, copies, units * copies, size * copies)

    def with_more_bytes(self, each: int) -> MessageMix:
        """Returns the mix of the same messages and units with `each` bytes more in each of them, or fewer."""
        size, copied = self.bytes + each * self.messages, self.copy_bytes + each * self.copies
        return replace(self, bytes=max(size, 0), copy_bytes=max(copied, 0))

    def as_copies(self) -> MessageMix:
        """Returns the mix of the copies: what is received of these messages."""
        return MessageMix(self.copies, self.copy_units, self.copy_bytes, self.copies, self.copy_units, self.copy_bytes)


NO_SIZE: Final = MessageMix(1, 1, 0, 1, 1, 0)
"""The mix of calls that carry no message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFailover:
    """Failovers of one entity in a number of processes at the same time."""

    seconds: float
    processes: int = 1
    restored: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedOutage:
    """One outage. Failovers that overlap in time are one outage."""

    seconds: float
    """From the first failover to the last restore, or to the end of the ledger."""
    drain_seconds: float = 0.0
    """From the last restore until the last diverted message was back on the primary."""
    diverted: int
    failovers: tuple[ObservedFailover, ...] = ()

    @property
    def processes(self) -> int:
        """The failovers of all processes: an entity that three processes failed over counts three times."""
        return sum(one.processes for one in self.failovers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The facts of a ledger that a forecast uses."""

    outages: tuple[ObservedOutage, ...] = ()
    sent: MessageMix | None = None
    """The messages that the primary accepted directly; None if there was none."""
    diverted: MessageMix | None = None
    """The messages that the backlog accepted, with the bytes that diverting adds; None if there was none."""
    home: MessageMix | None = None
    """The same diverted messages, with the sizes that they have on the primary; None if no message was returned."""
    syphon_seconds: float | None = None
    """Running time of all standing syphons together; None if it is not known."""
    drains: int | None = None
    """Number of syphons that ran until the backlog was empty; None if it is not known."""

    def with_options(self, *, message_size: int | None = None, subscriptions: int | None = None) -> Observed:
        """Returns the same facts with the size or the subscriptions that a user gave instead of the real ones."""

        def changed(mix: MessageMix | None) -> MessageMix | None:
            if mix is not None and message_size is not None:
                unit = billable_units(1, [message_size])
                mix = MessageMix(
                    mix.messages, mix.messages * unit, mix.messages * message_size,
                    mix.copies, mix.copies * unit, mix.copies * message_size,
                )  # fmt: skip
            if mix is not None and subscriptions is not None:
                each = max(subscriptions, 1)
                copied = (mix.messages * each, mix.units * each, mix.bytes * each)
                mix = MessageMix(mix.messages, mix.units, mix.bytes, *copied)
            return mix

        return replace(self, sent=changed(self.sent), diverted=changed(self.diverted), home=changed(self.home))
