"""A drill (S11): one entity is failed over and restored on purpose, with messages before, meanwhile and after.

It goes through an ordinary pair of its own, so that nothing is shown that applications would not see.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from uuid import uuid4

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver

from twinbus.errors import OperatorError
from twinbus.pairing.aio.pair import Pair, pair_namespaces
from twinbus.pairing.events import Notice, facts
from twinbus.pairing.options import SendAvailabilityOptions

MARK: Final = "twinbus-drill"
# As many of others' messages are held, at most, while the drill's own are looked for.
_MOST_HELD: Final = 500
_PAGE: Final = 100


class DrillMoment(NamedTuple):
    """So many seconds after the drill began."""

    after: float
    what: str


@dataclass(slots=True)
class Drill:
    """What happened. `as_meant`: everything went where its clause says."""

    entity: str
    token: str = field(default_factory=lambda: uuid4().hex)
    moments: list[DrillMoment] = field(default_factory=list)
    as_meant: bool = True


class _Teller:
    def __init__(self, drill: Drill, tell: Callable[[DrillMoment], None]) -> None:
        self.drill = drill
        self._tell = tell
        self._begun = time.monotonic()

    def say(self, what: str, *, wrong: bool = False) -> None:
        moment = DrillMoment(time.monotonic() - self._begun, what)
        self.drill.moments.append(moment)
        self.drill.as_meant = self.drill.as_meant and not wrong
        self._tell(moment)


async def run_drill(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    entity: str,
    *,
    messages: int,
    options: SendAvailabilityOptions,
    leave: bool,
    tell: Callable[[DrillMoment], None],
) -> Drill:
    """Raises what pairing raises; what goes wrong later is told as a moment."""
    teller = _Teller(Drill(entity), tell)
    async with pair_namespaces(primary, secondary, options=options) as pair:
        teller.say(f"paired; {len(pair.backlog_queues)} of {options.backlog_queue_count} backlog queues are usable")
        restored = asyncio.Event()
        pair.on("*", lambda notice: teller.say(_spoken(notice)))
        pair.on("restored", lambda _: restored.set())
        await _phases(pair, entity, messages, options, teller, restored)
        if leave:
            teller.say("what was diverted is left in the backlog, for the syphon")
        else:
            await _take_back(secondary, pair.backlog_queues, messages, teller)
    teller.say("the pair is closed")
    return teller.drill


async def _phases(
    pair: Pair, entity: str, messages: int, options: SendAvailabilityOptions, teller: _Teller, restored: asyncio.Event
) -> None:
    try:
        sender = await pair.get_queue_sender(entity).__aenter__()
    except Exception as error:
        raise OperatorError(
            f"{entity} cannot be opened on the primary: {error}", "A drill needs an entity that works."
        ) from error
    async with sender:
        await _send(pair, sender, messages, teller, "before", diverts=False)
        pair.force_failover(entity)
        await _send(pair, sender, messages, teller, "meanwhile", diverts=True)
        if options.ping_interval.total_seconds() <= 1:
            try:
                await asyncio.wait_for(restored.wait(), options.try_timeout.total_seconds() + 2)
            except TimeoutError:
                teller.say("no ping has restored it", wrong=True)
        if not restored.is_set():
            pair.force_restore(entity)
        await _send(pair, sender, messages, teller, "after", diverts=False)


async def _send(pair: Pair, sender: Any, messages: int, teller: _Teller, when: str, *, diverts: bool) -> None:
    """One by one; the pair's own count says where they went."""
    before, failed = _diverted(pair), 0
    begun = time.monotonic()
    for number in range(messages):
        token = teller.drill.token
        message = ServiceBusMessage(
            f"drill, {when}", message_id=f"{token}-{when}-{number}", application_properties={MARK: token}
        )
        try:
            await sender.send_messages(message)
        except Exception as error:
            failed += 1
            teller.say(f"send failed: {type(error).__name__}: {error}", wrong=True)
    took = (time.monotonic() - begun) / messages
    # A failover starts its count anew.
    diverted = _diverted(pair) - (0 if diverts else before)
    wrong = bool(failed) or diverted != (messages if diverts else 0)
    teller.say(
        f"{when}: {messages - failed - diverted} sent to the primary, {diverted} diverted, {took * 1000:.0f} ms each",
        wrong=wrong,
    )


def _diverted(pair: Pair) -> int:
    return sum(entity.diverted for entity in pair.entities())


def _spoken(notice: Notice) -> str:
    said = " ".join(f"{name}={value}" for name, value in facts(notice).items())
    return f"{notice.name} {said}"


# --- taking back -----------------------------------------------------------------------------------------------------


async def _take_back(secondary: ServiceBusClient, queues: tuple[str, ...], messages: int, teller: _Teller) -> None:
    taken = sum(await asyncio.gather(*(_from_queue(secondary, queue, messages, teller) for queue in queues)))
    left = messages - taken
    teller.say(
        f"{taken} of {messages} diverted messages taken back out of the backlog"
        + (f"; {left} are left to the syphon, or it was quicker" if left else "")
    )


async def _from_queue(secondary: ServiceBusClient, queue: str, most: int, teller: _Teller) -> int:
    try:
        async with secondary.get_queue_receiver(queue) as receiver:
            ours = await _holds_ours(receiver, teller.drill.token)
            return await _take(receiver, most, teller.drill.token) if ours else 0
    except Exception as error:
        teller.say(f"{queue} could not be looked into: {type(error).__name__}: {error}")
        return 0


async def _holds_ours(receiver: ServiceBusReceiver, token: str) -> bool:
    sequence_number = 0
    for _ in range(_MOST_HELD // _PAGE):
        page = await receiver.peek_messages(max_message_count=_PAGE, sequence_number=sequence_number, timeout=10)
        if any(_is_ours(message, token) for message in page):
            return True
        if not page:
            return False
        sequence_number = (page[-1].sequence_number or 0) + 1
    return False


async def _take(receiver: ServiceBusReceiver, wanted: int, token: str) -> int:
    """Complete the drill's own; the others are held until then, so that they do not come again, and given back."""
    others: list[Any] = []
    taken = 0
    while taken < wanted and len(others) < _MOST_HELD:
        received = await receiver.receive_messages(max_message_count=_PAGE, max_wait_time=2)
        if not received:
            break
        for message in received:
            if _is_ours(message, token):
                await receiver.complete_message(message)
                taken += 1
            else:
                others.append(message)
    for message in others:
        await receiver.abandon_message(message)
    return taken


def _is_ours(message: Any, token: str) -> bool:
    properties = message.application_properties or {}
    value = properties.get(MARK.encode(), properties.get(MARK))
    return bool(value in (token, token.encode()))
