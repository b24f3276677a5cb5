"""Moves a batch of held messages from a backlog queue to the primary.

Each message is translated, then sent, then completed. Three rules make this safe (Y3, L1): the intent of a send is on
disk before the send, a message is completed only after the primary accepted the message, and the outcome of the send is
in the ledger's file before the completion. So a crash between two steps can cause a second delivery of a message, but
never a loss, and the ledger never takes a completed message for one that is still in the backlog. A message that cannot
be sent now is put aside (deferred). A message that this transport would change is *kept*: deferred, and not brought
back by this syphon. A message that can never be delivered is dead-lettered (Y5, Y6, Y10). `plan` decides between these
ways.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Final, NamedTuple, assert_never

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind
from twinbus.ledger import LedgerUnavailableError, Move, RunningOperation
from twinbus.syphon.context import MoveStep, SyphonContext
from twinbus.syphon.held_batch import HeldBatch
from twinbus.syphon.plan import (
    DeferredMessages,
    DestinationRoute,
    FailedSendAction,
    Recall,
    RoutingDecision,
    destination_key,
)
from twinbus.syphon.syphon_ledger import LOCK_LOST, NOT_RECORDED
from twinbus.syphon.transport import (
    Backlog,
    BacklogFailedError,
    CannotCarryError,
    HeldMessage,
    NeverDeliverableError,
    OutgoingMessage,
    SendFailedError,
)

_log = logging.getLogger(__name__)

# Dead-letter reasons of messages that the primary refused.
DESTINATION_NOT_FOUND: Final = "DestinationNotFound"
MESSAGE_TOO_LARGE: Final = "MessageTooLarge"
MESSAGE_REFUSED: Final = "MessageRefused"
_REASONS: Final = {
    FailureKind.ENTITY_NOT_FOUND: DESTINATION_NOT_FOUND,
    FailureKind.MESSAGE_TOO_LARGE: MESSAGE_TOO_LARGE,
}
_LONGEST_DESCRIPTION: Final = 1000
_SEND_RETRY_SECONDS: Final = 0.5


class _SendGroup(NamedTuple):
    """The messages of one batch for one destination.

    `epoch` is the epoch of the routing decision. The outcome of the send is reported to `Destinations` with this epoch.
    """

    path: str
    epoch: int
    messages: Sequence[OutgoingMessage]
    operation: RunningOperation | None = None


class Mover:
    """Moves the batches of one backlog queue. Calls `on_put_aside` after messages were put aside."""

    def __init__(
        self,
        queue: str,
        backlog: Backlog,
        deferred: DeferredMessages,
        context: SyphonContext,
        on_put_aside: Callable[[], None],
    ) -> None:
        self.completed = 0
        self.moved = 0
        """How many messages were moved: completed, dead-lettered or kept."""
        self._queue = queue
        self._backlog = backlog
        self._deferred = deferred
        self._context = context
        self._clock = context.broker_clock(queue)
        self._on_put_aside = on_put_aside

    async def move(self, batch: HeldBatch, recall: Recall | None = None) -> None:
        """Return when every message of the batch is settled, or has lost its lock.

        `recall` is the recall that brought the batch back, if there was one. If the recall is a probe, only one message
        of its destination is sent.
        """
        context = self._context
        self._report(MoveStep.RECEIVED, batch.held)
        if context.shared_holds is not None:
            await context.shared_holds.refresh()
        by_path: dict[str, list[OutgoingMessage]] = {}
        tasks = self._translate(batch, by_path)
        groups: list[_SendGroup] = []
        is_probing, is_only_put_aside = False, not tasks
        probe = recall.probe if recall is not None else None
        for path, messages in by_path.items():
            is_probed = recall is not None and destination_key(path) == destination_key(recall.path)
            # An operator may have set a hold after the probe was decided (S15): `route` then puts the messages aside.
            if probe is not None and is_probed and not context.destinations.is_held(path):
                decision, probe = RoutingDecision(DestinationRoute.PROBE, probe), None
            else:
                decision = context.destinations.route(path, context.now())
            match decision.route:
                case DestinationRoute.SEND:
                    groups.append(_SendGroup(path, decision.epoch, messages))
                case DestinationRoute.PROBE:
                    is_probing = True
                    groups.append(_SendGroup(path, decision.epoch, messages[:1]))
                    if len(messages) > 1:
                        tasks.append(self._put_aside(batch, path, messages[1:]))
                case DestinationRoute.PUT_ASIDE:
                    tasks.append(self._put_aside(batch, path, messages))
                case DestinationRoute.DEAD_LETTER:
                    description = f"{path} is not on the primary"
                    tasks.append(self._dead_letter(batch, path, messages, DESTINATION_NOT_FOUND, description))
                    is_only_put_aside = False
                case _:
                    assert_never(decision.route)
        if recall is not None and probe is not None:
            context.destinations.void(recall.path, probe)
        if groups:
            tasks.append(self._send_groups(batch, groups))
        batch.is_only_put_aside = is_only_put_aside and not groups
        try:
            await _run_all(tasks)
        finally:
            if is_probing:
                context.notify_listeners()  # the probe is over, and other pumps may wait for its end

    def _translate(
        self, batch: HeldBatch, by_path: dict[str, list[OutgoingMessage]]
    ) -> list[Coroutine[None, None, None]]:
        """Put the messages that can be sent into `by_path`. Return coroutines that settle the other messages."""
        context = self._context
        restore, ttl = context.transport.restore, context.options.ttl
        now = self._clock.earliest(context.now(), context.wall())
        settlements: list[Coroutine[None, None, None]] = []
        undeliverable: dict[tuple[str | None, str, str], list[HeldMessage]] = {}
        for held in batch.held:
            try:
                message = restore(held, ttl, now)
            except NeverDeliverableError as error:
                undeliverable.setdefault((error.path, error.reason, error.description), []).append(held)
            except CannotCarryError as error:
                settlements.append(self._keep(batch, held, error))
            else:
                messages = by_path.get(message.path)
                if messages is None:
                    by_path[message.path] = [message]
                else:
                    messages.append(message)
        # Together, as far as the words are the same: each call waits for the ledger, and logs.
        for (path, reason, description), group in undeliverable.items():
            settlements.append(self._dead_letter(batch, path, group, reason, description))
        return settlements

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _send_groups(self, batch: HeldBatch, groups: Sequence[_SendGroup], *, retried: bool = False) -> None:
        """Write the intents of all groups with one flush, then send the groups concurrently."""
        unsent = {group.path: group.epoch for group in groups}
        try:
            intended = await self._write_intents(batch, groups)
            for group in intended:
                del unsent[group.path]
            await _run_all([self._send(batch, group, retried) for group in intended])
        finally:
            for path, epoch in unsent.items():
                self._context.destinations.void(path, epoch)

    async def _write_intents(self, batch: HeldBatch, groups: Sequence[_SendGroup]) -> list[_SendGroup]:
        """Return the groups with their running operations, without messages whose lock was lost.

        Waits while the ledger cannot be written. If the syphon stops during this wait, abandons the messages and
        returns no groups.
        """
        ledger, began = self._context.ledger, self._context.now()
        while True:
            intended: list[_SendGroup] = []
            broker_at = self._clock.time(self._context.now())
            try:
                for path, epoch, given, _ in groups:
                    if messages := self._still_locked(batch, given):
                        intended.append(_SendGroup(path, epoch, messages, ledger.begin_send(path, messages, broker_at)))
                await ledger.flush()
            except LedgerUnavailableError as error:
                for group in intended:
                    ledger.send_not_tried(group.operation)
                _log.error("nothing is sent while the ledger cannot be written: %s", error)
                if not await self._context.wait_for_ledger(began, error):
                    await self._abandon(batch, [one.held for group in groups for one in group.messages])
                    return []
            else:
                for group in intended:
                    self._report(MoveStep.INTENDED, group.messages)
                return intended

    async def _send(self, batch: HeldBatch, group: _SendGroup, retried: bool) -> None:
        context, path, messages = self._context, group.path, group.messages
        self._report(MoveStep.SENDING, messages)
        try:
            await context.send(path, messages)
        except SendFailedError as error:
            await self._send_failed(batch, group, error, retried)
        except BaseException:
            context.destinations.void(path, group.epoch)
            raise
        else:
            now = context.now()
            self._report(MoveStep.CONFIRMED, messages)
            context.ledger.send_succeeded(group.operation, path, messages, now)
            if context.destinations.succeeded(path, group.epoch, now):
                _log.info("%s takes messages again", path)
                context.notify_listeners()
            await self._complete(batch, path, messages)

    async def _send_failed(self, batch: HeldBatch, group: _SendGroup, error: SendFailedError, retried: bool) -> None:
        context, path, epoch = self._context, group.path, group.epoch
        failed = error.failed
        failed_ids = set(map(id, failed))
        arrived = [message for message in group.messages if id(message) not in failed_ids]
        now = context.now()
        context.ledger.send_failed(group.operation, error, arrived, now)
        if arrived:
            await self._complete(batch, path, arrived)
        action = context.destinations.failed(
            path, epoch, error.kind, now, context.chance(), retried=retried, messages=len(failed)
        )
        match action:
            case FailedSendAction.RETRY:
                await asyncio.sleep(_SEND_RETRY_SECONDS)
                await self._send_groups(batch, [_SendGroup(path, epoch, failed)], retried=True)
            case FailedSendAction.SPLIT:
                middle = len(failed) // 2
                for half in (failed[:middle], failed[middle:]):
                    await self._send_groups(batch, [_SendGroup(path, epoch, half)], retried=retried)
            case FailedSendAction.PUT_ASIDE:
                self._log_put_aside(error)
                context.notify_listeners()
                await self._put_aside(batch, path, failed)
            case FailedSendAction.DEAD_LETTER:
                reason = _REASONS.get(error.kind, MESSAGE_REFUSED)
                await self._dead_letter(batch, path, failed, reason, f"{path}: {error.detail or error.kind}")
            case FailedSendAction.ABANDON:
                await self._abandon(batch, [message.held for message in failed])
            case _:
                assert_never(action)

    def _log_put_aside(self, error: SendFailedError) -> None:
        """Log the first failure of a destination as a warning or error, and the next failures at level DEBUG."""
        level = logging.ERROR if error.kind in CREDENTIAL_REFUSED else logging.WARNING
        if self._context.destinations.failures(error.path) > 1:
            level = logging.DEBUG
        _log.log(level, "%s is not ready, %d messages are put aside: %s", error.path, len(error.failed), error)

    # --- settling ----------------------------------------------------------------------------------------------------

    async def _complete(self, batch: HeldBatch, path: str, messages: Sequence[OutgoingMessage]) -> None:
        held = [message.held for message in messages]
        ledger = self._context.ledger
        if not await self._is_written(f"{len(held)} messages were delivered, but are not completed"):
            # They will be delivered again.
            ledger.moved(Move.POSSIBLE_DUPLICATE, self._queue, path, held, NOT_RECORDED)
            await self._abandon(batch, held)
            return
        self._report(MoveStep.RECORDED, held)
        began, why = self._context.now(), LOCK_LOST
        try:
            lost = await self._backlog.complete(held)
        except BacklogFailedError as error:
            _log.warning("%d messages were delivered but perhaps not completed: %s", len(held), error)
            lost, why = held, str(error.kind)
        now = self._context.now()
        if lost:
            self._deferred.schedule_rescan(now)
        broker_at = self._clock.time(began) if lost else None
        ledger.completed(self._queue, path, messages, lost, why, now - began, broker_at)
        batch.settled(held)
        self._report(MoveStep.COMPLETED, held)
        self.completed += len(held) - len(lost)
        self.moved += len(held)

    async def _is_written(self, waiting: str) -> bool:
        """Write what was recorded to the ledger's file (L1). Return whether the messages may be settled.

        Waits while the ledger cannot be written and its option `on_error` is "stop". Returns False if the syphon stops
        during this wait. `waiting` is for the log: what waits.
        """
        began = self._context.now()
        while True:
            try:
                self._context.ledger.write()
            except LedgerUnavailableError as error:
                _log.error("%s: %s", waiting, error)
                if not await self._context.wait_for_ledger(began, error):
                    return False
            else:
                return True

    async def _put_aside(self, batch: HeldBatch, path: str, messages: Sequence[OutgoingMessage]) -> None:
        numbers = await self._defer(batch, [message.held for message in messages])
        self._deferred.add(path, numbers)
        self._context.ledger.counts.deferred(path, len(numbers))
        self._on_put_aside()

    async def _keep(self, batch: HeldBatch, held: HeldMessage, error: CannotCarryError) -> None:
        numbers = await self._defer(batch, [held])
        self._deferred.keep(numbers)
        self.moved += len(numbers)
        if numbers:
            _log.warning("message %s stays in %s: %s", held.message_id, self._queue, error)
            now = self._clock.time(self._context.now())
            self._context.ledger.moved(Move.KEPT, self._queue, error.path, [held], error.description, now)

    async def _defer(self, batch: HeldBatch, held: Sequence[HeldMessage]) -> list[int]:
        """Return the sequence numbers of the messages that are deferred now."""
        try:
            lost = set(map(id, await self._backlog.defer(held)))
        except BacklogFailedError as error:
            # A message that was not deferred is delivered again when its lock ends; a scan finds a deferred message.
            _log.warning("%d messages were perhaps not deferred: %s", len(held), error)
            lost = set(map(id, held))
        self._settled(batch, held, MoveStep.PUT_ASIDE, is_certain=not lost)
        return [one.sequence_number for one in held if id(one) not in lost]

    async def _dead_letter(
        self,
        batch: HeldBatch,
        path: str | None,
        messages: Sequence[OutgoingMessage | HeldMessage],
        reason: str,
        description: str,
    ) -> None:
        held = [message.held if isinstance(message, OutgoingMessage) else message for message in messages]
        ledger = self._context.ledger
        # Before the settlement (L1): after a crash between them, the messages come again and are recorded again. In the
        # other order, the ledger would have messages in the backlog for ever that are in the dead-letter queue.
        now = self._clock.time(self._context.now())
        ledger.moved(Move.DEAD_LETTERED, self._queue, path, held, reason, now)
        if not await self._is_written(f"{len(held)} messages cannot be delivered, but are not dead-lettered"):
            await self._abandon(batch, held)
            return
        self._report(MoveStep.RECORDED, held)
        try:
            lost = len(await self._backlog.dead_letter(held, reason, description[:_LONGEST_DESCRIPTION]))
        except BacklogFailedError as error:
            _log.warning("%d messages were perhaps not dead-lettered: %s", len(held), error)
            lost = len(held)
        self._settled(batch, held, MoveStep.DEAD_LETTERED, is_certain=not lost)
        if done := len(held) - lost:
            _log.warning("%d messages were dead-lettered: %s: %s", done, reason, description)
            ledger.counts.dead_lettered(path or "", done, reason)
            self.moved += done

    async def _abandon(self, batch: HeldBatch, held: Sequence[HeldMessage]) -> None:
        # A recalled message that is abandoned becomes deferred again, and its number is no longer in `_deferred`.
        self._deferred.schedule_rescan(self._context.now())
        try:
            await self._backlog.abandon(held)
        except BacklogFailedError as error:
            _log.info("%d messages come back when their locks end: %s", len(held), error)
        batch.settled(held)

    def _settled(self, batch: HeldBatch, held: Sequence[HeldMessage], step: MoveStep, *, is_certain: bool) -> None:
        if not is_certain:
            self._deferred.schedule_rescan(self._context.now())
        batch.settled(held)
        self._report(step, held)

    def _still_locked(self, batch: HeldBatch, messages: Sequence[OutgoingMessage]) -> Sequence[OutgoingMessage]:
        if not batch.lost:
            return messages
        locked = [one for one in messages if id(one.held) not in batch.lost]
        if len(locked) < len(messages):
            self._deferred.schedule_rescan(self._context.now())
        return locked

    def _report(self, step: MoveStep, messages: Sequence[OutgoingMessage] | Sequence[HeldMessage]) -> None:
        if self._context.on_step is not None:
            self._context.on_step(step, [one.held if isinstance(one, OutgoingMessage) else one for one in messages])


async def _run_all(tasks: Sequence[Coroutine[None, None, None]]) -> None:
    """Run the tasks concurrently until all have ended. Then raise the error of the first task that failed, if any."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if result is not None:
            raise result
