"""HTTP requests of one connection under faults (N4): decided per request, once its path is known, plain or in TLS.

Requests to `/$faults` pass everything; the rest of HTTP is held or refused with its connection; the management API is
struck request by request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from twinbus.namespace.faults import Fault, FaultKind, Faults, Point
from twinbus.namespace.front import refusals
from twinbus.namespace.front.admission import Admission
from twinbus.namespace.front.http_handler import HttpHandler, is_for_faults, is_management
from twinbus.namespace.front.http_messages import AbandonedError, Request, Response, error
from twinbus.namespace.front.routes import find_route
from twinbus.namespace.front.struck import crash


class HttpGate:
    """Stands before the handler."""

    def __init__(self, handler: HttpHandler, faults: Faults, admission: Admission, abort: Callable[[], None]) -> None:
        self._handler = handler
        self._faults = faults
        self._admission = admission
        self._abort = abort

    async def handle(self, request: Request) -> Response:
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

    async def _struck(self, request: Request) -> Response | None:
        """The answer a fault gives instead of the handler's, if it does."""
        fault: Fault | None = None
        if is_management(request):
            fault = self._faults.strike(Point.HTTP, find_route(request.segments).path)
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
