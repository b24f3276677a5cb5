"""The asyncio pair: its loop, tasks and timers. What a pair is: `partnership`; what its senders do: `calls`.

A `Pair` is made without a loop and without network I/O, as the SDK's client is. The namespaces are paired (P1) by the
first of `async with pair`, `await pair` and any call of one of its senders. All of them wait for the same task,
`_pairing`:

    made    --first use-->  pairing  --queues found or created-->  paired
    pairing --it fails in a sender's call-->                       made: the next use tries again
    pairing --it fails while an `await` or `async with` waits,
              or the last waiter is one of these and is cancelled-->  closed
    any     --close-->      closed: senders, `await` and `async with` raise PairClosedError

A pairing that a sender's call starts does not fail because the secondary cannot be reached (P8). It goes on when that
call is cancelled, so that later calls find the namespaces paired.

The event loop that runs at the first use has all tasks, timers and connections of the pair. Other loops are refused.

Receivers and session lists use the primary alone and do not wait for the pairing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, Self
from weakref import WeakSet

from azure.core.async_paging import AsyncItemPaged
from azure.servicebus.aio import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from twinbus.backlog import FailureKind, failure_kind
from twinbus.ledger import Stage
from twinbus.pairing.administration import AioAdministration
from twinbus.pairing.aio.backlog_link import AioBacklogLinks
from twinbus.pairing.aio.backlog_peeker import AioBacklogPeeker
from twinbus.pairing.aio.sender import PairedSender
from twinbus.pairing.aio.timeouts import LoopTimer, TaskTimeouts, cancel
from twinbus.pairing.attending import SharedBacklogWatch
from twinbus.pairing.decide.backlog_watch import Peek
from twinbus.pairing.decide.failover import PingFailed, PingSucceeded
from twinbus.pairing.events import Callback, Notice
from twinbus.pairing.message_copies import ping_message
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import NotPairedError, PairLoopError, Side, SideState
from twinbus.pairing.pair_state import EntityState, PairState, PairSyphon, SyphonFactory
from twinbus.pairing.provisioning import background_pause
from twinbus.pairing.receivers import AioQuietReceiver, recorded
from twinbus.pairing.shared_state import SharedEntity
from twinbus.sdk import check_version, hides_pings, open_aio_link, retry_settings

_log = logging.getLogger("twinbus.pairing")
# How long closing waits for a client whose event loop was closed.
_LEFT_OVER_SECONDS: Final = 1.0


class PairSide:
    """`pair.primary` or `pair.secondary` (C1)."""

    def __init__(self, pair: Pair, side: Side) -> None:
        self._pair = pair
        self._side = side

    @property
    def state(self) -> SideState:
        return self._side.state

    @property
    def cause(self) -> BaseException | None:
        """Why it faulted."""
        return self._side.cause

    async def close(self) -> None:
        self._pair._attempts.claim_to_close()
        self._side.leave(SideState.CLOSED)
        await self._pair._ended()

    def fault(self, cause: BaseException) -> None:
        """Faults the side at once, in any thread. What belongs to it ends in the background, in the pair's event loop.

        If that loop was closed, or none has used the pair, `pair.close()` does the rest.
        """
        self._side.leave(SideState.FAULTED, cause)


class Pair:
    """Two namespaces as one. Made by `pair_namespaces` or `pair_connection_strings` of `twinbus.aio`.

    Use it like the SDK's client: `async with pair: …`, or without entering it and `await pair.close()` at the end.
    `pair = await pair_connection_strings(…)` pairs at once and returns the pair. Closing closes both sides; closing
    again does nothing; a closed pair cannot be entered again: make another.

    A pair that was used has to be closed. One that is dropped without closing stays registered, and its primary cannot
    be paired again in this process (P3). A pair belongs to the event loop that first uses it; in any other loop it
    raises PairLoopError.
    """

    def __init__(
        self,
        primary: ServiceBusClient,
        secondary: ServiceBusClient,
        options: SendAvailabilityOptions,
        *,
        admin: ServiceBusAdministrationClient | None = None,
        syphon: SyphonFactory | None = None,
        owns_clients: bool = False,
    ) -> None:
        check_version()
        self._admin = admin
        self._make_syphon = syphon
        self._clients = {"primary": primary, "secondary": secondary}
        self._owns_clients = owns_clients
        self._retries = retry_settings(primary)
        self._pairing: asyncio.Task[None] | None = None
        self._paired = False
        self._waiting = 0
        self._attempts = TaskTimeouts(options.try_timeout.total_seconds())
        self._pinging: dict[SharedEntity, asyncio.Task[Any]] = {}
        self._senders: WeakSet[PairedSender] = WeakSet()
        self._provisioning: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._state = PairState(
            (primary, secondary),
            options,
            self,
            threaded=False,
            let_go=self._let_go,
            look=self._look,
            react=self._attempts.in_loop,
        )
        self._looks = AioBacklogPeeker(secondary, self._attempts, self._state.on_secondary, self._state.failed_over)
        self._links = AioBacklogLinks(
            secondary, self._state.secondary, self._state.rotation, self._attempts, self._state.on_secondary
        )
        self.primary = PairSide(self, self._state.primary)
        self.secondary = PairSide(self, self._state.secondary)
        self.options = options

    # --- senders and receivers -------------------------------------------------------------------------------------

    def get_queue_sender(self, queue_name: str, **kwargs: Any) -> PairedSender:
        return self._sender(queue_name, lambda: self._clients["primary"].get_queue_sender(queue_name, **kwargs))

    def get_topic_sender(self, topic_name: str, **kwargs: Any) -> PairedSender:
        return self._sender(topic_name, lambda: self._clients["primary"].get_topic_sender(topic_name, **kwargs))

    def get_queue_receiver(
        self, queue_name: str, *, quiet_while_down: bool = False, **kwargs: Any
    ) -> ServiceBusReceiver | AioQuietReceiver:
        receiver = recorded(
            self._clients["primary"].get_queue_receiver(queue_name, **kwargs), self._state.on_primary, queue_name
        )
        return AioQuietReceiver(receiver) if quiet_while_down else receiver

    def get_subscription_receiver(
        self, topic_name: str, subscription_name: str, *, quiet_while_down: bool = False, **kwargs: Any
    ) -> ServiceBusReceiver | AioQuietReceiver:
        receiver = recorded(
            self._clients["primary"].get_subscription_receiver(topic_name, subscription_name, **kwargs),
            self._state.on_primary,
            f"{topic_name}/Subscriptions/{subscription_name}",
        )
        return AioQuietReceiver(receiver) if quiet_while_down else receiver

    def list_queue_sessions(
        self, queue_name: str, *, state_updated_after: datetime | None = None, timeout: float | None = None
    ) -> AsyncItemPaged[str]:
        """Session ids of a queue of the primary, as `ServiceBusClient.list_queue_sessions` returns them."""
        return self._clients["primary"].list_queue_sessions(
            queue_name, state_updated_after=state_updated_after, timeout=timeout
        )

    def list_subscription_sessions(
        self,
        topic_name: str,
        subscription_name: str,
        *,
        state_updated_after: datetime | None = None,
        timeout: float | None = None,
    ) -> AsyncItemPaged[str]:
        """Session ids of a subscription, as `ServiceBusClient.list_subscription_sessions` returns them."""
        return self._clients["primary"].list_subscription_sessions(
            topic_name, subscription_name, state_updated_after=state_updated_after, timeout=timeout
        )

    def _sender(self, path: str, make: Callable[[], Any]) -> PairedSender:
        self._state.primary.refuse_unless_open()
        made = PairedSender(
            self._state.place(path),
            lambda: self._attempts.ready(make()),
            self._links,
            self._attempts,
            self._retries,
            self._state.on_primary,
            pairing=None if self._paired else partial(self._until_paired, by_sender=True),
        )
        self._senders.add(made)
        return made

    # --- what it shows and obeys -----------------------------------------------------------------------------------

    @property
    def fully_qualified_namespace(self) -> str:
        return self._clients["primary"].fully_qualified_namespace

    @property
    def backlog_queues(self) -> tuple[str, ...]:
        """Those usable now: the pair's effective count is their number (P7).

        An empty tuple before the namespaces are paired.
        """
        return self._state.rotation.rotation.usable if self._paired else ()

    @property
    def syphon(self) -> PairSyphon | None:
        return self._state.syphon

    @syphon.setter
    def syphon(self, syphon: PairSyphon | None) -> None:
        self._state.syphon = syphon

    def entities(self) -> tuple[EntityState, ...]:
        return self._state.entities()

    def on(self, event: str, callback: Callback) -> Callable[[], None]:
        """Call back at every `failover_engaged`, `restored`, `primary_unusable`…; what is returned takes it off."""
        return self._state.events.on(event, callback)

    def force_failover(self, entity: str) -> None:
        """Raises RuntimeError outside an event loop, PairLoopError in another loop than the pair's: it starts pings.

        Raises NotPairedError before the namespaces are paired.
        """
        asyncio.get_running_loop()
        self._state.primary.refuse_unless_open()
        if not self._paired:
            raise NotPairedError
        self._attempts.claim()
        self._state.force_failover(entity)

    def force_restore(self, entity: str) -> None:
        """Raises RuntimeError outside an event loop, PairLoopError in another loop than the pair's."""
        self._attempts.claim()
        self._state.force_restore(entity)

    # --- pairing ---------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Self]:
        return self._entered().__await__()

    async def __aenter__(self) -> Self:
        return await self._entered()

    async def _entered(self) -> Self:
        """Closes the pair if pairing fails, because the caller may have no reference to close."""
        try:
            await self._until_paired()
        except PairLoopError:
            raise
        except BaseException as error:
            # A caller that is cancelled leaves the pairing to those that still wait for it.
            if not (isinstance(error, asyncio.CancelledError) and self._waiting):
                await self.close()
            raise
        return self

    async def _until_paired(self, *, by_sender: bool = False) -> None:
        """Pairs, or waits for the pairing under way (P1). Raises the refusal of a side that is not open.

        A pairing that a sender's call starts does not fail because the secondary is away: the primary may be well (P8).
        """
        self._state.primary.refuse_unless_open()
        self._attempts.claim()
        if self._paired:
            return
        self._state.secondary.refuse_unless_open()
        pairing = self._pairing
        if pairing is None:
            self._attempts.adopt()
            pairing = self._pairing = self._attempts.start(
                self._pair(by_sender or self.options.on_secondary_down == "background")
            )
            pairing.add_done_callback(self._pairing_ended)
        task = asyncio.current_task()
        assert task is not None
        cancellations = task.cancelling()
        self._waiting += 1
        try:
            await asyncio.shield(pairing)
        except asyncio.CancelledError:
            if pairing.cancelled() and task.cancelling() == cancellations:
                # Closing ended the pairing, and nobody cancelled this task.
                for side in (self._state.primary, self._state.secondary):
                    side.refuse_unless_open()
            raise
        finally:
            self._waiting -= 1

    def _pairing_ended(self, pairing: asyncio.Task[None]) -> None:
        if pairing.cancelled() or pairing.exception() is not None:
            self._pairing = None

    async def _pair(self, background: bool) -> None:
        self._state.begin()
        secondary = self._clients["secondary"]
        try:
            administration = AioAdministration.of(
                secondary, self._admin, seconds=self.options.try_timeout.total_seconds()
            )
            administration.recording = self._state.on_secondary
            try:
                await self._provision(administration, background)
            except BaseException:
                await administration.close()
                raise
            self._state.start_syphon(self._make_syphon, (self._clients["primary"], secondary), self._admin)
        except BaseException:
            self._state.withdraw()
            raise
        self._paired = True

    # --- closing ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Closes both sides and waits until nothing of the pair is left.

        Raises PairLoopError in another event loop while the pair's loop is open. After that was closed, any loop may
        close the pair; what the closed loop has left then ends without a word to the namespaces.
        """
        self._attempts.claim_to_close()
        for side in (self._state.primary, self._state.secondary):
            side.leave(SideState.CLOSED)
        await self._ended()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ended(self) -> None:
        if self._ending is not None and not self._ending.done() and self._ending.get_loop().is_closed():
            # The loop was closed before the pair had ended.
            self._ending = None
        if self._state.closed and self._ending is None:
            # What a fault in another thread has left to this loop runs first.
            await asyncio.sleep(0)
        if self._state.closed and self._ending is None and self._attempts.ours:
            # Both sides were faulted where no loop ran, so nothing has begun to end the pair.
            self._ending = asyncio.get_running_loop().create_task(self._end())
        if self._ending is not None:
            # Whoever stops waiting for it does not stop it.
            await asyncio.shield(self._ending)

    async def _end(self) -> None:
        # The last first; one that raises holds up none of the others.
        async with contextlib.AsyncExitStack() as steps:
            if self._state.own_ledger is not None:
                steps.push_async_callback(asyncio.to_thread, self._state.own_ledger.close)
            if self._owns_clients:
                for client in self._clients.values():
                    steps.push_async_callback(self._close_client, client)
            steps.callback(self._state.events.close)
            steps.push_async_callback(self._attempts.end)
            if self._state.syphon is not None and (ending := self._state.syphon.ended()) is not None:
                await ending

    async def _close_client(self, client: ServiceBusClient) -> None:
        if self._attempts.has_loop:
            await client.close()
            return
        # Its connections belong to a loop that was closed: what they raise now is no news, and they may not answer.
        try:
            await asyncio.wait_for(client.close(), _LEFT_OVER_SECONDS)
        except Exception as error:
            _log.debug("a client of the closed event loop of %s could not be closed: %r", self._state.name, error)

    def _let_go(self, side: Side) -> None:
        """Without either side nothing is diverted any more; without both the pair ends, whoever closed them (C3)."""
        self._looks.stop()
        self._links.close()
        for task in (self._pairing, self._provisioning):
            if task is not None:
                cancel(task)
        if side is self._state.primary:
            for sender in list(self._senders):
                sender.let_go()
        if self._state.closed and self._ending is None and self._attempts.has_loop:
            # Runs in the pair's loop. Without one, `close` ends the pair.
            self._ending = asyncio.get_running_loop().create_task(self._end())

    # --- what the cells ask of a driver ----------------------------------------------------------------------------

    def timer(self, due: Callable[[], object]) -> LoopTimer:
        return LoopTimer(due)

    def emit(self, notice: Notice) -> None:
        self._state.events.emit(notice)

    def ping(self, cell: SharedEntity, episode: int) -> None:
        self._pinging[cell] = self._attempts.start(self._ping(cell, episode))

    def stop_ping(self, cell: SharedEntity) -> None:
        task = self._pinging.pop(cell, None)
        # It may be the ping's own success that stops the pings.
        if task is not None and not task.get_loop().is_closed() and task is not asyncio.current_task():
            task.cancel()

    async def _ping(self, cell: SharedEntity, episode: int) -> None:
        begun = time.monotonic()
        failure: FailureKind | None = None
        answered = False
        sender: Any = None
        try:
            sender = self._attempts.ready(self._clients["primary"].get_queue_sender(cell.entity.path))
            await self._attempts.bound(self._pinged(sender), self._attempts.seconds, sender)
            answered = True
        except Exception as error:
            failure = failure_kind(error)
        finally:
            if answered:
                self._attempts.retire(sender)
            elif sender is not None:
                self._attempts.discard(sender)
        self._state.events.pinged(cell.entity.path, failure, time.monotonic() - begun)
        cell.advance(PingSucceeded(episode) if failure is None else PingFailed(episode, failure))

    async def _pinged(self, sender: Any) -> None:
        how = self.options.ping
        await open_aio_link(sender, self._attempts.seconds)
        if how == "message" or (how == "auto" and hides_pings(sender)):
            ping = ping_message()
            primary = self._state.on_primary
            there = primary.place(Stage.PING, sender.entity_name)
            send = primary.aio_recorded(there, ping, lambda link: link.send_messages(ping))
            await send(sender)

    def _look(self, cell: SharedBacklogWatch, peeks: tuple[Peek, ...]) -> None:
        self._looks.begin(cell, peeks)

    # --- backlog queues --------------------------------------------------------------------------------------------

    async def _provision(self, administration: AioAdministration, background: bool) -> None:
        """Finds or creates the backlog queues (P1). With `background`, goes on looking for the others (P8)."""
        how: Literal["background", "raise"] = "background" if background else "raise"
        done = await administration.provision(self._state.queues, replace(self.options, on_secondary_down=how))
        self._state.provisioned(done)
        if done.failed and background:
            missing = tuple(cause.queue for cause in done.failed)
            self._provisioning = self._attempts.start(self._provision_again(administration, missing))
        else:
            await administration.close()

    async def _provision_again(self, administration: AioAdministration, missing: tuple[str, ...]) -> None:
        tries = 0
        try:
            while missing:
                tries += 1
                await asyncio.sleep(background_pause(tries))
                done = await administration.provision_again(missing)
                self._state.provisioned(done)
                missing = tuple(cause.queue for cause in done.failed)
        finally:
            await administration.close()


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
    syphon: SyphonFactory | None = None,
) -> Pair:
    """A pair of two namespaces on clients the caller made (P1). The clients stay the caller's to close."""
    return Pair(primary, secondary, options or SendAvailabilityOptions(), admin=secondary_admin, syphon=syphon)


def pair_connection_strings(
    primary: str,
    secondary: str,
    *,
    options: SendAvailabilityOptions | None = None,
    syphon: SyphonFactory | None = None,
    **kwargs: Any,
) -> Pair:
    """A pair of two namespaces by their connection strings. Keywords go to both clients, which are the pair's own."""
    clients = [ServiceBusClient.from_connection_string(text, **kwargs) for text in (primary, secondary)]
    return Pair(clients[0], clients[1], options or SendAvailabilityOptions(), syphon=syphon, owns_clients=True)
