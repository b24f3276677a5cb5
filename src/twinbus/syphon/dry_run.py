"""A dry run (Y9): counts the messages that a syphon would find. Peeks at every message; locks and moves none."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from twinbus.syphon.discovery import Discovery
from twinbus.syphon.transport import PEEK_PAGE_SIZE, Transport


@dataclass(slots=True)
class DestinationBacklog:
    """The messages for one destination. `deferred` is how many of these messages a syphon has put aside."""

    messages: int = 0
    bytes: int = 0
    deferred: int = 0
    oldest: datetime | None = None


@dataclass(slots=True)
class DryRunResult:
    """The backlog by destination. `unaddressed` messages name no destination: a syphon would dead-letter them (Y6)."""

    queues: tuple[str, ...] = ()
    by_destination: dict[str, DestinationBacklog] = field(default_factory=dict)
    unaddressed: DestinationBacklog = field(default_factory=DestinationBacklog)

    @property
    def messages(self) -> int:
        return self.unaddressed.messages + sum(found.messages for found in self.by_destination.values())


async def count_backlog(transport: Transport, discovery: Discovery) -> DryRunResult:
    result = DryRunResult(tuple(await discovery.queues()))
    for queue in result.queues:
        backlog = transport.backlog(queue)
        start = 0
        try:
            while page := await backlog.peek(start, PEEK_PAGE_SIZE):
                for one in page:
                    if one.path is None:
                        found = result.unaddressed
                    else:
                        found = result.by_destination.setdefault(one.path, DestinationBacklog())
                    found.messages += 1
                    found.bytes += one.size
                    found.deferred += one.deferred
                    found.oldest = one.enqueued_time if found.oldest is None else min(found.oldest, one.enqueued_time)
                start = page[-1].sequence_number + 1
        finally:
            await backlog.close()
    return result
