"""Run one scenario with both flavours of the SDK. `AwaitedSync` gives the sync classes the aio interface.

Nothing of the SDK is replaced. A sync call runs in a thread, as in a program with threads. Both flavours, and several
scenarios, run at the same time on one event loop, because the SDK mostly sleeps: nine pauses of 50 ms to open a link,
up to 1 s to close it.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, cast

import azure.servicebus as sync_sdk
import azure.servicebus.aio as aio_sdk
import azure.servicebus.aio.management as aio_management
import azure.servicebus.management as sync_management
from azure.core.paging import ItemPaged

Flavour = Literal["sync", "aio"]
FLAVOURS: tuple[Flavour, ...] = ("sync", "aio")
T = TypeVar("T")

AIO_TWIN: dict[type, type] = {
    sync_sdk.ServiceBusClient: aio_sdk.ServiceBusClient,
    sync_sdk.ServiceBusSender: aio_sdk.ServiceBusSender,
    sync_sdk.ServiceBusReceiver: aio_sdk.ServiceBusReceiver,
    sync_sdk.ServiceBusSession: aio_sdk.ServiceBusSession,
    sync_sdk.AutoLockRenewer: aio_sdk.AutoLockRenewer,
    sync_management.ServiceBusAdministrationClient: aio_management.ServiceBusAdministrationClient,
}

# A scenario takes at most eight seconds. The sync SDK waits for an answer without a limit.
LONGEST_SCENARIO = 40.0

_END = object()


async def _in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call in a daemon thread: a call without an answer must not keep the process from ending."""
    call = functools.partial(function, *map(_bare, args), **{name: _bare(value) for name, value in kwargs.items()})
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # the waiting task may be cancelled; the thread can still set the result

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"sync-sdk {function!r}", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _bare(value: Any) -> Any:
    return value.sdk_object if isinstance(value, AwaitedSync) else value


def awaited(value: Any) -> Any:
    """Return the aio interface of an object of the sync SDK; any other value unchanged."""
    if type(value) in AIO_TWIN:
        return AwaitedSync(value)
    return AwaitedPages(value) if isinstance(value, ItemPaged) else value


class AwaitedSync:
    """Runs a method in a thread if it is a coroutine function in the aio class; calls any other method directly."""

    def __init__(self, sdk_object: Any) -> None:
        self.sdk_object = sdk_object

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.sdk_object, name)
        if not callable(value):
            return awaited(value)
        if inspect.iscoroutinefunction(getattr(AIO_TWIN[type(self.sdk_object)], name)):
            return functools.partial(_in_thread, value)

        def call(*args: Any, **kwargs: Any) -> Any:
            return awaited(value(*map(_bare, args), **{key: _bare(given) for key, given in kwargs.items()}))

        return call

    def __str__(self) -> str:
        return str(self.sdk_object)

    async def __aenter__(self) -> "AwaitedSync":
        await _in_thread(self.sdk_object.__enter__)
        return self

    async def __aexit__(self, *details: object) -> None:
        await _in_thread(self.sdk_object.__exit__, *details)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterated(self.sdk_object)


class AwaitedPages:
    def __init__(self, pages: "ItemPaged[Any]") -> None:
        self._pages = pages

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterated(self._pages)

    async def by_page(self, continuation_token: str | None = None) -> AsyncIterator[AsyncIterator[Any]]:
        async for page in _iterated(self._pages.by_page(continuation_token)):
            yield _iterated(page)


async def _iterated(items: Iterable[Any]) -> AsyncIterator[Any]:
    iterator = iter(items)
    while (item := await _in_thread(next, iterator, _END)) is not _END:
        yield item


class SideBySide:
    """An event loop in a thread. Scenarios start there before pytest reaches their test, and close after it.

    Every scenario has its own entities, so scenarios do not disturb each other.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="side-by-side", daemon=True)
        self._thread.start()
        self._begun: dict[str, Future[None]] = {}
        self._ahead: dict[str, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def begin(self, name: str, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the scenario, unless it has started already."""

        async def noted() -> None:
            self._ahead[name] = cast("asyncio.Task[None]", asyncio.current_task())
            await scenario()

        if name not in self._begun:
            self._begun[name] = asyncio.run_coroutine_threadsafe(noted(), self._loop)

    def finish(self, name: str) -> None:
        try:
            self._begun[name].result()
        finally:
            self._ahead.pop(name)

    def leave_to_close(self, work: Coroutine[Any, Any, None]) -> None:
        """Close in the background. Call this on the loop."""
        self._closing.add(self._loop.create_task(work))

    async def _close_everything(self) -> None:
        """Cancel scenarios that started ahead but whose tests another worker runs, then wait for all closings."""
        for scenario in self._ahead.values():
            scenario.cancel()
        async with asyncio.timeout(LONGEST_SCENARIO):
            await asyncio.gather(*self._ahead.values(), return_exceptions=True)
            await asyncio.gather(*self._closing)

    def stop(self) -> None:
        self.run(self._close_everything())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def in_every_flavour(scenario: Callable[[Flavour], Awaitable[None]], flavours: Iterable[Flavour]) -> None:
    """Run every flavour to its end, then raise the failures, each with a note that names its flavour."""
    chosen = list(flavours)

    async def bounded(flavour: Flavour) -> None:
        async with asyncio.timeout(LONGEST_SCENARIO):
            await scenario(flavour)

    outcomes = await asyncio.gather(*map(bounded, chosen), return_exceptions=True)
    failures: list[BaseException] = []
    for flavour, outcome in zip(chosen, outcomes, strict=True):
        if outcome is not None:
            outcome.add_note(f"with the {flavour} SDK")
            failures.append(outcome)
    if len(failures) > 1 and all(isinstance(failure, Exception) for failure in failures):
        raise BaseExceptionGroup("both flavours failed", failures)
    if failures:
        raise failures[0]
