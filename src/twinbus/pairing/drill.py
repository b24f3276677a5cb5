"""Run a drill (S11): fail one entity over and restore it on purpose, with messages before, during and after.

The drill makes an ordinary pair, so it shows exactly what applications would see.
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

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind, failure_kind
from twinbus.errors import OperatorError
from twinbus.pairing.aio.pair import Pair, pair_namespaces
from twinbus.pairing.events import Notice, facts
from twinbus.pairing.options import SendAvailabilityOptions

MARK: Final = "twinbus-drill"
# At most this number of other senders' messages are locked while the drill looks for its own messages.
_MOST_HELD: Final = 500
_PAGE: Final = 100


class DrillMoment(NamedTuple):
    """One event of a drill: `what` happened, `after` seconds from the start."""

    after: float
    what: str


@dataclass(slots=True)
class Drill:
    """The events of a drill so far.

    `as_meant` is False if a send failed, a message took the wrong route, or no ping restored the entity.
    """

    entity: str
    token: str = field(default_factory=lambda: uuid4().hex)
    moments: list[DrillMoment] = field(default_factory=list)
    as_meant: bool = True


class _Log:
    """Adds moments to the drill, and reports each moment with `tell`."""

    def __init__(self, drill: Drill, tell: Callable[[DrillMoment], None]) -> None:
        self.drill = drill
        self._tell = tell
        self._begun = time.monotonic()

    def add(self, what: str, *, wrong: bool = False) -> None:
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
    """Run a drill. `tell` is called with every moment. Raises the errors of pairing; failed sends become moments.

    With `leave`, diverted messages stay in the backlog for a syphon; otherwise the drill removes its messages there.
    """
    log = _Log(Drill(entity), tell)
    async with pair_namespaces(primary, secondary, options=options) as pair:
        log.add(f"paired; {len(pair.backlog_queues)} of {options.backlog_queue_count} backlog queues are usable")
        restored = asyncio.Event()
        pair.on("*", lambda notice: log.add(_text_of(notice)))
        pair.on("restored", lambda _: restored.set())
        await _phases(pair, entity, messages, options, log, restored, primary.fully_qualified_namespace)
        if leave:
            log.add("what was diverted is left in the backlog, for the syphon")
        else:
            await _take_back(secondary, pair.backlog_queues, messages, log)
    log.add("the pair is closed")
    return log.drill


async def _phases(
    pair: Pair,
    entity: str,
    messages: int,
    options: SendAvailabilityOptions,
    log: _Log,
    restored: asyncio.Event,
    where: str,
) -> None:
    try:
        sender = await pair.get_queue_sender(entity).__aenter__()
    except Exception as error:
        raise _not_opened(entity, where, error) from error
    async with sender:
        await _send(pair, sender, messages, log, "before", diverts=False)
        pair.force_failover(entity)
        await _send(pair, sender, messages, log, "meanwhile", diverts=True)
        if options.ping_interval.total_seconds() <= 1:
            try:
                await asyncio.wait_for(restored.wait(), options.try_timeout.total_seconds() + 2)
            except TimeoutError:
                log.add("no ping has restored it", wrong=True)
        if not restored.is_set():
            pair.force_restore(entity)
        await _send(pair, sender, messages, log, "after", diverts=False)


def _not_opened(entity: str, where: str, error: Exception) -> OperatorError:
    kind = failure_kind(error)
    if kind is FailureKind.ENTITY_NOT_FOUND:
        return OperatorError(
            f"queue or topic {entity!r} is not on {where}",
            "Create the entity, or correct its name.",
        )
    if kind in CREDENTIAL_REFUSED:
        return OperatorError(
            f"the key was refused by the primary, {where}",
            "Check the key's name, the key, its Send right, and this machine's clock.",
        )
    return OperatorError(
        f"{entity} cannot be opened on the primary: {kind} ({error})", "A drill needs an entity that works."
    )


async def _send(pair: Pair, sender: Any, messages: int, log: _Log, when: str, *, diverts: bool) -> None:
    """Send messages one by one. The pair's count of diverted messages shows how many went to the backlog."""
    before, failed = _diverted(pair), 0
    begun = time.monotonic()
    for number in range(messages):
        token = log.drill.token
        message = ServiceBusMessage(
            f"drill, {when}", message_id=f"{token}-{when}-{number}", application_properties={MARK: token}
        )
        try:
            await sender.send_messages(message)
        except Exception as error:
            failed += 1
            log.add(f"send failed: {type(error).__name__}: {error}", wrong=True)
    took = (time.monotonic() - begun) / messages
    # A failover resets the pair's count.
    diverted = _diverted(pair) - (0 if diverts else before)
    wrong = bool(failed) or diverted != (messages if diverts else 0)
    log.add(
        f"{when}: {messages - failed - diverted} sent to the primary, {diverted} diverted, {took * 1000:.0f} ms each",
        wrong=wrong,
    )


def _diverted(pair: Pair) -> int:
    return sum(entity.diverted for entity in pair.entities())


def _text_of(notice: Notice) -> str:
    values = " ".join(f"{name}={value}" for name, value in facts(notice).items())
    return f"{notice.name} {values}"


# --- taking back -----------------------------------------------------------------------------------------------------


async def _take_back(secondary: ServiceBusClient, queues: tuple[str, ...], messages: int, log: _Log) -> None:
    taken = sum(await asyncio.gather(*(_from_queue(secondary, queue, messages, log) for queue in queues)))
    left = messages - taken
    log.add(
        f"{taken} of {messages} diverted messages taken back out of the backlog"
        + (f"; {left} are left to the syphon, or it was quicker" if left else "")
    )


async def _from_queue(secondary: ServiceBusClient, queue: str, most: int, log: _Log) -> int:
    try:
        async with secondary.get_queue_receiver(queue) as receiver:
            ours = await _holds_ours(receiver, log.drill.token)
            return await _take(receiver, most, log.drill.token) if ours else 0
    except Exception as error:
        log.add(f"{queue} could not be looked into: {type(error).__name__}: {error}")
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
    """Complete the drill's own messages. Returns their number.

    Messages of other senders stay locked until the end, so that they are not received again, and are then abandoned.
    """
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
