"""A load's way from the backlog to the primary: translated, sent under an intent that is on disk, only then completed
(Y3); or put aside, kept or dead-lettered, as `plan` says (Y5, Y6, Y10).
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
from twinbus.syphon.syphon_ledger import LOCK_LOST
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

GONE: Final = "DestinationNotFound"
TOO_LARGE: Final = "MessageTooLarge"
REFUSED: Final = "MessageRefused"
_REASONS: Final = {FailureKind.ENTITY_NOT_FOUND: GONE, FailureKind.MESSAGE_TOO_LARGE: TOO_LARGE}
_LONGEST_DESCRIPTION: Final = 1000
_RETRY_SECONDS: Final = 0.5
_LEDGER_SECONDS: Final = 1.0


class _Shipment(NamedTuple):
    """Messages of one load for one destination, and the epoch their outcome is told with."""

    path: str
    epoch: int
    messages: Sequence[OutgoingMessage]
    operation: RunningOperation | None = None


class Mover:
    """For the loads of one backlog queue."""

    def __init__(
        self, queue: str, backlog: Backlog, shelf: DeferredMessages, room: SyphonContext, put_aside: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._backlog = backlog
        self._shelf = shelf
        self._room = room
        self._put_aside = put_aside
        self.completed = 0

    async def move(self, load: HeldBatch, recall: Recall | None = None) -> None:
        """Returns when every message of it is settled, or its lock lost."""
        room = self._room
        self._step(MoveStep.RECEIVED, load.held)
        groups: dict[str, list[OutgoingMessage]] = {}
        jobs = self._translate(load, groups)
        shipments: list[_Shipment] = []
        probes = False
        probe = recall.probe if recall is not None else None
        for path, messages in groups.items():
            if recall is not None and probe is not None and destination_key(path) == destination_key(recall.path):
                routed, probe = RoutingDecision(DestinationRoute.PROBE, probe), None
            else:
                routed = room.destinations.route(path, room.now())
            match routed.route:
                case DestinationRoute.SEND:
                    shipments.append(_Shipment(path, routed.epoch, messages))
                case DestinationRoute.PROBE:
                    probes = True
                    shipments.append(_Shipment(path, routed.epoch, messages[:1]))
                    if len(messages) > 1:
                        jobs.append(self._defer(load, path, messages[1:]))
                case DestinationRoute.PUT_ASIDE:
                    jobs.append(self._defer(load, path, messages))
                case DestinationRoute.DEAD_LETTER:
                    jobs.append(self._dead_letter(load, path, messages, GONE, f"{path} is not on the primary"))
                case _:
                    assert_never(routed.route)
        if recall is not None and probe is not None:
            room.destinations.void(recall.path, probe)
        if shipments:
            jobs.append(self._ship(load, shipments))
        try:
            await _all(jobs)
        finally:
            if probes:
                room.changed()  # over, whatever came of it: others may wait for their turn

    def _translate(
        self, load: HeldBatch, groups: dict[str, list[OutgoingMessage]]
    ) -> list[Coroutine[None, None, None]]:
        """Those that can be sent go to `groups`, by path; what is to be done with the others is returned."""
        restore, ttl, wall = self._room.transport.restore, self._room.options.ttl, self._room.wall()
        jobs: list[Coroutine[None, None, None]] = []
        for held in load.held:
            try:
                message = restore(held, ttl, wall)
            except NeverDeliverableError as error:
                jobs.append(self._never(load, held, error))
            except CannotCarryError as error:
                jobs.append(self._keep(load, held, error))
            else:
                group = groups.get(message.path)
                if group is None:
                    groups[message.path] = [message]
                else:
                    group.append(message)
        return jobs

    # --- sending -----------------------------------------------------------------------------------------------------

    async def _ship(self, load: HeldBatch, shipments: Sequence[_Shipment], *, retried: bool = False) -> None:
        """One flush makes the intents of them all durable; each is then sent by itself."""
        unsent = {shipment.path: shipment.epoch for shipment in shipments}
        try:
            ready = await self._intended(load, shipments)
            for shipment in ready:
                del unsent[shipment.path]
            await _all([self._send(load, shipment, retried) for shipment in ready])
        finally:
            for path, epoch in unsent.items():
                self._room.destinations.void(path, epoch)

    async def _intended(self, load: HeldBatch, shipments: Sequence[_Shipment]) -> list[_Shipment]:
        """With their operations, without messages whose lock was lost meanwhile. None of them: given back, to stop."""
        books = self._room.books
        while True:
            ready: list[_Shipment] = []
            try:
                for path, epoch, given, _ in shipments:
                    if messages := self._locked(load, given):
                        ready.append(_Shipment(path, epoch, messages, books.sending(path, messages)))
                await books.durable()
            except LedgerUnavailableError as error:
                for shipment in ready:
                    books.not_tried(shipment.operation)
                if self._room.stopping:
                    await self._give_back(load, [one for shipment in shipments for one in shipment.messages])
                    return []
                _log.error("nothing is sent while the ledger cannot be written: %s", error)
                await asyncio.sleep(_LEDGER_SECONDS)
            else:
                for shipment in ready:
                    self._step(MoveStep.INTENDED, shipment.messages)
                return ready

    async def _send(self, load: HeldBatch, shipment: _Shipment, retried: bool) -> None:
        room, path, messages = self._room, shipment.path, shipment.messages
        self._step(MoveStep.SENDING, messages)
        try:
            await room.send(path, messages)
        except SendFailedError as error:
            await self._failed(load, shipment, error, retried)
        except BaseException:
            room.destinations.void(path, shipment.epoch)
            raise
        else:
            now = room.now()
            self._step(MoveStep.CONFIRMED, messages)
            room.books.sent(shipment.operation, path, messages, now)
            if room.destinations.succeeded(path, shipment.epoch, now):
                _log.info("%s takes messages again", path)
                room.changed()
            await self._complete(load, path, messages)

    async def _failed(self, load: HeldBatch, shipment: _Shipment, error: SendFailedError, retried: bool) -> None:
        room, path, epoch = self._room, shipment.path, shipment.epoch
        failed = error.failed
        unsafe = set(map(id, failed))
        arrived = [message for message in shipment.messages if id(message) not in unsafe]
        now = room.now()
        room.books.failed(shipment.operation, error, arrived, now)
        if arrived:
            await self._complete(load, path, arrived)
        verdict = room.destinations.failed(
            path, epoch, error.kind, now, room.chance(), retried=retried, messages=len(failed)
        )
        match verdict:
            case FailedSendAction.RETRY:
                await asyncio.sleep(_RETRY_SECONDS)
                await self._ship(load, [_Shipment(path, epoch, failed)], retried=True)
            case FailedSendAction.SPLIT:
                middle = len(failed) // 2
                for half in (failed[:middle], failed[middle:]):
                    await self._ship(load, [_Shipment(path, epoch, half)], retried=retried)
            case FailedSendAction.PUT_ASIDE:
                again = room.destinations.failures(path) > 1
                level = (
                    logging.DEBUG if again else logging.ERROR if error.kind in CREDENTIAL_REFUSED else logging.WARNING
                )
                _log.log(level, "%s is not ready, %d messages are put aside: %s", path, len(failed), error)
                room.changed()
                await self._defer(load, path, failed)
            case FailedSendAction.DEAD_LETTER:
                reason = _REASONS.get(error.kind, REFUSED)
                await self._dead_letter(load, path, failed, reason, f"{path}: {error.detail or error.kind}")
            case FailedSendAction.GIVE_BACK:
                await self._give_back(load, failed)
            case _:
                assert_never(verdict)

    # --- settling ----------------------------------------------------------------------------------------------------

    async def _complete(self, load: HeldBatch, path: str, messages: Sequence[OutgoingMessage]) -> None:
        held = [message.held for message in messages]
        began, why = self._room.now(), LOCK_LOST
        try:
            lost = await self._backlog.complete(held)
        except BacklogFailedError as error:
            _log.warning("%d messages were delivered but perhaps not completed: %s", len(held), error)
            lost, why = held, str(error.kind)
        if lost:
            self._shelf.uncertain(self._room.now())
        load.settled(held)
        self._room.books.completed(self._queue, path, messages, lost, why, self._room.now() - began)
        self._step(MoveStep.COMPLETED, held)
        self.completed += len(held) - len(lost)

    async def _defer(self, load: HeldBatch, path: str, messages: Sequence[OutgoingMessage]) -> None:
        numbers = await self._deferred(load, [message.held for message in messages])
        self._shelf.deferred(path, numbers)
        self._room.books.counts.deferred(path, len(numbers))
        self._put_aside()

    async def _deferred(self, load: HeldBatch, held: Sequence[HeldMessage]) -> list[int]:
        """The numbers of those that are."""
        try:
            lost = set(map(id, await self._backlog.defer(held)))
        except BacklogFailedError as error:
            # Deferred or not: by its lock's end, or by peeking, it is found again.
            _log.warning("%d messages were perhaps not deferred: %s", len(held), error)
            lost = set(map(id, held))
        if lost:
            self._shelf.uncertain(self._room.now())
        self._settled(load, held, MoveStep.PUT_ASIDE)
        return [one.sequence_number for one in held if id(one) not in lost]

    async def _dead_letter(
        self,
        load: HeldBatch,
        path: str | None,
        messages: Sequence[OutgoingMessage | HeldMessage],
        reason: str,
        description: str,
    ) -> None:
        held = [message.held if isinstance(message, OutgoingMessage) else message for message in messages]
        try:
            lost = set(map(id, await self._backlog.dead_letter(held, reason, description[:_LONGEST_DESCRIPTION])))
        except BacklogFailedError as error:
            _log.warning("%d messages were perhaps not dead-lettered: %s", len(held), error)
            lost = set(map(id, held))
        if lost:
            self._shelf.uncertain(self._room.now())
        self._settled(load, held, MoveStep.DEAD_LETTERED)
        if done := [one for one in held if id(one) not in lost]:
            _log.warning("%d messages were dead-lettered: %s: %s", len(done), reason, description)
            self._room.books.moved(Move.DEAD_LETTERED, self._queue, path, done, reason)

    async def _never(self, load: HeldBatch, held: HeldMessage, error: NeverDeliverableError) -> None:
        await self._dead_letter(load, error.path, [held], error.reason, error.description)

    async def _keep(self, load: HeldBatch, held: HeldMessage, error: CannotCarryError) -> None:
        numbers = await self._deferred(load, [held])
        self._shelf.keep(numbers)
        if numbers:
            _log.warning("message %s stays in %s: %s", held.message_id, self._queue, error)
            self._room.books.moved(Move.KEPT, self._queue, error.path, [held], error.description)

    async def _give_back(self, load: HeldBatch, messages: Sequence[OutgoingMessage]) -> None:
        held = [message.held for message in messages]
        # Those that were deferred are so again, and remembered nowhere.
        self._shelf.uncertain(self._room.now())
        try:
            await self._backlog.abandon(held)
        except BacklogFailedError as error:
            _log.info("%d messages come back when their locks end: %s", len(held), error)
        self._settled(load, held, None)

    def _settled(self, load: HeldBatch, held: Sequence[HeldMessage], step: MoveStep | None) -> None:
        load.settled(held)
        if step is not None:
            self._step(step, held)

    def _locked(self, load: HeldBatch, messages: Sequence[OutgoingMessage]) -> Sequence[OutgoingMessage]:
        if not load.lost:
            return messages
        locked = [one for one in messages if id(one.held) not in load.lost]
        if len(locked) < len(messages):
            self._shelf.uncertain(self._room.now())
        return locked

    def _step(self, step: MoveStep, messages: Sequence[OutgoingMessage] | Sequence[HeldMessage]) -> None:
        if self._room.steps is not None:
            self._room.steps(step, [one.held if isinstance(one, OutgoingMessage) else one for one in messages])


async def _all(jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """One that fails leaves none of the others behind: the first error is raised when all are over."""
    for found in await asyncio.gather(*jobs, return_exceptions=True):
        if found is not None:
            raise found
