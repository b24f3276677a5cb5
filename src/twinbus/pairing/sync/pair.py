"""The sync pair: its threads, timers, pings and closing.

The state of a pair is in `pair_state`, its senders are in `sender`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self
from weakref import WeakSet

from azure.core.paging import ItemPaged
from azure.servicebus import AutoLockRenewer, ServiceBusClient, ServiceBusReceiver
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.backlog import FailureKind, failure_kind
from twinbus.ledger import Stage
from twinbus.pairing.administration import Administration
from twinbus.pairing.decide.backlog_watch import PeekPage
from twinbus.pairing.decide.failover_events import PingFailed
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.events import Notice
from twinbus.pairing.message_copies import ping_message
from twinbus.pairing.options import SendAvailabilityOptions, chosen_options, clients_of
from twinbus.pairing.pair_interface import PairInterface
from twinbus.pairing.pair_sides import Side, SideState, SideView
from twinbus.pairing.pair_state import PairState, SyphonFactory
from twinbus.pairing.provisioning import Provisioned
from twinbus.pairing.receivers import QuietReceiver
from twinbus.pairing.shared_state import SharedBacklogWatch, SharedEntity
from twinbus.pairing.state_sharing import StateSharing, look_seconds
from twinbus.pairing.sync.backlog_link import BacklogLinks
from twinbus.pairing.sync.backlog_peeker import BacklogPeeker
from twinbus.pairing.sync.provisioner import Provisioner
from twinbus.pairing.sync.sender import PairedSender, detach, retired_link
from twinbus.pairing.sync.state_access import ThreadStateAccess
from twinbus.pairing.sync.timeout_thread import ThreadTimer
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import check_version, client_endpoint, interrupt, open_sync_link

if TYPE_CHECKING:
    _Client = ServiceBusClient
else:
    _Client = object

# How long closing waits if another thread is closing the same pair.
_END_SECONDS: Final = 10.0


class PairSide(SideView):
    """`pair.primary` or `pair.secondary`.

    Example: `pair.secondary.state` is `"faulted"` after its credential was refused for good.
    """

    def __init__(self, pair: Pair, side: Side) -> None:
        super().__init__(side)
        self._pair = pair

    def close(self) -> None:
        """Close this side. Without the primary the pair refuses sends; without the secondary it diverts nothing.

        Example: `pair.secondary.close()`.
        """
        self._pair._leave((self._side,), SideState.CLOSED)

    def fault(self, cause: BaseException) -> None:
        """Fault this side. Calls that need it raise PairFaultedError with `cause`.

        Example: `pair.primary.fault(RuntimeError("maintenance"))`.
        """
        self._pair._leave((self._side,), SideState.FAULTED, cause)


class Pair(PairInterface[ServiceBusClient, PairedSender, ServiceBusReceiver, ItemPaged[str], AutoLockRenewer], _Client):
    """Two namespaces used as one, with the methods of `ServiceBusClient`.

    `pair_namespaces` and `pair_connection_strings` return it. Close it, or use it in a `with` statement. Type checkers
    and `isinstance` take it for a ServiceBusClient.

    Example: `with pair_connection_strings(primary, secondary) as pair: sender = pair.get_queue_sender("orders")`.
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
        self._entering = threading.Lock()
        self._was_left = False
        self._set_up()

    def _set_up(self) -> None:
        """Make all that ends when the pair is closed, and register the pair."""
        primary, secondary, options = self._primary_client, self._secondary_client, self.options
        self._timeouts = ThreadTimeouts(client_endpoint(primary).host, options.try_timeout.total_seconds())
        self._pinging: dict[SharedEntity, Any] = {}
        self._senders: WeakSet[PairedSender] = WeakSet()
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._this_thread = threading.local()
        self._state = PairState(
            (primary, secondary),
            options,
            _Driver(self),
            threaded=True,
            on_side_left=self._on_side_left,
            peek=self._peek,
            recreate=self._recreate,
        )
        recorder = self._state.secondary_recorder
        self._peeker = BacklogPeeker(secondary, self._timeouts, recorder, self._state.is_failed_over)
        self._links = BacklogLinks(secondary, self._state.secondary, self._state.rotation, self._timeouts, recorder)
        self.primary = PairSide(self, self._state.primary)
        self.secondary = PairSide(self, self._state.secondary)
        access: ThreadStateAccess | None = None
        if self._state.sharing is not None:
            location = self._state.sharing.location
            access = ThreadStateAccess(location, secondary, self._timeouts, recorder, self._administration)
        # The pair is registered last, so that a pair whose `__init__` failed is not registered (P3).
        self._state.begin(access)

    def _pair(self) -> None:
        """Find or create the backlog queues, and start the syphon. Closes the pair if this fails."""
        try:
            self._provision()
            clients = (self._primary_client, self._secondary_client)
            self._state.start_syphon(self._make_syphon, clients, self._admin)
        except BaseException:
            self.close()
            raise

    @property
    def backlog_queues(self) -> tuple[str, ...]:
        """The backlog queues that senders may use now.

        Example: `len(pair.backlog_queues)` is 0 while the secondary cannot be reached.
        """
        return self._state.rotation.rotation.usable

    def force_failover(self, entity: str | None = None, *, hold: bool = False) -> None:
        """Fail an entity over, or all entities. With `hold` the failover stays until `force_restore`.

        A hold of all entities includes those whose first sender is made later.

        Example: `pair.force_failover("orders", hold=True)`.
        """
        self._state.force_failover(entity, hold=hold)

    def force_restore(self, entity: str | None = None) -> None:
        """Return an entity to the primary, or all entities.

        Example: `pair.force_restore("orders")`.
        """
        self._state.force_restore(entity)

    def _make_sender(self, path: str, make: Callable[[], Any]) -> PairedSender:
        setup = self._state.sender_setup(path)
        sharing = self._state.sharing
        until_looked = None if sharing is None or sharing.has_looked else partial(_wait_for_look, sharing)
        prepared = lambda: self._timeouts.prepare(make())  # noqa: E731 - too short for a name of its own
        sender = PairedSender(setup, prepared, self._links, self._timeouts, until_looked)
        self._senders.add(sender)
        if self._state.primary.state is not SideState.OPEN:
            # The pair closed after `sender_setup`: it may have missed this sender.
            detach(sender, self._state.own_entity)
        return sender

    def _make_quiet(self, receiver: Any) -> QuietReceiver:
        return QuietReceiver(receiver)

    # --- closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close both sides. Stops pings and the syphon, and waits until the pair's threads have ended.

        Closes clients that the pair made itself. A second call does nothing. With the option `state`, it first waits
        until the state is written: at most 1 s, or 5 s if a ping is in progress.

        Example: `pair.close()`.
        """
        if (sharing := self._state.sharing_to_finish()) is not None and self._timeouts.ours:
            _finish(sharing)
        self._leave((self._state.primary, self._state.secondary), SideState.CLOSED)

    def __enter__(self) -> Self:
        """Return the pair. Pairs the namespaces again if an earlier `with` statement has closed the pair.

        So does the SDK's client. Senders of the closed pair stay closed. Raises PairClosedError or PairFaultedError if
        the primary is no longer open for another reason.
        """
        if self._was_left:  # the child of a fork does not take the lock, which another thread may have held
            with self._entering:
                if self._is_over():
                    self._was_left = False
                    self._set_up()
                    self._register_callbacks()
                    self._pair()
        self._state.primary.refuse_unless_open()
        return self

    def _is_over(self) -> bool:
        """Return whether a `with` statement has closed the pair, no side faulted, and all has ended."""
        return self._was_left and self._state.closed_without_fault and self._ended.is_set()

    def __exit__(self, *_: object) -> None:
        self.close()
        self._was_left = True

    if not TYPE_CHECKING:

        @property
        def __class__(self) -> type:
            """For `isinstance`: programs may ask whether they got the SDK's client."""
            return ServiceBusClient

    def _leave(self, sides: tuple[Side, ...], state: SideState, cause: BaseException | None = None) -> None:
        self._this_thread.ends_pair = True
        self._timeouts.closed.clear()
        try:
            for side in sides:
                side.leave(state, cause)
            if self._state.closed and self._timeouts.ours:
                self._end()
                self._ended.wait(_END_SECONDS)
        finally:
            self._this_thread.ends_pair = False
            self._timeouts.closed.set()

    def _on_side_left(self, side: Side) -> None:
        # If either side is closed or faulted, no message is diverted any more.
        self._leaving.set()
        self._peeker.stop()
        self._links.close()
        if side is self._state.primary:
            for pinging in list(self._pinging.values()):
                interrupt(pinging)
            links = [retired_link(sender) for sender in list(self._senders)]
            self._timeouts.retire_all([link for link in links if link is not None])
            for sender in list(self._senders):
                detach(sender, self._state.own_entity)
        if self._state.closed and not getattr(self._this_thread, "ends_pair", False):
            # Nobody called `close`: the second side faulted by itself, so the pair ends itself (C3).
            self._timeouts.thread.soon(self._end)

    def _end(self) -> None:
        """End the pair, once: its threads, its ledger, and its clients if it owns them."""
        if not self._ending.acquire(blocking=False):
            return
        # Callbacks run in reverse order, and all of them run even if one raises.
        with contextlib.ExitStack() as steps:
            steps.callback(self._ended.set)
            if self._state.own_ledger is not None:
                steps.callback(self._state.own_ledger.close)
            if self._owns_clients:
                steps.callback(self._primary_client.close)
                steps.callback(self._secondary_client.close)
            steps.callback(self._state.events.close)
            steps.callback(self._timeouts.end)
            if self._state.syphon is not None:
                steps.callback(self._state.syphon.ended)

    # --- pings -----------------------------------------------------------------------------------------------------

    def _peek(self, watch: SharedBacklogWatch, pages: tuple[PeekPage, ...]) -> None:
        self._peeker.start(watch, pages)

    def _ping(self, entity: SharedEntity, episode: int) -> None:
        path = entity.entity.path
        started = time.monotonic()
        failure: FailureKind | None = None
        sender: Any = None
        try:
            sender = self._timeouts.prepare(self._primary_client.get_queue_sender(path))
            self._pinging[entity] = sender
            self._timeouts.call_once(sender, self._send_ping)
        except Exception as error:
            failure = failure_kind(error)
        finally:
            self._pinging.pop(entity, None)
            if sender is not None and failure is None:
                self._timeouts.thread.soon(lambda: self._timeouts.close_handler(sender))
            elif sender is not None:
                self._timeouts.discard(sender)
        self._state.events.pinged(path, failure, time.monotonic() - started)
        if failure is None:
            self._state.ping_succeeded(entity, episode)
        else:
            entity.advance(PingFailed(episode, failure))

    def _send_ping(self, sender: Any, seconds: float | None) -> None:
        open_sync_link(sender, seconds)
        if self._state.pings_with_message(sender):
            ping = ping_message()
            recorder = self._state.primary_recorder
            prefix = recorder.prefix(Stage.PING, sender.entity_name)
            recorder.recorded(prefix, ping, lambda link, _: link.send_messages(ping))(sender, None)

    # --- backlog queues --------------------------------------------------------------------------------------------

    def _administration(self) -> Administration:
        seconds = self.options.try_timeout.total_seconds()
        made = Administration.of(self._secondary_client, self._admin, seconds=seconds)
        made.recorder = self._state.secondary_recorder
        return made

    def _recreate(self, queue: str) -> None:
        self._timeouts.thread.soon(lambda: self._recreate_now(queue))

    def _recreate_now(self, queue: str) -> None:
        try:
            with self._administration() as administration:
                done = administration.provision_again((queue,))
        except Exception as error:
            # For instance, the client's credential cannot sign management requests.
            done = Provisioned(failed=(QueueCause(queue, failure_kind(error), str(error)),))
        self._state.queue_recreated(queue, done)

    def _provision(self) -> None:
        """Find or create the backlog queues (P1). With `background`, may return before they are found (P8)."""
        administration = self._administration()
        if self.options.on_secondary_down == "background":
            Provisioner(administration, self._state, self._leaving).provision()
            return
        with administration:
            self._state.provisioned(administration.provision(self._state.queues, self.options))


class _Driver:
    """What the shared state needs of a driver (`shared_pair.MemberDriver`)."""

    home: None = None
    is_alive = True

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def timer(self, due: Callable[[], object]) -> ThreadTimer:
        return ThreadTimer(self._pair._timeouts.thread, due)

    def ping(self, entity: SharedEntity, episode: int) -> None:
        self._pair._timeouts.thread.soon(lambda: self._pair._ping(entity, episode))

    def stop_ping(self, entity: SharedEntity) -> None:
        sender = self._pair._pinging.pop(entity, None)
        if sender is not None:
            interrupt(sender)

    def emit(self, notice: Notice) -> None:
        self._pair._state.publish(notice)


def _wait_for_look(sharing: StateSharing, until: float | None) -> None:
    """Wait until the pair has looked at the shared state: at most a second, or half of a call's time."""
    looked = threading.Event()
    sharing.on_looked.add(looked.set)
    try:
        if not sharing.has_looked:
            looked.wait(look_seconds(until, time.monotonic()))
    finally:
        sharing.on_looked.discard(looked.set)


def _finish(sharing: StateSharing) -> None:
    """Wait until the shared state has what this pair knows, so that later processes know it (S16)."""
    finished = threading.Event()
    sharing.on_finished.add(finished.set)
    try:
        if seconds := sharing.finish():
            finished.wait(seconds)
    finally:
        sharing.on_finished.discard(finished.set)


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
    state: str | os.PathLike[str] | None = None,
    syphon: SyphonFactory | None = None,
) -> Pair:
    """Pair two namespaces on clients that the caller made (P1). The caller must close the clients.

    `state` replaces the option `state` (S16).
    """
    return _paired(primary, secondary, secondary_admin, chosen_options(options, state), syphon, False)


def pair_connection_strings(
    primary: str,
    secondary: str,
    *,
    options: SendAvailabilityOptions | None = None,
    state: str | os.PathLike[str] | None = None,
    syphon: SyphonFactory | None = None,
    **kwargs: Any,
) -> Pair:
    """Pair two namespaces by their connection strings. Keywords go to both clients, which the pair makes and closes.

    `state` replaces the option `state` (S16).
    """
    clients = clients_of(ServiceBusClient.from_connection_string, primary, secondary, kwargs)
    return _paired(*clients, None, chosen_options(options, state), syphon, True)


def _paired(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    admin: ServiceBusAdministrationClient | None,
    options: SendAvailabilityOptions,
    syphon: SyphonFactory | None,
    owns_clients: bool,
) -> Pair:
    try:
        pair = Pair(primary, secondary, options, admin=admin, syphon=syphon, owns_clients=owns_clients)
    except BaseException:
        if owns_clients:
            primary.close()
            secondary.close()
        raise
    pair._pair()
    return pair
