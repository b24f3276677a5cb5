"""`/$faults`: faults on demand over HTTP (N4). What a fault is and does is decided by the Faults behind it."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Protocol

from twinbus.namespace.front.http_messages import Request, Response, json_response


class FaultControl(Protocol):
    """Faults of one namespace. `set` raises ValueError for a specification that makes no sense."""

    def list(self) -> list[dict[str, Any]]: ...
    def set(self, spec: dict[str, Any]) -> dict[str, Any]: ...
    def clear(self, id: str | None) -> int: ...


def answer_faults(request: Request, faults: FaultControl) -> Response:
    """GET lists, POST sets one, DELETE clears the one that is named, or all."""
    named = request.segments[1] if len(request.segments) > 1 else request.query.get("id")
    match request.method:
        case "GET":
            found = [fault for fault in faults.list() if named is None or fault.get("id") == named]
            return json_response(HTTPStatus.OK, {"faults": found}) if found or named is None else _unknown(named)
        case "POST" if named is None:
            return _set(request, faults)
        case "DELETE":
            cleared = faults.clear(named)
            return json_response(HTTPStatus.OK, {"cleared": cleared}) if cleared or named is None else _unknown(named)
        case _:
            return json_response(HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{request.method} is not allowed here"})


def _set(request: Request, faults: FaultControl) -> Response:
    try:
        spec = json.loads(request.body)
        if not isinstance(spec, dict):
            raise ValueError("a fault is a JSON object")
        return json_response(HTTPStatus.CREATED, faults.set(spec))
    except RecursionError:
        return json_response(HTTPStatus.BAD_REQUEST, {"error": "the JSON is nested too deep"})
    except ValueError as wrong:
        return json_response(HTTPStatus.BAD_REQUEST, {"error": str(wrong)})


def _unknown(named: str) -> Response:
    return json_response(HTTPStatus.NOT_FOUND, {"error": f"there is no fault {named!r}"})
