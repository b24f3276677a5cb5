"""Faults that hit whole connections and HTTP requests (N4).

A fault on connecting hits a connection once, with the first bytes of the connection. A black hole over the namespace (a
blackout) holds every connection. It holds all bytes of an AMQP connection. On an HTTP connection it holds single
requests, because the path of a request must be known first: requests to `/$faults` always pass, so that a client can
clear any fault.

Operations and requests that a black hole holds are lost if the black hole has a count. Without a count, they continue
when the black hole ends.
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
from twinbus.namespace.front.http_messages import AbandonedError, HttpRequest, HttpResponse, error_response


class ConnectionFaults:
    """The faults of one connection."""

    def __init__(self, faults: Faults, released: Callable[[], None]) -> None:
        """`released` is called after each change of faults, if no fault holds the connection then."""
        self._faults = faults
        self._released = released
        self._is_triggered = False
        self._fault: Fault | None = None  # the fault on connecting that hit this connection
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._peer_sends = True

    def may_connect(self) -> bool:
        """Return False if a fault demands that the connection is aborted. The first call triggers the fault."""
        if not self._is_triggered:
            self._is_triggered = True
            fault = self._faults.trigger(FaultPoint.CONNECT)
            if fault is not None and not fault.is_blackout:
                self._apply(fault)
        return self._fault is None or self._fault.kind is not FaultKind.REFUSE

    @property
    def is_held(self) -> bool:
        """Whether a blackout, a black hole on connecting or a delay holds the connection."""
        return self._faults.is_blacked_out or (
            self._fault is not None and self._fault.kind in (FaultKind.DELAY, FaultKind.BLACK_HOLE)
        )

    @property
    def is_lost(self) -> bool:
        """Whether a black hole with a count holds the connection, so that the connection is never released."""
        return self._fault is not None and self._fault.kind is FaultKind.BLACK_HOLE and self._fault.count is not None

    def faults_changed(self) -> None:
        """Release the connection if its black hole has ended."""
        fault = self._fault
        if fault is not None and fault.kind is FaultKind.BLACK_HOLE and self._gives_back(fault):
            self._fault = None
        self._check()

    def peer_sends_no_more(self) -> None:
        """Abandon the requests that a black hole with a count holds: the peer has closed its side of the connection.

        The other requests are still answered, because the peer may still read.
        """
        self._peer_sends = False
        self._check()

    def connection_lost(self) -> None:
        """Abandon all waiting requests."""
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(AbandonedError)
        self._released = _ignore

    async def wait_while_held(self) -> None:
        """Wait while a fault holds the connection. Raises AbandonedError if the connection ends during the wait."""
        while self.is_held:
            await self._wait_for_change(forever=self.is_lost)

    async def wait_while_swallowed(self, fault: Fault) -> None:
        """Wait while a black hole holds one request. Raises AbandonedError if the connection ends during the wait."""
        while not self._gives_back(fault):
            await self._wait_for_change(forever=fault.count is not None)

    def _apply(self, fault: Fault) -> None:
        self._fault = fault
        if fault.kind is FaultKind.DELAY:
            self._timer = asyncio.get_running_loop().call_later(fault.delay, self._delay_ended)
        elif fault.kind is FaultKind.CRASH:
            crash()

    def _gives_back(self, fault: Fault) -> bool:
        return fault.count is None and self._faults.is_over(fault)

    def _delay_ended(self) -> None:
        self._fault = None
        self._check()

    def _check(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if not self.is_held:
            self._released()

    async def _wait_for_change(self, *, forever: bool) -> None:
        if forever and not self._peer_sends:
            raise AbandonedError
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


class FaultyHttpHandler:
    """Applies faults to the HTTP requests of one connection, and passes requests that no fault hits to the handler."""

    def __init__(
        self, handler: HttpHandler, faults: Faults, connection: ConnectionFaults, abort: Callable[[], None]
    ) -> None:
        """`abort` closes the connection without an answer."""
        self._handler = handler
        self._faults = faults
        self._connection = connection
        self._abort = abort

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request. Raises AbandonedError if the peer must get no response."""
        if is_for_faults(request):
            return await self._handler.handle(request)
        if not self._connection.may_connect():
            self._abort()
            raise AbandonedError
        await self._connection.wait_while_held()
        response = await self._apply_fault(request) or await self._handler.handle(request)
        await self._connection.wait_while_held()
        return response

    async def _apply_fault(self, request: HttpRequest) -> HttpResponse | None:
        """Apply the fault that hits a request. Returns the fault's response, or None if the handler must answer."""
        fault: Fault | None = None
        if is_management(request):
            fault = self._faults.trigger(FaultPoint.HTTP, find_route(request.segments).path)
        if fault is None:
            return None
        match fault.kind:
            case FaultKind.SERVER_BUSY:
                return error_response(HTTPStatus.SERVICE_UNAVAILABLE, refusals.busy().description)
            case FaultKind.INTERNAL_ERROR:
                return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, refusals.INTERNAL.description)
            case FaultKind.DELAY:
                await asyncio.sleep(fault.delay)
            case FaultKind.BLACK_HOLE:
                await self._connection.wait_while_swallowed(fault)
            case FaultKind.CRASH:
                crash()
            case _:
                pass  # these kinds cannot be set for HTTP requests
        return None


def _ignore() -> None:
    """Does nothing. Replaces `released` when the connection is gone."""
