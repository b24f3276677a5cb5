"""The sync pair: its threads and timers. What a pair is: `partnership`; what its senders do: `calls`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Self
from weakref import WeakSet

from azure.core.paging import ItemPaged
from azure.servicebus import ServiceBusClient, ServiceBusReceiver
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.backlog import FailureKind, failure_kind
from twinbus.ledger import Stage
from twinbus.pairing.administration import Administration
from twinbus.pairing.attending import BacklogPeeker, SharedBacklogWatch
from twinbus.pairing.decide.backlog_watch import Peek
from twinbus.pairing.decide.failover import PingFailed, PingSucceeded
from twinbus.pairing.events import Callback, Notice
from twinbus.pairing.message_copies import ping_message
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import Side, SideState
from twinbus.pairing.pair_state import EntityState, PairState, PairSyphon, SyphonFactory
from twinbus.pairing.provisioning import background_pause
from twinbus.pairing.receivers import QuietReceiver, recorded
from twinbus.pairing.retrying import ONCE
from twinbus.pairing.shared_state import SharedEntity
from twinbus.pairing.sync.backlog_link import BacklogLinks
from twinbus.pairing.sync.sender import PairedSender
from twinbus.pairing.sync.timeout_thread import ThreadTimer
from twinbus.pairing.sync.timeouts import ThreadTimeouts
from twinbus.sdk import check_version, client_endpoint, hides_pings, interrupt, open_sync_link, retry_settings

# How long closing waits for the thread that is closing the same pair already.
_END_SECONDS = 10.0


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

    def close(self) -> None:
        self._pair._leave((self._side,), SideState.CLOSED)

    def fault(self, cause: BaseException) -> None:
        self._pair._leave((self._side,), SideState.FAULTED, cause)


class Pair:
    """Two namespaces as one. Made by `pair_namespaces` or `pair_connection_strings`."""

    def __init__(
        self,
        primary: ServiceBusClient,
        secondary: ServiceBusClient,
        options: SendAvailabilityOptions,
        *,
        owns_clients: bool = False,
    ) -> None:
        check_version()
        self.options = options
        self._clients = {"primary": primary, "secondary": secondary}
        self._owns_clients = owns_clients
        self._retries = retry_settings(primary)
        self._attempts = ThreadTimeouts(client_endpoint(primary).host, options.try_timeout.total_seconds())
        self._pinging: dict[SharedEntity, Any] = {}
        self._senders: WeakSet[PairedSender] = WeakSet()
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        self._ended = threading.Event()
        self._this_thread = threading.local()
        self._state = PairState(
            (primary, secondary), options, self, threaded=True, let_go=self._let_go, look=self._look
        )
        self._looks = BacklogPeeker(secondary, self._attempts, self._state.on_secondary, self._state.failed_over)
        self._links = BacklogLinks(
            secondary, self._state.secondary, self._state.rotation, self._attempts, self._state.on_secondary
        )
        self.primary = PairSide(self, self._state.primary)
        self.secondary = PairSide(self, self._state.secondary)
        # Last: what could not be made whole is not in anyone's way (P3).
        self._state.begin()

    # --- senders and receivers -------------------------------------------------------------------------------------

    def get_queue_sender(self, queue_name: str, **kwargs: Any) -> PairedSender:
        return self._sender(queue_name, lambda: self._clients["primary"].get_queue_sender(queue_name, **kwargs))

    def get_topic_sender(self, topic_name: str, **kwargs: Any) -> PairedSender:
        return self._sender(topic_name, lambda: self._clients["primary"].get_topic_sender(topic_name, **kwargs))

    def get_queue_receiver(
        self, queue_name: str, *, quiet_while_down: bool = False, **kwargs: Any
    ) -> ServiceBusReceiver | QuietReceiver:
        receiver = recorded(
            self._clients["primary"].get_queue_receiver(queue_name, **kwargs), self._state.on_primary, queue_name
        )
        return QuietReceiver(receiver) if quiet_while_down else receiver

    def get_subscription_receiver(
        self, topic_name: str, subscription_name: str, *, quiet_while_down: bool = False, **kwargs: Any
    ) -> ServiceBusReceiver | QuietReceiver:
        receiver = recorded(
            self._clients["primary"].get_subscription_receiver(topic_name, subscription_name, **kwargs),
            self._state.on_primary,
            f"{topic_name}/Subscriptions/{subscription_name}",
        )
        return QuietReceiver(receiver) if quiet_while_down else receiver

    def list_queue_sessions(
        self, queue_name: str, *, state_updated_after: datetime | None = None, timeout: float | None = None
    ) -> ItemPaged[str]:
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
    ) -> ItemPaged[str]:
        """Session ids of a subscription, as `ServiceBusClient.list_subscription_sessions` returns them."""
        return self._clients["primary"].list_subscription_sessions(
            topic_name, subscription_name, state_updated_after=state_updated_after, timeout=timeout
        )

    def _sender(self, path: str, make: Callable[[], Any]) -> PairedSender:
        self._state.primary.refuse_unless_open()
        place = self._state.place(path)
        made = PairedSender(
            place,
            lambda: self._attempts.ready(make()),
            self._links,
            self._attempts,
            self._retries,
            self._state.on_primary,
        )
        self._senders.add(made)
        return made

    # --- what it shows and obeys -----------------------------------------------------------------------------------

    @property
    def fully_qualified_namespace(self) -> str:
        return self._clients["primary"].fully_qualified_namespace

    @property
    def backlog_queues(self) -> tuple[str, ...]:
        """Those usable now: the pair's effective count is their number (P7)."""
        return self._state.rotation.rotation.usable

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
        self._state.force_failover(entity)

    def force_restore(self, entity: str) -> None:
        self._state.force_restore(entity)

    # --- closing ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._leave((self._state.primary, self._state.secondary), SideState.CLOSED)

    def __enter__(self) -> Self:
        """Raises PairClosedError or PairFaultedError where the primary is no longer open."""
        self._state.primary.refuse_unless_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self, sides: tuple[Side, ...], state: SideState, cause: BaseException | None = None) -> None:
        self._this_thread.ends = True
        try:
            for side in sides:
                side.leave(state, cause)
        finally:
            self._this_thread.ends = False
        if self._state.closed and self._attempts.ours:
            self._end()
            self._ended.wait(_END_SECONDS)

    def _let_go(self, side: Side) -> None:
        # Without either side nothing is diverted any more.
        self._leaving.set()
        self._looks.stop()
        self._links.close()
        if side is self._state.primary:
            for sender in list(self._senders):
                sender.let_go()
        if self._state.closed and not getattr(self._this_thread, "ends", False):
            # Nobody closed it: the other side faulted by itself, and nobody may ever call close (C3).
            self._attempts.keeper.soon(self._end)

    def _end(self) -> None:
        """Once: all threads end, and the clients where they are the pair's own."""
        if not self._ending.acquire(blocking=False):
            return
        # The last first; one that raises holds up none of the others.
        with contextlib.ExitStack() as steps:
            steps.callback(self._ended.set)
            if self._state.own_ledger is not None:
                steps.callback(self._state.own_ledger.close)
            if self._owns_clients:
                for client in self._clients.values():
                    steps.callback(client.close)
            steps.callback(self._state.events.close)
            steps.callback(self._attempts.end)
            if self._state.syphon is not None:
                steps.callback(self._state.syphon.ended)

    # --- what the cells ask of a driver ----------------------------------------------------------------------------

    def timer(self, due: Callable[[], object]) -> ThreadTimer:
        return ThreadTimer(self._attempts.keeper, due)

    def emit(self, notice: Notice) -> None:
        self._state.events.emit(notice)

    def ping(self, cell: SharedEntity, episode: int) -> None:
        self._attempts.keeper.soon(lambda: self._ping(cell, episode))

    def stop_ping(self, cell: SharedEntity) -> None:
        sender = self._pinging.pop(cell, None)
        if sender is not None:
            interrupt(sender)

    def _ping(self, cell: SharedEntity, episode: int) -> None:
        begun = time.monotonic()
        failure: FailureKind | None = None
        sender: Any = None
        try:
            sender = self._attempts.ready(self._clients["primary"].get_queue_sender(cell.entity.path))
            self._pinging[cell] = sender
            self._attempts.attempt(sender, self._pinged, self._attempts.seconds, ONCE)
        except Exception as error:
            failure = failure_kind(error)
        finally:
            self._pinging.pop(cell, None)
            if sender is not None and failure is None:
                self._attempts.keeper.soon(lambda: self._attempts.closed(sender))
            elif sender is not None:
                self._attempts.discard(sender)
        self._state.events.pinged(cell.entity.path, failure, time.monotonic() - begun)
        cell.advance(PingSucceeded(episode) if failure is None else PingFailed(episode, failure))

    def _pinged(self, sender: Any, seconds: float | None) -> None:
        how = self.options.ping
        open_sync_link(sender, seconds)
        if how == "message" or (how == "auto" and hides_pings(sender)):
            ping = ping_message()
            primary = self._state.on_primary
            there = primary.place(Stage.PING, sender.entity_name)
            send = primary.recorded(there, ping, lambda link, left: link.send_messages(ping, timeout=left))
            send(sender, None)

    def _look(self, cell: SharedBacklogWatch, peeks: tuple[Peek, ...]) -> None:
        self._looks.begin(cell, peeks)

    # --- backlog queues --------------------------------------------------------------------------------------------

    def _provision(self, administration: Administration) -> None:
        """P1. What could not be reached is tried again in the background where that was asked for (P8)."""
        done = administration.provision(self._state.queues, self.options)
        self._state.provisioned(done)
        if done.failed and self.options.on_secondary_down == "background":
            missing = tuple(cause.queue for cause in done.failed)
            self._attempts.workers.run(lambda: self._provision_again(administration, missing))
        else:
            administration.close()

    def _provision_again(self, administration: Administration, missing: tuple[str, ...]) -> None:
        tries = 0
        try:
            while missing:
                tries += 1
                if self._leaving.wait(background_pause(tries)):
                    return
                done = administration.provision_again(missing)
                self._state.provisioned(done)
                missing = tuple(cause.queue for cause in done.failed)
        finally:
            administration.close()


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
    syphon: SyphonFactory | None = None,
) -> Pair:
    """Pair two namespaces on clients the caller made (P1). The clients stay the caller's to close."""
    return _paired(primary, secondary, secondary_admin, options or SendAvailabilityOptions(), syphon, False)


def pair_connection_strings(
    primary: str,
    secondary: str,
    *,
    options: SendAvailabilityOptions | None = None,
    syphon: SyphonFactory | None = None,
    **kwargs: Any,
) -> Pair:
    """Pair two namespaces by their connection strings. Keywords go to both clients, which are the pair's own."""
    clients = [ServiceBusClient.from_connection_string(text, **kwargs) for text in (primary, secondary)]
    return _paired(clients[0], clients[1], None, options or SendAvailabilityOptions(), syphon, True)


def _paired(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    admin: ServiceBusAdministrationClient | None,
    options: SendAvailabilityOptions,
    syphon: SyphonFactory | None,
    owns_clients: bool,
) -> Pair:
    try:
        pair = Pair(primary, secondary, options, owns_clients=owns_clients)
    except BaseException:
        if owns_clients:
            primary.close()
            secondary.close()
        raise
    try:
        administration = Administration.of(secondary, admin, seconds=options.try_timeout.total_seconds())
        administration.recording = pair._state.on_secondary
        try:
            pair._provision(administration)
        except BaseException:
            administration.close()
            raise
        pair._state.start_syphon(syphon, (primary, secondary), admin)
    except BaseException:
        pair.close()
        raise
    return pair
