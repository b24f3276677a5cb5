"""Answers the HTTP requests of a namespace: finds the page or API that a request is for, and checks the token.

The management API itself is in `admin_api`. The other pages are additions of Twinbus: a start page, health, metrics,
the certificate authority, the exported configuration, and `/$faults`, which sets faults on demand (N4).
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from twinbus.namespace.config import emulator_config
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim
from twinbus.namespace.front.admin_api import AdminApi, NamespaceAdministration, ResourceKind, find_route
from twinbus.namespace.front.http_messages import (
    HttpRequest,
    HttpResponse,
    error_response,
    json_response,
    method_not_allowed,
)
from twinbus.namespace.front.sas_verifier import SasVerifier, TokenRefusedError, no_key_set

if TYPE_CHECKING:
    from twinbus.namespace.front.jwt_verifier import JwtVerifier

_OWN_PAGES: Final = ("$health", "$ca", "$config")
_CHALLENGE: Final = {"WWW-Authenticate": "SharedAccessSignature"}
_BEARER: Final = "bearer "
_NO_REST: Final = (
    "the REST interface for messages is not served by this namespace: send and receive with AMQP, on this port or in a "
    "WebSocket (/$servicebus/websocket)"
)
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


class FaultControl(Protocol):
    """The faults of one namespace. `set` raises ValueError for an invalid specification."""

    def list(self) -> list[dict[str, Any]]: ...
    def set(self, spec: dict[str, Any]) -> dict[str, Any]: ...
    def clear(self, id: str | None) -> int: ...


def is_for_faults(request: HttpRequest) -> bool:
    """Return whether a request is for `/$faults`."""
    return bool(request.segments) and request.segments[0].lower() == "$faults"


def is_management(request: HttpRequest) -> bool:
    """Return whether a request is for the management API, and not for one of the other pages."""
    if is_for_faults(request) or (len(request.segments) == 1 and request.segments[0].lower() in _OWN_PAGES):
        return False
    # A request with an api-version is for the management API, also if an entity is named like one of the pages.
    if "api-version" in request.query:
        return True
    return request.segments != ("metrics",) and (bool(request.segments) or request.method != "GET")


def is_for_messages(request: HttpRequest) -> bool:
    """Return whether a request is for the service's REST interface for messages, such as `POST /orders/messages`.

    The management API has no POST. Its other requests have an api-version, and may name an entity `orders/messages`.
    """
    words = [segment.lower() for segment in request.segments[1:]]
    is_management = request.method == "GET" or (request.method != "POST" and "api-version" in request.query)
    return "messages" in words and not is_management


class HttpHandler:
    """Answers the HTTP requests of one namespace."""

    def __init__(
        self,
        name: str,
        administration: NamespaceAdministration,
        verifier: SasVerifier,
        faults: FaultControl,
        registry: CollectorRegistry,
        authority: bytes = b"",
        keys_changed: Callable[[str], None] = lambda entity: None,
        jwt_verifier: JwtVerifier | None = None,
    ) -> None:
        """`authority` is the certificate of the local authority, in PEM. Without `jwt_verifier`, only SAS is accepted.

        `keys_changed` is called with the path of an entity whose authorization rules may have changed.
        """
        self._name = name
        self._admin_api = AdminApi(name, administration, self._check_token)
        self._keys_changed = keys_changed
        self._verifier = verifier
        self._jwt_verifier = jwt_verifier
        self._faults = faults
        self._registry = registry
        self._authority = authority
        self._now = administration.now

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request."""
        if is_for_faults(request):
            return self._answer_faults(request)
        if is_for_messages(request):
            return error_response(HTTPStatus.NOT_IMPLEMENTED, _NO_REST)
        if is_management(request):
            return await self._manage(request)
        if not request.segments:
            return self._start_page(request)
        if request.segments == ("metrics",):
            return self._metrics(request)
        if request.segments[0].lower() == "$ca":
            return self._if_get(request, self._certificate_authority)
        if request.segments[0].lower() == "$config":
            return self._export_config(request)
        return self._if_get(request, lambda: json_response(HTTPStatus.OK, {"status": "ok", "namespace": self._name}))

    async def _manage(self, request: HttpRequest) -> HttpResponse:
        route = find_route(request.segments)
        resource = "" if route.kind is ResourceKind.ROOT else route.resource
        refused = self._check_token(request, resource, self._admin_api.rules(route))
        if refused is not None:
            return error_response(HTTPStatus.UNAUTHORIZED, refused, _CHALLENGE)
        response = await self._admin_api.answer(request, route)
        if request.method in ("PUT", "DELETE") and route.kind is ResourceKind.ENTITY:
            self._keys_changed(route.entity)
        return response

    def _answer_faults(self, request: HttpRequest) -> HttpResponse:
        refused = self._check_token(request, "$faults", ())
        if refused is not None:
            return json_response(HTTPStatus.UNAUTHORIZED, {"error": refused})
        return answer_faults(request, self._faults)

    def _export_config(self, request: HttpRequest) -> HttpResponse:
        """Return the entities as a Config.json of the emulator, and a list of what that format cannot express."""
        refused = self._check_token(request, "$config", ())
        if refused is not None:
            return json_response(HTTPStatus.UNAUTHORIZED, {"error": refused})

        def answer() -> HttpResponse:
            config, left_out = emulator_config(self._name, self._admin_api.descriptions())
            return json_response(HTTPStatus.OK, {"config": config, "left_out": left_out})

        return self._if_get(request, answer)

    def _metrics(self, request: HttpRequest) -> HttpResponse:
        refused = None if request.peer_is_loopback else self._check_token(request, "metrics", ())
        if refused is not None:
            return error_response(HTTPStatus.UNAUTHORIZED, refused, _CHALLENGE)
        return self._if_get(
            request, lambda: HttpResponse(HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_LATEST)
        )

    def _certificate_authority(self) -> HttpResponse:
        """Return the certificate of the local authority. The request needs no token: a certificate is not secret."""
        if not self._authority:
            return error_response(HTTPStatus.NOT_FOUND, "the namespace has no certificate authority of its own")
        return HttpResponse(HTTPStatus.OK, self._authority, "application/x-pem-file")

    def _start_page(self, request: HttpRequest) -> HttpResponse:
        if "text/html" in request.headers.get("accept", ""):
            page = _PAGE.format(name=html.escape(self._name))
            return HttpResponse(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        return HttpResponse(HTTPStatus.OK, _TEXT.format(name=self._name).encode())

    def _if_get(self, request: HttpRequest, answer: Callable[[], HttpResponse]) -> HttpResponse:
        return answer() if request.method == "GET" else method_not_allowed(request.method, "GET")

    def _check_token(
        self,
        request: HttpRequest,
        resource: str,
        rules: tuple[AuthorizationRule, ...],
        header: str = "Authorization",
    ) -> str | None:
        """Return why the token in a header does not let the caller manage the resource, or None if it does."""
        token = request.headers.get(header.lower())
        if not token:
            return f"the request has no {header} header"
        try:
            if token[: len(_BEARER)].lower() == _BEARER:
                claims = self._claims_of_roles(token[len(_BEARER) :].strip(), resource)
            else:
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

    def _claims_of_roles(self, token: str, resource: str) -> frozenset[Claim]:
        if self._jwt_verifier is None:
            raise no_key_set()
        path = resource.strip("/").lower()
        return self._jwt_verifier.verify(token, path, self._now() / 1000).claims(path)


def answer_faults(request: HttpRequest, faults: FaultControl) -> HttpResponse:
    """Answer a request to `/$faults`: GET lists the faults, POST sets one fault, DELETE clears one fault or all."""
    fault_id = request.segments[1] if len(request.segments) > 1 else request.query.get("id")
    match request.method:
        case "GET":
            found = [fault for fault in faults.list() if fault_id is None or fault.get("id") == fault_id]
            return (
                json_response(HTTPStatus.OK, {"faults": found})
                if found or fault_id is None
                else _unknown_fault(fault_id)
            )
        case "POST" if fault_id is None:
            return _set_fault(request, faults)
        case "DELETE":
            cleared = faults.clear(fault_id)
            return (
                json_response(HTTPStatus.OK, {"cleared": cleared})
                if cleared or fault_id is None
                else _unknown_fault(fault_id)
            )
        case _:
            return json_response(HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{request.method} is not allowed here"})


def _set_fault(request: HttpRequest, faults: FaultControl) -> HttpResponse:
    try:
        spec = json.loads(request.body)
        if not isinstance(spec, dict):
            raise ValueError("a fault is a JSON object")
        return json_response(HTTPStatus.CREATED, faults.set(spec))
    except RecursionError:
        return json_response(HTTPStatus.BAD_REQUEST, {"error": "the JSON is nested too deep"})
    except ValueError as wrong:
        return json_response(HTTPStatus.BAD_REQUEST, {"error": str(wrong)})


def _unknown_fault(fault_id: str) -> HttpResponse:
    return json_response(HTTPStatus.NOT_FOUND, {"error": f"there is no fault {fault_id!r}"})
