"""Publish the events of a pair (S11) to callbacks, log, Prometheus, OpenTelemetry and ledger.

An error in this module never makes a send fail. A send to the primary that succeeds calls nothing of this module.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from twinbus.backlog import FailureKind
from twinbus.errors import CallerError
from twinbus.ledger import Ledger
from twinbus.pairing.decide.backlog_watch import QueueStatus
from twinbus.pairing.decide.failover import Entity
from twinbus.pairing.decide.failover_events import (
    FailoverEngaged,
    FailoverHeld,
    FailoverNotice,
    FailoverTakenOver,
    PrimaryUnusable,
    Restored,
    TrialFailed,
    TrialPassed,
)
from twinbus.pairing.decide.rotation import QueueLeft, QueueNotice, QueueReturned, Rotation
from twinbus.pairing.no_metrics import pair_metrics
from twinbus.pairing.telemetry import Telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_log = logging.getLogger("twinbus.pairing")

ALL: Final = "*"
# Seconds that closing waits for callbacks that still run.
_CALLBACK_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 1.0


# --- notices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BacklogDrained:
    """The syphon has moved all messages that were in a backlog queue. `moved` is their number.

    Example: `pair.on("backlog_drained", lambda event: print(event.queue, event.moved))`.
    """

    name: ClassVar[str] = "backlog_drained"
    queue: str
    at: float
    moved: int


@dataclass(frozen=True, slots=True)
class BacklogUnattended:
    """The oldest message of a backlog queue waits although its entity is not failed over: no syphon moves it.

    `oldest` is the age of this message in seconds.

    Example: `pair.on("backlog_unattended", lambda event: alert(event.queue, event.oldest))`.
    """

    name: ClassVar[str] = "backlog_unattended"
    queue: str
    at: float
    entity: str
    oldest: float


@dataclass(frozen=True, slots=True)
class SecondaryUnreachable:
    """The pair was made without a backlog queue: the secondary cannot be reached. The pair goes on looking.

    `secondary` is its host and port. `queues` is the number of backlog queues that are missing.

    Example: `pair.on("secondary_unreachable", lambda event: alert(event.secondary, event.cause))`.
    """

    name: ClassVar[str] = "secondary_unreachable"
    secondary: str
    at: float
    cause: FailureKind
    queues: int


@dataclass(frozen=True, slots=True)
class BacklogQueueGone:
    """A backlog queue was deleted, and this pair could not create it again. `cause` is the reason.

    Example: `pair.on("backlog_queue_gone", lambda event: alert(event.queue, event.cause))`.
    """

    name: ClassVar[str] = "backlog_queue_gone"
    queue: str
    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class BacklogQueueUnsafe:
    """A backlog queue would lose messages, or takes none. `found` is the value of its `property`.

    Example: `pair.on("backlog_queue_unsafe", lambda event: alert(event.queue, event.consequence))`.
    """

    name: ClassVar[str] = "backlog_queue_unsafe"
    queue: str
    at: float
    property: str
    found: str
    consequence: str


@dataclass(frozen=True, slots=True)
class SideFaulted:
    """A side faulted. `side` is "primary" or "secondary".

    Example: `pair.on("faulted", lambda event: alert(event.side, event.cause))`.
    """

    name: ClassVar[str] = "faulted"
    side: str
    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class SideClosed:
    """A side was closed. `side` is "primary" or "secondary".

    Example: `pair.on("closed", lambda event: print(event.side))`.
    """

    name: ClassVar[str] = "closed"
    side: str
    at: float


Notice = (
    FailoverNotice
    | QueueNotice
    | BacklogDrained
    | BacklogUnattended
    | SecondaryUnreachable
    | BacklogQueueGone
    | BacklogQueueUnsafe
    | SideFaulted
    | SideClosed
)
Callback = Callable[[Any], object]

LEVELS: Final[Mapping[str, int]] = {
    FailoverEngaged.name: logging.WARNING,
    FailoverHeld.name: logging.WARNING,
    FailoverTakenOver.name: logging.WARNING,
    Restored.name: logging.WARNING,
    PrimaryUnusable.name: logging.ERROR,
    TrialPassed.name: logging.INFO,
    TrialFailed.name: logging.WARNING,
    QueueLeft.name: logging.WARNING,
    QueueReturned.name: logging.INFO,
    BacklogDrained.name: logging.INFO,
    BacklogUnattended.name: logging.WARNING,
    SecondaryUnreachable.name: logging.WARNING,
    BacklogQueueGone.name: logging.ERROR,
    BacklogQueueUnsafe.name: logging.WARNING,
    SideFaulted.name: logging.ERROR,
    SideClosed.name: logging.INFO,
}
"""The log level of each event."""
EVENTS: Final = tuple(LEVELS)


def facts(notice: Notice) -> dict[str, str | int | float | bool]:
    """Return the fields of a notice as plain values, without its name and its time."""
    values = {field.name: getattr(notice, field.name) for field in fields(notice) if field.name != "at"}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> str | int | float | bool:
    return round(value, 3) if isinstance(value, float) else value if type(value) in (str, int, bool) else str(value)


class UnknownEventError(CallerError, ValueError):
    """A callback was registered for an event that does not exist.

    Example: `pair.on("no_such_event", print)` raises it, with the names that exist.
    """

    def __init__(self, event: str) -> None:
        super().__init__(f"there is no event {event!r}; events are {', '.join(EVENTS)}, and {ALL!r} for all of them")
        self.event = event


# --- publishing ------------------------------------------------------------------------------------------------------


class EventPublisher:
    """Publishes the events of one pair. `pair` is the primary's name.

    With `threaded`, callbacks run one after the other in a thread of their own, so that a callback that blocks, or that
    uses the pair, delays no send. The thread ends after a second without a callback. Without `threaded`, callbacks run
    in the event loop and may be coroutine functions. `tell` runs a function in that loop.

    An application can register callbacks only once it has the pair. So notices of the pairing itself are kept for them.
    """

    def __init__(
        self,
        pair: str,
        *,
        threaded: bool,
        registry: CollectorRegistry | None = None,
        ledger: Ledger | None = None,
        tell: Callable[[Callable[[], None]], None] = lambda change: change(),
    ) -> None:
        self._pair = pair
        self._ledger = ledger
        self._tell = tell
        self._callbacks: dict[str, tuple[Callback, ...]] = {}
        self._of_pairing: list[Notice] = []
        self._registering = threading.Lock()
        """Held while a callback is registered and while a notice is kept: each callback gets each notice once."""
        self._metrics = pair_metrics(registry)
        self._telemetry = Telemetry(pair)
        self._unwatch: Callable[[], None] = lambda: None
        self._runner: _CallbackThread | _CallbackLoop = _CallbackThread(pair) if threaded else _CallbackLoop()

    def on(self, event: str, callback: Callback) -> Callable[[], None]:
        """Call `callback` with the notice at every event of this name. Returns a function that removes the callback.

        The callback also gets the notices of the pairing that were emitted before.
        """
        if event != ALL and event not in EVENTS:
            raise UnknownEventError(event)
        if not self._runner.takes_coroutines and inspect.iscoroutinefunction(callback):
            raise TypeError("a coroutine function can be called only by a pair of twinbus.aio")
        with self._registering:
            self._callbacks[event] = (*self._callbacks.get(event, ()), callback)
            missed = [notice for notice in self._of_pairing if event in (notice.name, ALL)]
        for notice in missed:
            self._tell(partial(self._runner.run_later, partial(self._hand_over, event, callback, notice)))

        def off() -> None:
            kept = list(self._callbacks.get(event, ()))
            if callback in kept:
                kept.remove(callback)
            self._callbacks[event] = tuple(kept)

        return off

    def emit(self, notice: Notice) -> None:
        """Publish a notice. Never raises."""
        self.record(notice)
        self.hear(notice)

    def emit_of_pairing(self, notice: Notice) -> None:
        """Publish a notice of the pairing, also to callbacks that are registered later. Never raises."""
        self.record(notice)
        with self._registering:
            self._of_pairing.append(notice)
            callbacks = self._callbacks_for(notice)
        for callback in callbacks:
            self._runner.run(callback, notice)

    def record(self, notice: Notice) -> None:
        """Publish a notice to ledger, log, metrics and telemetry, and call no callback. Never raises."""
        try:
            values = facts(notice)
            if self._ledger is not None:
                self._ledger.state(notice.name, values, pair=self._pair)
            text = " ".join(f"{name}={value}" for name, value in values.items())
            _log.log(LEVELS[notice.name], "%s %s", notice.name, text, extra={"pair": self._pair, **values})
            self._metrics.count_notice(self._pair, notice)
            self._telemetry.notice(notice.name, values)
        except Exception:
            _log.exception("%s could not be published in full", notice.name)

    def hear(self, notice: Notice) -> None:
        """Call the callbacks for a notice. With asyncio, this must run in the pair's event loop."""
        for callback in self._callbacks_for(notice):
            self._runner.run(callback, notice)

    def _callbacks_for(self, notice: Notice) -> tuple[Callback, ...]:
        return (*self._callbacks.get(notice.name, ()), *self._callbacks.get(ALL, ()))

    def _hand_over(self, event: str, callback: Callback, notice: Notice) -> None:
        if callback in self._callbacks.get(event, ()):
            self._runner.run(callback, notice)

    def diverted(self, entity: str, queue: str, messages: int, seconds: float) -> None:
        """Count messages that a backlog queue accepted. `seconds` is the time that the send took. Never raises."""
        try:
            self._metrics.diverted(self._pair, entity, messages)
            self._telemetry.diverted(entity, queue, messages, seconds)
        except Exception:
            _log.exception("a diverted message was not counted")

    def pinged(self, entity: str, failure: FailureKind | None, seconds: float) -> None:
        """Count a ping that succeeded, or failed with `failure`. Never raises."""
        try:
            self._metrics.pinged(self._pair, entity, failure)
            self._telemetry.pinged(entity, failure, seconds)
            if failure is not None:
                _log.info("ping failed entity=%s kind=%s", entity, failure, extra={"pair": self._pair})
        except Exception:
            _log.exception("a ping was not counted")

    def watch(
        self,
        entities: Callable[[], Iterable[Entity]],
        rotation: Callable[[], Rotation],
        backlog: Callable[[], Iterable[QueueStatus]],
    ) -> None:
        """Show the pair in the gauges. A gauge calls these functions whenever it is read."""
        self._unwatch = self._metrics.watch(self._pair, entities, rotation, backlog)

    def unwatch(self) -> None:
        """Remove the pair from the gauges."""
        self._unwatch()

    def close(self) -> None:
        """End publishing, after the last event. Waits for callbacks for a limited time."""
        self._unwatch()
        self._runner.close()
        self._callbacks.clear()

    def forked(self) -> None:
        """Make the publisher usable in the child of a fork: other threads of the parent may have held its locks."""
        self._registering = threading.Lock()
        self._runner.forked()


# --- running callbacks -----------------------------------------------------------------------------------------------


def _call(callback: Callback, notice: Notice) -> object:
    try:
        return callback(notice)
    except Exception:
        _log.exception("a callback for %s raised", notice.name)
        return None


class _CallbackThread:
    takes_coroutines: ClassVar = False

    def __init__(self, pair: str) -> None:
        self._name = f"twinbus-events-{pair}"
        self._waiting: queue.SimpleQueue[tuple[Callback, Notice] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, callback: Callback, notice: Notice) -> None:
        self._waiting.put((callback, notice))
        try:
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        except RuntimeError as error:
            _log.warning("callbacks for %s are called with those of the next event: %s", notice.name, error)

    def run_later(self, call: Callable[[], None]) -> None:
        # The callbacks run in a thread of their own: `call` only adds one to its queue.
        call()

    def forked(self) -> None:
        # The thread and the waiting callbacks belong to the parent. The child starts with an empty queue and no thread.
        self._waiting = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = None

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            if thread is not threading.current_thread():
                thread.join(_CALLBACK_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                one = self._waiting.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    # `run` fills the queue before it takes this lock, so nothing is lost here.
                    if self._waiting.empty():
                        if self._thread is threading.current_thread():
                            self._thread = None
                        return
                continue
            if one is None:
                return
            _call(*one)


class _CallbackLoop:
    takes_coroutines: ClassVar = True

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, callback: Callback, notice: Notice) -> None:
        result = _call(callback, notice)
        if inspect.isawaitable(result):
            task = asyncio.get_running_loop().create_task(_awaited(result, notice))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def run_later(self, call: Callable[[], None]) -> None:
        """Run `call` in the event loop, after the code that runs now."""
        asyncio.get_running_loop().call_soon(call)

    def forked(self) -> None:
        """Do nothing: there is no lock, and the event loop and its tasks belong to the parent."""

    def close(self) -> None:
        for task in tuple(self._tasks):
            if not (task.done() or task.get_loop().is_closed()):
                task.get_loop().call_later(_CALLBACK_SECONDS, task.cancel)


async def _awaited(result: Awaitable[object], notice: Notice) -> None:
    try:
        await result
    except Exception:
        _log.exception("a callback for %s raised", notice.name)
