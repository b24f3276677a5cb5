"""The asyncio pair: its loop, tasks, pings and closing.

The state of a pair is in `pair_state`, its senders are in `sender`.

A `Pair` is made without a loop and without network I/O, like the SDK's client. The namespaces are paired (P1) at the
first use: `async with pair`, `await pair` or a call of one of its senders. All uses wait for the same task, `_pairing`:

    made    --first use-->  pairing  --queues found or created-->  paired
    pairing --it fails in a sender's call-->                       made: the next use tries again
    pairing --it fails while an `await` or `async with` waits,
              or the last waiter is one of these and is cancelled-->  closed
    any     --close-->      closed: senders, `await` and `async with` raise PairClosedError

A pairing that a sender's call starts does not fail because the secondary cannot be reached (P8). The pairing continues
if that call is cancelled, so that the next calls find the namespaces paired.

The event loop that runs at the first use gets all tasks, timers and connections of the pair. Other loops are refused.

Receivers and session lists use the primary alone and do not wait for the pairing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

from azure.core.async_paging import AsyncItemPaged
from azure.servicebus.aio import AutoLockRenewer, ServiceBusClient, ServiceBusReceiver

from twinbus.backlog import FailureKind, failure_kind
from twinbus.ledger import Stage
from twinbus.pairing.administration import AioAdministration
from twinbus.pairing.aio.backlog_link import AioBacklogLinks
from twinbus.pairing.aio.backlog_peeker import AioBacklogPeeker
from twinbus.pairing.aio.provisioner import Provisioner
from twinbus.pairing.aio.sender import PairedSender, detach, release
from twinbus.pairing.aio.state_access import TaskStateAccess
from twinbus.pairing.aio.timeouts import LoopTimer, TaskTimeouts, cancel, cancel_until_done, wait_for_event
from twinbus.pairing.decide.backlog_watch import PeekPage
from twinbus.pairing.decide.failover_events import PingFailed
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.events import Notice
from twinbus.pairing.message_copies import ping_message
from twinbus.pairing.options import SendAvailabilityOptions, chosen_options, clients_of
from twinbus.pairing.pair_interface import PairInterface
from twinbus.pairing.pair_sides import NotPairedError, PairLoopError, Side, SideState, SideView
from twinbus.pairing.pair_state import PairState, SyphonFactory
from twinbus.pairing.provisioning import Provisioned
from twinbus.pairing.receivers import AioQuietReceiver
from twinbus.pairing.shared_state import SharedBacklogWatch, SharedEntity
from twinbus.pairing.state_sharing import StateSharing, look_seconds
from twinbus.sdk import check_version, open_aio_link

if TYPE_CHECKING:
    from azure.servicebus.aio.management import ServiceBusAdministrationClient

    _Client = ServiceBusClient
else:
    _Client = object

_log = logging.getLogger("twinbus.pairing")
# How long closing waits for a client whose event loop was closed.
_LEFT_OVER_SECONDS: Final = 1.0
# With more senders than this, closing a pair does not wait until all links are closed with closing frames.
_MANY_SENDERS: Final = 16


class PairSide(SideView):
    """`pair.primary` or `pair.secondary`.

    Example: `pair.secondary.state` is `"faulted"` after its credential was refused for good.
    """

    def __init__(self, pair: Pair, side: Side) -> None:
        super().__init__(side)
        self._pair = pair

    async def close(self) -> None:
        """Close this side. Without the primary the pair refuses sends; without the secondary it diverts nothing.

        Example: `await pair.secondary.close()`.
        """
        self._pair._timeouts.claim_to_close()
        self._side.leave(SideState.CLOSED)
        await self._pair._wait_until_ended()

    def fault(self, cause: BaseException) -> None:
        """Fault the side. May be called in any thread. The side's links and tasks end afterwards, in the pair's loop.

        If the pair's loop was closed, or the pair has no loop yet, `pair.close()` ends them.

        Example: `pair.primary.fault(RuntimeError("maintenance"))`.
        """
        self._side.leave(SideState.FAULTED, cause)


class Pair(
    PairInterface[ServiceBusClient, PairedSender, ServiceBusReceiver, AsyncItemPaged[str], AutoLockRenewer], _Client
):
    """Two namespaces used as one, with the methods of `azure.servicebus.aio.ServiceBusClient`.

    `pair_namespaces` and `pair_connection_strings` of `twinbus.aio` return it. Type checkers and `isinstance` take it
    for a ServiceBusClient.

    Use a pair like the SDK's client: with `async with pair: …`, or with `await pair.close()` at the end.
    `pair = await pair_connection_strings(…)` pairs the namespaces and returns the pair. `close` closes both sides; a
    second `close` does nothing. A pair that `async with` has closed can be entered again, and is then paired again; a
    pair that `close` has closed stays closed.

    A pair that was used has to be closed. A pair that is dropped without closing stays registered, and its primary
    can be paired again in this process only with the same secondary and equal options. A pair belongs to the event
    loop that first uses it; in any other loop its calls raise PairLoopError. Pairs of several loops share their state.

    Example: `async with pair_connection_strings(primary, secondary) as pair: sender = pair.get_queue_sender("orders")`.
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
        self.options = options
        self.fully_qualified_namespace = primary.fully_qualified_namespace
        self._primary_client = primary
        self._secondary_client = secondary
        self._admin = admin
        self._make_syphon = syphon
        self._owns_clients = owns_clients
        self._callbacks = {}
        self._was_left = False
        self._set_up()

    def _set_up(self) -> None:
        """Make all that ends when the pair is closed. Needs no event loop."""
        primary, secondary, options = self._primary_client, self._secondary_client, self.options
        self._pairing: asyncio.Task[None] | None = None
        self._paired = False
        self._waiting = 0
        self._timeouts = TaskTimeouts(options.try_timeout.total_seconds())
        self._pinging: dict[SharedEntity, asyncio.Task[Any]] = {}
        self._senders: WeakSet[PairedSender] = WeakSet()
        self._provisioning: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._state = PairState(
            (primary, secondary),
            options,
            _Driver(self),
            threaded=False,
            on_side_left=self._on_side_left,
            peek=self._peek,
            recreate=self._recreate,
            react=self._timeouts.in_loop,
            tell=self._timeouts.tell,
        )
        recorder = self._state.secondary_recorder
        self._peeker = AioBacklogPeeker(secondary, self._timeouts, recorder, self._state.is_failed_over)
        self._links = AioBacklogLinks(secondary, self._state.secondary, self._state.rotation, self._timeouts, recorder)
        self.primary = PairSide(self, self._state.primary)
        self.secondary = PairSide(self, self._state.secondary)

    @property
    def backlog_queues(self) -> tuple[str, ...]:
        """The backlog queues that senders may use now. Empty before the namespaces are paired.

        Example: `len(pair.backlog_queues)` is 0 while the secondary cannot be reached.
        """
        return self._state.rotation.rotation.usable if self._paired else ()

    def force_failover(self, entity: str | None = None, *, hold: bool = False) -> None:
        """Fail an entity over, or all entities. With `hold` the failover stays until `force_restore`.

        A hold of all entities includes those whose first sender is made later. A failover starts pings, so this must be
        called in the pair's event loop.

        Raises RuntimeError outside an event loop, PairLoopError in another loop than the pair's, and NotPairedError
        before the namespaces are paired.

        Example: `pair.force_failover("orders", hold=True)`.
        """
        asyncio.get_running_loop()
        self._state.primary.refuse_unless_open()
        if not self._paired:
            raise NotPairedError
        self._timeouts.claim()
        self._state.force_failover(entity, hold=hold)

    def force_restore(self, entity: str | None = None) -> None:
        """Return an entity to the primary, or all entities.

        Raises RuntimeError outside an event loop, PairLoopError in another loop than the pair's.

        Example: `pair.force_restore("orders")`.
        """
        self._timeouts.claim()
        self._state.force_restore(entity)

    def _make_sender(self, path: str, make: Callable[[], Any]) -> PairedSender:
        sender = PairedSender(
            self._state.sender_setup(path),
            lambda: self._timeouts.prepare(make()),
            self._links,
            self._timeouts,
            until_ready=None if self._paired and self._has_looked else self._until_ready,
        )
        self._senders.add(sender)
        if self._state.primary.state is not SideState.OPEN:
            # The pair closed after `sender_setup`: it may have missed this sender.
            detach(sender, self._state.own_entity)
        return sender

    def _make_quiet(self, receiver: Any) -> AioQuietReceiver:
        return AioQuietReceiver(receiver)

    # --- pairing ---------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, Self]:
        return self._entered().__await__()

    async def __aenter__(self) -> Self:
        return await self._entered()

    async def _entered(self) -> Self:
        """Pair the namespaces. If the pairing fails, close the pair, because the caller may have no reference to it.

        Pairs the namespaces again if an earlier `async with` has closed the pair, as the SDK's client connects again.
        Senders of the closed pair stay closed.
        """
        ended = self._ending is None or self._ending.done()
        if self._was_left and self._state.closed_without_fault and ended:
            self._was_left = False
            self._set_up()
            self._register_callbacks()
        try:
            await self._until_paired()
        except PairLoopError:
            raise
        except BaseException as error:
            # If this caller was cancelled, others may still wait for the pairing.
            if not (isinstance(error, asyncio.CancelledError) and self._waiting):
                await self.close()
            raise
        return self

    async def _until_paired(self, *, by_sender: bool = False) -> None:
        """Pair the namespaces, or wait for the pairing in progress (P1). Raises an error if a side is not open.

        A pairing that a sender's call starts does not fail if the secondary cannot be reached (P8).
        """
        self._state.primary.refuse_unless_open()
        self._timeouts.claim()
        if self._paired:
            return
        self._state.secondary.refuse_unless_open()
        pairing = self._pairing
        if pairing is None:
            self._timeouts.adopt()
            pairing = self._pairing = self._timeouts.start(
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

    @property
    def _has_looked(self) -> bool:
        return self._state.sharing is None or self._state.sharing.has_looked

    async def _until_ready(self, until: float | None) -> None:
        """Wait until the namespaces are paired, and until the pair has looked at the shared state (S16).

        The look takes a second at most. A call that must end at `until` waits half of its time for the look.
        """
        pairing = self._until_paired(by_sender=True)
        await (pairing if until is None else self._timeouts.bound(pairing, until - time.monotonic()))
        sharing = self._state.sharing
        if sharing is not None and not sharing.has_looked:
            looked = asyncio.Event()
            wake = partial(self._timeouts.tell, looked.set)
            sharing.on_looked.add(wake)
            try:
                if not sharing.has_looked:
                    await wait_for_event(looked, look_seconds(until, time.monotonic()))
            finally:
                sharing.on_looked.discard(wake)

    def _pairing_ended(self, pairing: asyncio.Task[None]) -> None:
        if pairing.cancelled() or pairing.exception() is not None:
            self._pairing = None

    async def _pair(self, background: bool) -> None:
        secondary = self._secondary_client
        access: TaskStateAccess | None = None
        if self._state.sharing is not None:
            recorder, location = self._state.secondary_recorder, self._state.sharing.location
            access = TaskStateAccess(location, secondary, self._timeouts, recorder, self._administration)
        self._state.begin(access)
        try:
            await self._provision(background)
            self._state.start_syphon(self._make_syphon, (self._primary_client, secondary), self._admin)
        except BaseException:
            self._state.withdraw()
            raise
        self._paired = True

    # --- closing ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close both sides and wait until all tasks and connections of the pair have ended.

        With the option `state`, it first waits until the state is written: at most 1 s, or 5 s if a ping is in
        progress.

        Raises PairLoopError in another event loop while the pair's loop is open. After that loop was closed, any loop
        may close the pair; connections of the closed loop then end without notice to the namespaces.

        Example: `await pair.close()`.
        """
        self._timeouts.claim_to_close()
        if (sharing := self._state.sharing_to_finish()) is not None and self._timeouts.has_loop and self._timeouts.ours:
            await self._finish(sharing)
        for side in (self._state.primary, self._state.secondary):
            side.leave(SideState.CLOSED)
        await self._wait_until_ended()

    async def _finish(self, sharing: StateSharing) -> None:
        """Wait until the shared state has what this pair knows, so that later processes know it (S16)."""
        finished = asyncio.Event()
        wake = partial(self._timeouts.tell, finished.set)
        sharing.on_finished.add(wake)
        try:
            if seconds := sharing.finish():
                await wait_for_event(finished, seconds)
        finally:
            sharing.on_finished.discard(wake)

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        self._was_left = True

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            """For `isinstance`: programs may ask whether they got the SDK's client."""
            return ServiceBusClient

    async def _wait_until_ended(self) -> None:
        if self._ending is not None and not self._ending.done() and self._ending.get_loop().is_closed():
            # The loop was closed before the pair had ended.
            self._ending = None
        if self._state.closed and self._ending is None:
            # A fault in another thread may have scheduled `_on_side_left` in this loop: let it run first.
            await asyncio.sleep(0)
        if self._state.closed and self._ending is None and self._timeouts.ours:
            # Both sides were faulted where no loop ran, so nothing has begun to end the pair.
            self._ending = asyncio.get_running_loop().create_task(self._end())
        if self._ending is not None:
            # If the caller is cancelled, it stops waiting, but the task `_ending` continues.
            await asyncio.shield(self._ending)

    async def _end(self) -> None:
        # Callbacks run in reverse order, and all of them run even if one raises.
        async with contextlib.AsyncExitStack() as steps:
            if self._state.own_ledger is not None:
                steps.push_async_callback(asyncio.to_thread, self._state.own_ledger.close)
            if self._owns_clients:
                for client in (self._primary_client, self._secondary_client):
                    steps.push_async_callback(self._close_client, client)
            steps.callback(self._state.events.close)
            steps.push_async_callback(self._timeouts.shut_down)
            if self._state.syphon is not None and (ending := self._state.syphon.ended()) is not None:
                await ending

    async def _close_client(self, client: ServiceBusClient) -> None:
        if self._timeouts.has_loop:
            await client.close()
            return
        # The client's connections belong to a loop that was closed: they may raise any error, or never answer.
        try:
            await asyncio.wait_for(client.close(), _LEFT_OVER_SECONDS)
        except Exception as error:
            _log.debug("a client of the closed event loop of %s could not be closed: %r", self._state.name, error)

    def _on_side_left(self, side: Side) -> None:
        # If either side is closed or faulted, no message is diverted any more.
        self._peeker.stop()
        self._links.close()
        for task in (self._pairing, self._provisioning):
            if task is not None:
                cancel(task)
        if side is self._state.primary:
            for ping in list(self._pinging.values()):
                cancel_until_done(ping)
            if len(self._senders) > _MANY_SENDERS:
                self._timeouts.close_many_soon()
            for sender in list(self._senders):
                release(sender)
                detach(sender, self._state.own_entity)
        if self._state.closed and self._ending is None and self._timeouts.has_loop:
            # This runs in the pair's loop, also if another thread closed the sides (C3). Without a loop, `close` ends
            # the pair.
            self._ending = asyncio.get_running_loop().create_task(self._end())

    # --- pings -----------------------------------------------------------------------------------------------------

    def _start_ping(self, entity: SharedEntity, episode: int) -> None:
        task = self._pinging[entity] = self._timeouts.start(self._ping(entity, episode))
        # A ping that is cancelled because this pair closes must be reported too: another pair pings after it (P3).
        task.add_done_callback(
            lambda done: done.cancelled() and entity.advance(PingFailed(episode, FailureKind.UNKNOWN))
        )
        if self._state.primary.state is not SideState.OPEN:
            # The pair closed after another thread had asked for the ping.
            cancel_until_done(task)

    def _cancel_ping(self, entity: SharedEntity) -> None:
        task = self._pinging.pop(entity, None)
        # The ping itself stops the pings if it succeeds.
        if task is not None and task is not asyncio.current_task():
            cancel_until_done(task)

    def _peek(self, watch: SharedBacklogWatch, pages: tuple[PeekPage, ...]) -> None:
        self._peeker.start(watch, pages)

    async def _ping(self, entity: SharedEntity, episode: int) -> None:
        path = entity.entity.path
        started = time.monotonic()
        failure: FailureKind | None = None
        answered = False
        sender: Any = None
        try:
            sender = self._timeouts.prepare(self._primary_client.get_queue_sender(path))
            await self._timeouts.bound(self._send_ping(sender), self._timeouts.try_timeout, sender)
            answered = True
        except Exception as error:
            failure = failure_kind(error)
        finally:
            if answered:
                self._timeouts.retire(sender)
            elif sender is not None:
                self._timeouts.discard(sender)
        self._state.events.pinged(path, failure, time.monotonic() - started)
        if failure is None:
            self._state.ping_succeeded(entity, episode)
        else:
            entity.advance(PingFailed(episode, failure))

    async def _send_ping(self, sender: Any) -> None:
        await open_aio_link(sender, self._timeouts.try_timeout)
        if self._state.pings_with_message(sender):
            ping = ping_message()
            recorder = self._state.primary_recorder
            prefix = recorder.prefix(Stage.PING, sender.entity_name)
            await recorder.aio_recorded(prefix, ping, lambda link: link.send_messages(ping))(sender)

    # --- backlog queues --------------------------------------------------------------------------------------------

    def _administration(self) -> AioAdministration:
        seconds = self.options.try_timeout.total_seconds()
        made = AioAdministration.of(self._secondary_client, self._admin, seconds=seconds)
        made.recorder = self._state.secondary_recorder
        return made

    def _recreate(self, queue: str) -> None:
        self._timeouts.start(self._recreate_now(queue))

    async def _recreate_now(self, queue: str) -> None:
        try:
            async with self._administration() as administration:
                done = await administration.provision_again((queue,))
        except Exception as error:
            # For instance, the client's credential cannot sign management requests.
            done = Provisioned(failed=(QueueCause(queue, failure_kind(error), str(error)),))
        self._state.queue_recreated(queue, done)

    async def _provision(self, background: bool) -> None:
        """Find or create the backlog queues (P1). With `background`, may return before they are found (P8)."""
        administration = self._administration()
        if background:
            provisioner = Provisioner(administration, self._state)
            self._provisioning = self._timeouts.start(provisioner.run())
            await provisioner.first_try()
            return
        async with administration:
            self._state.provisioned(await administration.provision(self._state.queues, self.options))


class _Driver:
    """What the shared state needs of a driver (`shared_pair.MemberDriver`)."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    @property
    def home(self) -> object:
        return self._pair._timeouts.loop

    @property
    def is_alive(self) -> bool:
        return self._pair._timeouts.has_loop

    def timer(self, due: Callable[[], object]) -> LoopTimer:
        return LoopTimer(self._pair._timeouts, due)

    def ping(self, entity: SharedEntity, episode: int) -> None:
        self._pair._timeouts.tell(partial(self._pair._start_ping, entity, episode))

    def stop_ping(self, entity: SharedEntity) -> None:
        self._pair._timeouts.tell(partial(self._pair._cancel_ping, entity))

    def emit(self, notice: Notice) -> None:
        self._pair._state.publish(notice)


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
    state: str | os.PathLike[str] | None = None,
    syphon: SyphonFactory | None = None,
) -> Pair:
    """Return a pair of two namespaces on clients that the caller made (P1). The caller must close the clients.

    `state` replaces the option `state` (S16).
    """
    return Pair(primary, secondary, chosen_options(options, state), admin=secondary_admin, syphon=syphon)


def pair_connection_strings(
    primary: str,
    secondary: str,
    *,
    options: SendAvailabilityOptions | None = None,
    state: str | os.PathLike[str] | None = None,
    syphon: SyphonFactory | None = None,
    **kwargs: Any,
) -> Pair:
    """Return a pair made from two connection strings. Keywords go to both clients, which the pair makes and closes.

    `state` replaces the option `state` (S16).
    """
    clients = clients_of(ServiceBusClient.from_connection_string, primary, secondary, kwargs)
    return Pair(*clients, chosen_options(options, state), syphon=syphon, owns_clients=True)
