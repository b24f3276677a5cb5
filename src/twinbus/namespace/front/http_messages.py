"""HTTP requests and responses of a namespace, without connection and framing, and the check of host and origin.

Every request with any path and method is checked before its body is read. The request must be for a name of this
namespace. A request that a browser sent for a page of another origin is refused (X3). No response has a CORS header, so
a browser also hides responses from pages of other origins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from twinbus.connect import WEBSOCKET_PATH
from twinbus.namespace.front.atom_xml import render_error
from twinbus.namespace.own_names import Authority, HostNames, is_same_origin, parse_authority, shortened

# Browsers set this header. A script cannot change its value. The value `none` means that a person typed the address.
_FETCH_SITE: Final = "sec-fetch-site"
_OWN_SITES: Final = ("same-origin", "none")


class BadTargetError(ValueError):
    """The target of a request cannot be decoded."""


class AbandonedError(Exception):
    """The request gets no response, because its connection is gone or because a fault suppresses the response."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """An HTTP request. `segments` are the decoded parts of the path between slashes. Header names are in lower case."""

    method: str
    path: str
    segments: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer_is_loopback: bool
    arrived_at: str | None = None
    """The address of this end of the connection."""
    token_accepted: Callable[[], None] = lambda: None
    """The handler calls this function when the token of the request was accepted."""

    @property
    def authority(self) -> str:
        """The host in the request, normalised. `refuse_foreign` has checked that it is a name of the namespace."""
        host = self.headers.get("host")
        return str(parse_authority(host.strip())) if host else "localhost"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """An HTTP response."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def parse_target(target: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Return path, decoded segments and query of a target in origin or absolute form. Raises BadTargetError."""
    try:
        if target.startswith("/"):
            target = f"http://host{target}"
        elif not target.lower().startswith(("http://", "https://")):
            raise BadTargetError
        parts = urlsplit(target)
        # The path is split before it is decoded: the Python client writes a slash inside a name as %2F.
        segments = tuple(unquote(part, errors="strict") for part in parts.path.split("/") if part)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100))
    except ValueError:
        raise BadTargetError("the target of the request is not a path that can be decoded") from None
    return parts.path or "/", segments, query


def is_websocket(segments: tuple[str, ...]) -> bool:
    """Return whether these are the segments of the path at which clients open a WebSocket."""
    return "/" + "/".join(segments).lower() == WEBSOCKET_PATH


def error_response(status: int, detail: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return an error response in the form that clients of the management API read."""
    return HttpResponse(status, render_error(status, detail), "application/xml; charset=utf-8", headers or {})


def json_response(status: int, value: Any) -> HttpResponse:
    return HttpResponse(status, json.dumps(value).encode() + b"\n", "application/json")


def method_not_allowed(method: str, allowed: str) -> HttpResponse:
    return error_response(
        HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed here: {allowed} is", {"Allow": allowed}
    )


def refuse_foreign(
    target: str, headers: Iterable[tuple[str, str]], names: HostNames, arrived_at: str | None
) -> HttpResponse | None:
    """Return the response that refuses a request for another name or from a page of another origin.

    Returns None if the request is allowed.

    Header names are in lower case. `arrived_at` is the address of this end of the connection.
    """
    found: dict[str, list[str]] = {"host": [], "origin": [], _FETCH_SITE: []}
    for name, value in headers:
        if name in found:
            found[name].append(value.strip())
    try:
        authority = _authority(target, found["host"])
    except ValueError as wrong:
        return error_response(HTTPStatus.BAD_REQUEST, str(wrong))
    if authority is not None and not names.owns(authority, arrived_at):
        return error_response(HTTPStatus.MISDIRECTED_REQUEST, names.refusal(str(authority), arrived_at))
    for origin in found["origin"]:
        if authority is None or not is_same_origin(origin, authority):
            text = f"requests from pages of the origin {shortened(origin)} are refused"
            return error_response(HTTPStatus.FORBIDDEN, text)
    if any(site not in _OWN_SITES for site in found[_FETCH_SITE]):
        text = "requests from pages of another origin are refused; to open this page, type its address into the browser"
        return error_response(HTTPStatus.FORBIDDEN, text)
    return None


def _authority(target: str, hosts: list[str]) -> Authority | None:
    """Return the host that the request is for, or None for a request in HTTP/1.0 without a host.

    Raises ValueError if the target or the Host header is invalid, or if they name different hosts.
    """
    if len(hosts) > 1:
        raise ValueError("the request has several Host headers")
    from_header = None if not hosts else parse_authority(hosts[0])
    if target.startswith("/"):
        return from_header
    if not target.lower().startswith(("http://", "https://")):
        raise ValueError("the target must be a path or an absolute URL")
    absolute = parse_authority(urlsplit(target).netloc)
    if from_header is not None and absolute != from_header:
        raise ValueError(f"the target of the request is on {absolute}, its Host header is {from_header}")
    return absolute
