"""What a pair tells the world (S11): callbacks, log, Prometheus, OpenTelemetry and ledger, from one call each.

Nothing here decides anything, and nothing that goes wrong here reaches a send. On the healthy path nothing is called.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from prometheus_client import CollectorRegistry

from twinbus.backlog import FailureKind
from twinbus.errors import CallerError
from twinbus.ledger import Ledger
from twinbus.pairing.decide.backlog_watch import BacklogUnattended, Watch
from twinbus.pairing.decide.failover import Entity, FailoverEngaged, PrimaryUnusable, Restored
from twinbus.pairing.decide.rotation import QueueLeft, QueueReturned, Rotation
from twinbus.pairing.metrics import PairMetrics
from twinbus.pairing.telemetry import Telemetry

_log = logging.getLogger("twinbus.pairing")

ALL: Final = "*"
# How long closing waits for callbacks that are still under way.
_PATIENCE: Final = 5.0
_IDLE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class BacklogDrained:
    """The syphon has moved everything that was in a backlog queue."""

    name: ClassVar[str] = "backlog_drained"
    queue: str
    at: float
    moved: int


@dataclass(frozen=True, slots=True)
class SideFaulted:
    """`side` is "primary" or "secondary" (C1)."""

    name: ClassVar[str] = "faulted"
    side: str
    at: float
    cause: str


@dataclass(frozen=True, slots=True)
class SideClosed:
    name: ClassVar[str] = "closed"
    side: str
    at: float


Notice = (
    FailoverEngaged
    | Restored
    | PrimaryUnusable
    | QueueLeft
    | QueueReturned
    | BacklogDrained
    | BacklogUnattended
    | SideFaulted
    | SideClosed
)
Callback = Callable[[Any], object]

LEVELS: Final[Mapping[str, int]] = {
    FailoverEngaged.name: logging.WARNING,
    Restored.name: logging.WARNING,
    PrimaryUnusable.name: logging.ERROR,
    QueueLeft.name: logging.WARNING,
    QueueReturned.name: logging.INFO,
    BacklogDrained.name: logging.INFO,
    BacklogUnattended.name: logging.WARNING,
    SideFaulted.name: logging.ERROR,
    SideClosed.name: logging.INFO,
}
EVENTS: Final = tuple(LEVELS)


class UnknownEventError(CallerError, ValueError):
    def __init__(self, event: str) -> None:
        super().__init__(f"there is no event {event!r}; events are {', '.join(EVENTS)}, and {ALL!r} for all of them")
        self.event = event


class EventPublisher:
    """The voice of one pair. `pair` is the primary's name.

    With `threaded`, callbacks run one after the other in a thread of their own, so that one that waits, or that uses
    the pair, holds up no send; it ends when there has been nothing to say for a while. Without, they run in the event
    loop, where they may be coroutine functions.
    """

    def __init__(
        self, pair: str, *, threaded: bool, registry: CollectorRegistry | None = None, ledger: Ledger | None = None
    ) -> None:
        self._pair = pair
        self._ledger = ledger
        self._callbacks: dict[str, tuple[Callback, ...]] = {}
        self._metrics = PairMetrics.of(registry)
        self._telemetry = Telemetry(pair)
        self._unwatch: Callable[[], None] = lambda: None
        self._speaker: _Thread | _Loop = _Thread(pair) if threaded else _Loop()

    def on(self, event: str, callback: Callback) -> Callable[[], None]:
        """Call it with the notice at every such event; what is returned takes it off again."""
        if event != ALL and event not in EVENTS:
            raise UnknownEventError(event)
        if not self._speaker.awaits and inspect.iscoroutinefunction(callback):
            raise TypeError("a coroutine function can be called only by a pair of twinbus.aio")
        self._callbacks[event] = (*self._callbacks.get(event, ()), callback)

        def off() -> None:
            kept = list(self._callbacks.get(event, ()))
            if callback in kept:
                kept.remove(callback)
            self._callbacks[event] = tuple(kept)

        return off

    def emit(self, notice: Notice) -> None:
        """Never raises."""
        try:
            said = facts(notice)
            if self._ledger is not None:
                self._ledger.state(notice.name, said, pair=self._pair)
            told = " ".join(f"{name}={value}" for name, value in said.items())
            _log.log(LEVELS[notice.name], "%s %s", notice.name, told, extra={"pair": self._pair, **said})
            self._metrics.told(self._pair, notice)
            self._telemetry.told(notice.name, said)
        except Exception:
            _log.exception("%s could not be told in full", notice.name)
        for callback in (*self._callbacks.get(notice.name, ()), *self._callbacks.get(ALL, ())):
            self._speaker.say(callback, notice)

    def diverted(self, entity: str, queue: str, messages: int, seconds: float) -> None:
        """A backlog queue has taken them, in so many seconds. Never raises."""
        try:
            self._metrics.diverted(self._pair, entity, messages)
            self._telemetry.diverted(entity, queue, messages, seconds)
        except Exception:
            _log.exception("a diverted message was not counted")

    def pinged(self, entity: str, failure: FailureKind | None, seconds: float) -> None:
        """A ping ended. Never raises."""
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
        backlog: Callable[[], Iterable[Watch]],
    ) -> None:
        """What gauges show is asked for when they are read, never kept."""
        self._unwatch = self._metrics.watch(self._pair, entities, rotation, backlog)

    def unwatch(self) -> None:
        """The gauges show this pair no more."""
        self._unwatch()

    def close(self) -> None:
        """After the last event. Callbacks already called for are waited for, but not for long."""
        self._unwatch()
        self._speaker.close()
        self._callbacks.clear()


def facts(notice: Notice) -> dict[str, str | int | float | bool]:
    """What a notice says beside its name and its instant, in plain values."""
    values = {field.name: getattr(notice, field.name) for field in fields(notice) if field.name != "at"}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> str | int | float | bool:
    return round(value, 3) if isinstance(value, float) else value if type(value) in (str, int, bool) else str(value)


# --- who calls the callbacks -----------------------------------------------------------------------------------------


def _call(callback: Callback, notice: Notice) -> object:
    try:
        return callback(notice)
    except Exception:
        _log.exception("a callback for %s raised", notice.name)
        return None


class _Thread:
    awaits: ClassVar = False

    def __init__(self, pair: str) -> None:
        self._name = f"twinbus-events-{pair}"
        self._said: queue.SimpleQueue[tuple[Callback, Notice] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def say(self, callback: Callback, notice: Notice) -> None:
        self._said.put((callback, notice))
        try:
            with self._lock:
                # A forked child inherits the queue but not the thread.
                if self._thread is None or not self._thread.is_alive():
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
        except RuntimeError as error:
            _log.warning("callbacks for %s are called with those of the next event: %s", notice.name, error)

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._said.put(None)
            if thread is not threading.current_thread():
                thread.join(_PATIENCE)

    def _run(self) -> None:
        while True:
            try:
                one = self._said.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    # What was said meanwhile was put there before its speaker asked for this lock.
                    if self._said.empty():
                        if self._thread is threading.current_thread():
                            self._thread = None
                        return
                continue
            if one is None:
                return
            _call(*one)


class _Loop:
    awaits: ClassVar = True

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def say(self, callback: Callback, notice: Notice) -> None:
        result = _call(callback, notice)
        if inspect.isawaitable(result):
            task = asyncio.get_running_loop().create_task(_awaited(result, notice))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in tuple(self._tasks):
            if not (task.done() or task.get_loop().is_closed()):
                task.get_loop().call_later(_PATIENCE, task.cancel)


async def _awaited(result: Awaitable[object], notice: Notice) -> None:
    try:
        await result
    except Exception:
        _log.exception("a callback for %s raised", notice.name)
