"""What a namespace answers over HTTP: which part is asked, and whether the caller may ask. No bytes, no connection."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from twinbus.namespace.config import emulator_config
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim
from twinbus.namespace.front.admin_api import AdminApi, NamespaceAdministration, ResourceKind, find_route
from twinbus.namespace.front.http_messages import HttpRequest, HttpResponse, error, json_response, method_not_allowed
from twinbus.namespace.front.sas_verifier import SasVerifier, TokenRefusedError

_OWN_PAGES: Final = ("$health", "$ca", "$config")
_CHALLENGE: Final = {"WWW-Authenticate": "SharedAccessSignature"}
_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{name} · Twinbus</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:42rem;margin:4rem auto;padding:0 1rem}}</style>
<h1>{name}</h1>
<p>This is a Service Bus namespace served by Twinbus. Its port speaks AMQP 1.0 and HTTP, plain and in TLS.</p>
<ul>
<li><a href="/$health">/$health</a>: whether it is up</li>
<li><a href="/metrics">/metrics</a>: its figures, for Prometheus</li>
<li><a href="/$ca">/$ca</a>: the certificate authority of its TLS, for clients on this machine</li>
<li>/$Resources/queues, /$Resources/topics: the management API, for the official clients (needs a key)</li>
</ul>
</html>
"""
_TEXT: Final = """{name}: a Service Bus namespace served by Twinbus (AMQP 1.0 and HTTP on this port).
/$health            whether it is up
/metrics            its figures, for Prometheus
/$ca                the certificate authority of its TLS, for clients on this machine
/$Resources/queues  the management API, for the official clients (needs a key)
"""


def is_for_faults(request: HttpRequest) -> bool:
    return bool(request.segments) and request.segments[0].lower() == "$faults"


def is_management(request: HttpRequest) -> bool:
    """Whether the management API is asked, not one of the pages of the namespace itself."""
    if is_for_faults(request) or (len(request.segments) == 1 and request.segments[0].lower() in _OWN_PAGES):
        return False
    # With an api-version it is the management API that is asked, for an entity of that name.
    if "api-version" in request.query:
        return True
    return request.segments != ("metrics",) and (bool(request.segments) or request.method != "GET")


class HttpHandler:
    """The HTTP side of one namespace."""

    def __init__(
        self,
        name: str,
        administration: NamespaceAdministration,
        verifier: SasVerifier,
        faults: FaultControl,
        registry: CollectorRegistry,
        authority: bytes = b"",
    ) -> None:
        self._name = name
        self._management = AdminApi(name, administration)
        self._verifier = verifier
        self._faults = faults
        self._registry = registry
        self._authority = authority
        self._now = administration.now

    async def handle(self, request: HttpRequest) -> HttpResponse:
        if is_for_faults(request):
            return self._answer_faults(request)
        if is_management(request):
            return await self._manage(request)
        if not request.segments:
            return self._welcome(request)
        if request.segments == ("metrics",):
            return self._metrics(request)
        if request.segments[0].lower() == "$ca":
            return self._reading(request, self._offer_authority)
        if request.segments[0].lower() == "$config":
            return self._export(request)
        return self._reading(request, lambda: json_response(HTTPStatus.OK, {"status": "ok", "namespace": self._name}))

    async def _manage(self, request: HttpRequest) -> HttpResponse:
        route = find_route(request.segments)
        resource = "" if route.kind is ResourceKind.ROOT else route.resource
        refused = self._why_not(request, resource, self._management.rules(route))
        if refused is not None:
            return error(HTTPStatus.UNAUTHORIZED, refused, _CHALLENGE)
        return await self._management.answer(request, route)

    def _answer_faults(self, request: HttpRequest) -> HttpResponse:
        refused = self._why_not(request, "$faults", ())
        if refused is not None:
            return json_response(HTTPStatus.UNAUTHORIZED, {"error": refused})
        return answer_faults(request, self._faults)

    def _export(self, request: HttpRequest) -> HttpResponse:
        """The entities as the emulator's configuration, and what that does not say."""
        refused = self._why_not(request, "$config", ())
        if refused is not None:
            return json_response(HTTPStatus.UNAUTHORIZED, {"error": refused})

        def answer() -> HttpResponse:
            config, left_out = emulator_config(self._name, self._management.descriptions())
            return json_response(HTTPStatus.OK, {"config": config, "left_out": left_out})

        return self._reading(request, answer)

    def _metrics(self, request: HttpRequest) -> HttpResponse:
        refused = None if request.peer_is_loopback else self._why_not(request, "metrics", ())
        if refused is not None:
            return error(HTTPStatus.UNAUTHORIZED, refused, _CHALLENGE)
        return self._reading(
            request, lambda: HttpResponse(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_LATEST)
        )

    def _offer_authority(self) -> HttpResponse:
        """A certificate is no secret; whom it is to be trusted for, the client decides."""
        if not self._authority:
            return error(HTTPStatus.NOT_FOUND, "the namespace has no certificate authority of its own")
        return HttpResponse(HTTPStatus.OK, self._authority, "application/x-pem-file")

    def _welcome(self, request: HttpRequest) -> HttpResponse:
        if "text/html" in request.headers.get("accept", ""):
            page = _PAGE.format(name=html.escape(self._name))
            return HttpResponse(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        return HttpResponse(HTTPStatus.OK, _TEXT.format(name=self._name).encode())

    def _reading(self, request: HttpRequest, answer: Callable[[], HttpResponse]) -> HttpResponse:
        return answer() if request.method == "GET" else method_not_allowed(request.method, "GET")

    def _why_not(self, request: HttpRequest, resource: str, rules: tuple[AuthorizationRule, ...]) -> str | None:
        """Why the caller may not manage the resource; None if it may."""
        token = request.headers.get("authorization")
        if not token:
            return "the request has no Authorization header"
        try:
            claims = self._verifier.verify(
                token,
                resource,
                rules,
                self._now() / 1000,
                peer_is_loopback=request.peer_is_loopback,
                arrived_at=request.arrived_at,
            )
        except TokenRefusedError as refused:
            return refused.text
        request.token_accepted()
        return None if Claim.MANAGE in claims else f"the Manage claim is required for {resource or 'the namespace'!r}"


class FaultControl(Protocol):
    """Faults of one namespace. `set` raises ValueError for a specification that makes no sense."""

    def list(self) -> list[dict[str, Any]]: ...
    def set(self, spec: dict[str, Any]) -> dict[str, Any]: ...
    def clear(self, id: str | None) -> int: ...


def answer_faults(request: HttpRequest, faults: FaultControl) -> HttpResponse:
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


def _set(request: HttpRequest, faults: FaultControl) -> HttpResponse:
    try:
        spec = json.loads(request.body)
        if not isinstance(spec, dict):
            raise ValueError("a fault is a JSON object")
        return json_response(HTTPStatus.CREATED, faults.set(spec))
    except RecursionError:
        return json_response(HTTPStatus.BAD_REQUEST, {"error": "the JSON is nested too deep"})
    except ValueError as wrong:
        return json_response(HTTPStatus.BAD_REQUEST, {"error": str(wrong)})


def _unknown(named: str) -> HttpResponse:
    return json_response(HTTPStatus.NOT_FOUND, {"error": f"there is no fault {named!r}"})
