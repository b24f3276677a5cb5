"""The syphon inside a pair (`enable_syphon`): on the pair's event loop, or in a thread with its own event loop.

The syphon uses the credentials of the clients that the application made. The pair starts, stops and closes the syphon.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from twinbus.backlog import primary_name
from twinbus.errors import OperatorError
from twinbus.ledger import Ledger, Role
from twinbus.pairing import (
    Administration,
    AioAdministration,
    BacklogDrained,
    OperationRecorder,
    PairState,
    StateReading,
    management_credential,
)
from twinbus.syphon.context import SyphonOptions
from twinbus.syphon.discovery import (
    Discovery,
    ListedDiscovery,
    ListedOrSearchedDiscovery,
    SearchedDiscovery,
    ThreadedListedDiscovery,
)
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.observed_transport import ObservedTransport
from twinbus.syphon.shared_holds import SharedHolds
from twinbus.syphon.syphon import Syphon, SyphonBrokenError
from twinbus.syphon.transport import Transport

_log = logging.getLogger(__name__)

END_SECONDS: Final = 5.0
"""Seconds that the close of a pair waits for messages in flight. If the wait is too short, no message is lost (Y3)."""
_RESTART_SECONDS: Final = 30.0


class _RestartingSyphon:
    """Runs a syphon until `stop`. If the syphon breaks, starts a new one. `stop` may be called from any thread."""

    def __init__(
        self,
        pair: PairState,
        transport: Callable[[], Transport],
        listed: Callable[[OperationRecorder], Discovery] | None,
    ) -> None:
        """`listed` makes a discovery that lists the queues; None if the credential cannot have the Manage right."""
        self.state = "new"
        self._pair = pair
        self._transport = transport
        self._listed = listed
        self._secondary = primary_name(pair.secondary.endpoint)
        # The syphon and the pair write to the same directory, but to different segments: their roles differ.
        pair_ledger = pair.ledger
        self._ledger = None if pair_ledger is None else Ledger(pair_ledger.directory, Role.SYPHON, pair_ledger.options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._syphon: Syphon | None = None
        self._stopped = threading.Event()
        self._stop_heard = asyncio.Event()

    def stop(self) -> None:
        self.state = "stopped"
        self._stopped.set()
        if self._loop is not None:
            # RuntimeError means that the event loop is closed, so the syphon does not run.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hear_stop)

    def _hear_stop(self) -> None:
        self._stop_heard.set()
        if self._syphon is not None:
            self._syphon.stop()

    def restored(self, entity: str) -> None:
        if self._loop is not None:
            # RuntimeError means that the event loop is closed, so the syphon does not run.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hear_restored, entity)

    def _hear_restored(self, entity: str) -> None:
        if self._syphon is not None:
            self._syphon.destination_restored(entity)

    def queues_found(self) -> None:
        if self._loop is not None:
            # RuntimeError means that the event loop is closed, so the syphon does not run.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._hear_queues_found)

    def _hear_queues_found(self) -> None:
        if self._syphon is not None:
            self._syphon.search_queues_now()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            try:
                await self._run()
            finally:
                if self._ledger is not None:
                    await asyncio.to_thread(self._ledger.close)
        except BaseException:
            if not self._stopped.is_set():
                self.state = "failed"
            raise
        self.state = "stopped"

    async def _run(self) -> None:
        while not self._stopped.is_set():
            transport = ObservedTransport(self._transport(), self._pair)
            made = Syphon(
                transport,
                self._discovery(transport),
                primary=self._pair.name,
                secondary=self._secondary,
                options=SyphonOptions(ttl=self._pair.options.ttl),
                ledger=self._ledger,
                on_emptied=self._on_emptied,
                is_held=self._pair.is_held,
                shared_holds=self._shared_holds(),
            )
            async with made:
                self._syphon = made
                try:
                    await made.run()
                except SyphonBrokenError:
                    _log.exception("the syphon of %s broke; it starts again in %g s", self._pair.name, _RESTART_SECONDS)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_RESTART_SECONDS):
                            await self._stop_heard.wait()
                finally:
                    self._syphon = None

    def _discovery(self, transport: Transport) -> Discovery:
        searched = SearchedDiscovery(self._pair.name, transport)
        if self._listed is None:
            return searched
        return ListedOrSearchedDiscovery(self._listed(OperationRecorder(self._ledger, self._secondary)), searched)

    def _shared_holds(self) -> SharedHolds | None:
        """Return the holds of the shared state: an operator may set one while the pair is healthy and looks no more."""
        sharing = self._pair.sharing
        if sharing is None:
            return None
        return SharedHolds.of_state(self._read_state, in_secondary=sharing.location.folder is None)

    async def _read_state(self) -> StateReading:
        """Read the shared state as the pair does, which may use other threads and another event loop."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[StateReading] = loop.create_future()

        def settle(result: StateReading | Exception) -> None:
            if not found.done():
                if isinstance(result, Exception):
                    found.set_exception(result)
                else:
                    found.set_result(result)

        def done(result: StateReading | Exception) -> None:
            # RuntimeError means that the event loop is closed, so the syphon does not run.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result)

        self._pair.read_shared_state(done)
        return await found

    def _on_emptied(self, queue: str, moved: int) -> None:
        self._pair.events.emit(BacklogDrained(queue, time.monotonic(), moved))


class AioPairSyphon:
    """The syphon of a pair of `twinbus.aio`. It runs as a task of the event loop on which `start` is called."""

    def __init__(self, primary: Any, secondary: Any, admin: Any, pair: PairState) -> None:
        self._clients = (primary, secondary)
        self._admin = admin
        self._pair = pair
        self._seconds = pair.options.try_timeout.total_seconds()
        self._running = _RestartingSyphon(pair, self._transport, self._listed if _may_list(secondary, admin) else None)
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        return self._running.state

    def start(self) -> None:
        self._running.state = "running"
        self._task = asyncio.get_running_loop().create_task(self._running.run())
        self._task.add_done_callback(_log_failure)

    def stop(self) -> None:
        self._running.stop()

    def restored(self, entity: str) -> None:
        self._running.restored(entity)

    def queues_found(self) -> None:
        self._running.queues_found()

    async def ended(self) -> None:
        # A task whose loop is closed never ends.
        if self._task is not None and not self._task.get_loop().is_closed():
            await asyncio.wait({self._task}, timeout=END_SECONDS)

    def _transport(self) -> Transport:
        return NativeTransport(*self._clients, try_timeout=self._seconds)

    def _listed(self, recorder: OperationRecorder) -> Discovery:
        administration = AioAdministration.of(self._clients[1], self._admin, seconds=self._seconds)
        administration.recorder = recorder
        return ListedDiscovery(self._pair.name, administration)


class ThreadPairSyphon:
    """The syphon of a sync pair. It runs in a thread with its own event loop."""

    def __init__(self, primary: Any, secondary: Any, admin: Any, pair: PairState) -> None:
        self._secondary = secondary
        self._admin = admin
        self._pair = pair
        self._seconds = pair.options.try_timeout.total_seconds()
        self._running = _RestartingSyphon(
            pair,
            lambda: NativeTransport(primary, secondary, try_timeout=self._seconds),
            self._listed if _may_list(secondary, admin) else None,
        )
        self._thread = threading.Thread(target=self._run, name=f"twinbus-syphon-{pair.name}", daemon=True)

    @property
    def state(self) -> str:
        return self._running.state

    def start(self) -> None:
        self._running.state = "running"
        self._thread.start()

    def stop(self) -> None:
        self._running.stop()

    def restored(self, entity: str) -> None:
        self._running.restored(entity)

    def queues_found(self) -> None:
        self._running.queues_found()

    def ended(self) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._running.run())
        except Exception:
            _log.exception("the syphon of %s ended", self._pair.name)

    def _listed(self, recorder: OperationRecorder) -> Discovery:
        administration = Administration.of(self._secondary, self._admin, seconds=self._seconds)
        administration.recorder = recorder
        return ThreadedListedDiscovery(self._pair.name, administration)


def _may_list(secondary: Any, admin: Any) -> bool:
    """Return whether the credential can sign management requests. An AzureSasCredential cannot."""
    if admin is not None:
        return True
    try:
        management_credential(secondary)
    except OperatorError:
        return False
    return True


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a pair's syphon ended", exc_info=error)
