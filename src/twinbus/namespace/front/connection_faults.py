"""Whether a connection may speak at all: faults on connecting, and black holes over the whole namespace (N4).

Asked by the port for AMQP and by the gate for each HTTP request. Requests to `/$faults` ask nobody: whatever is in
force can be lifted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from twinbus.namespace.faults import Fault, FaultKind, FaultPoint, Faults
from twinbus.namespace.front import refusals
from twinbus.namespace.front.admin_api import find_route
from twinbus.namespace.front.fault_effects import crash
from twinbus.namespace.front.http_handler import HttpHandler, is_for_faults, is_management
from twinbus.namespace.front.http_messages import AbandonedError, HttpRequest, HttpResponse, error


def _nothing() -> None:
    """The connection is gone."""


class ConnectionFaults:
    """Of one connection. `freed` is called whenever it may speak again."""

    def __init__(self, faults: Faults, freed: Callable[[], None]) -> None:
        self._faults = faults
        self._freed = freed
        self._asked = False
        self._struck: Fault | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._peer_listens = True

    def ask(self) -> bool:
        """False if the connection is refused. It is struck once, with its first words."""
        if not self._asked:
            self._asked = True
            fault = self._faults.trigger(FaultPoint.CONNECT)
            if fault is not None and not fault.is_blackout:
                self._suffer(fault)
        return self._struck is None or self._struck.kind is not FaultKind.REFUSE

    @property
    def is_held(self) -> bool:
        """By a black hole over the namespace, by one that swallowed this connection, or by a delay."""
        return self._faults.is_blacked_out or (
            self._struck is not None and self._struck.kind in (FaultKind.DELAY, FaultKind.BLACK_HOLE)
        )

    @property
    def is_lost(self) -> bool:
        """Swallowed by a black hole of counted hits, which gives nothing back."""
        return self._struck is not None and self._struck.kind is FaultKind.BLACK_HOLE and self._struck.count is not None

    def faults_changed(self) -> None:
        struck = self._struck
        if struck is not None and struck.kind is FaultKind.BLACK_HOLE and self._has_let_go(struck):
            self._struck = None
        self._look_again()

    def peer_ended(self) -> None:
        """The peer says no more: it may wait for answers, but not for those that never come."""
        self._peer_listens = False
        self._look_again()

    def end(self) -> None:
        """The connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(AbandonedError)
        self._freed = _nothing

    async def held(self) -> None:
        """Wait while the connection is held; AbandonedError if it ends meanwhile."""
        while self.is_held:
            await self._change(for_good=self.is_lost)

    async def swallowed(self, fault: Fault) -> None:
        """Wait while a black hole swallows one request; AbandonedError if the connection ends meanwhile."""
        while not self._has_let_go(fault):
            await self._change(for_good=fault.count is not None)

    def _suffer(self, fault: Fault) -> None:
        self._struck = fault
        if fault.kind is FaultKind.DELAY:
            self._timer = asyncio.get_running_loop().call_later(fault.delay, self._delayed)
        elif fault.kind is FaultKind.CRASH:
            crash()

    def _has_let_go(self, fault: Fault) -> bool:
        """What a fault of counted hits swallowed stays swallowed."""
        return fault.count is None and self._faults.is_over(fault)

    def _delayed(self) -> None:
        self._struck = None
        self._look_again()

    def _look_again(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        if not self.is_held:
            self._freed()

    async def _change(self, *, for_good: bool) -> None:
        if for_good and not self._peer_listens:
            raise AbandonedError
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)


class FaultyHttpHandler:
    """Stands before the handler."""

    def __init__(
        self, handler: HttpHandler, faults: Faults, admission: ConnectionFaults, abort: Callable[[], None]
    ) -> None:
        self._handler = handler
        self._faults = faults
        self._admission = admission
        self._abort = abort

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Raises AbandonedError where no answer may be given."""
        if is_for_faults(request):
            return await self._handler.handle(request)
        if not self._admission.ask():
            self._abort()
            raise AbandonedError
        await self._admission.held()
        response = await self._struck(request) or await self._handler.handle(request)
        await self._admission.held()
        return response

    async def _struck(self, request: HttpRequest) -> HttpResponse | None:
        """The answer a fault gives instead of the handler's, if it does."""
        fault: Fault | None = None
        if is_management(request):
            fault = self._faults.trigger(FaultPoint.HTTP, find_route(request.segments).path)
        if fault is None:
            return None
        match fault.kind:
            case FaultKind.SERVER_BUSY:
                return error(HTTPStatus.SERVICE_UNAVAILABLE, refusals.busy().description)
            case FaultKind.INTERNAL_ERROR:
                return error(HTTPStatus.INTERNAL_SERVER_ERROR, refusals.INTERNAL.description)
            case FaultKind.DELAY:
                await asyncio.sleep(fault.delay)
            case FaultKind.BLACK_HOLE:
                await self._admission.swallowed(fault)
            case FaultKind.CRASH:
                crash()
            case _:
                pass  # cannot be set on http
        return None
