"""A request and its response, as the handlers of the HTTP front see them: no connection, no framing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from twinbus.namespace.front.atom_xml import render_error
from twinbus.namespace.own_names import Authority, OwnNames, is_same_origin, parse_authority, shortened


class BadTargetError(ValueError):
    """The request's target is no URL of ours."""


class AbandonedError(Exception):
    """The request is not answered: its connection is gone."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """`segments` are the parts of the path between its slashes, each decoded by itself; header names are lower-case."""

    method: str
    path: str
    segments: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer_is_loopback: bool
    arrived_at: str | None = None
    token_accepted: Callable[[], None] = lambda: None
    """Called when the token of the request was accepted."""

    @property
    def authority(self) -> str:
        """The host that the client asked for, normalised. It is one of the namespace's own names (`origins`)."""
        host = self.headers.get("host")
        return str(parse_authority(host.strip())) if host else "localhost"


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def parse_target(target: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Path, decoded segments and query of a request's target, in origin or absolute form."""
    try:
        if target.startswith("/"):
            target = f"http://host{target}"
        elif not target.lower().startswith(("http://", "https://")):
            raise BadTargetError
        parts = urlsplit(target)
        # Decoded after splitting: Python's client writes a slash inside a name as %2F.
        segments = tuple(unquote(part, errors="strict") for part in parts.path.split("/") if part)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100))
    except ValueError:
        raise BadTargetError("the target of the request is not a path that can be decoded") from None
    return parts.path or "/", segments, query


def error(status: int, detail: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """An error as the management API's clients read it."""
    return HttpResponse(status, render_error(status, detail), "application/xml; charset=utf-8", headers or {})


def json_response(status: int, value: Any) -> HttpResponse:
    return HttpResponse(status, json.dumps(value).encode() + b"\n", "application/json")


def method_not_allowed(method: str, allowed: str) -> HttpResponse:
    return error(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} is not allowed here: {allowed} is", {"Allow": allowed})


# A browser sets this header itself; no script can. `none`: a person typed the address.
_FETCH_SITE: Final = "sec-fetch-site"
_OWN_SITES: Final = ("same-origin", "none")


def refuse_foreign(
    target: str, headers: Iterable[tuple[str, str]], names: OwnNames, arrived_at: str | None
) -> HttpResponse | None:
    """The answer to a request that is not for this namespace or not from its own pages; None if it may go on.

    Header names are lower-case. `arrived_at` is the address of this end of the connection.
    """
    found: dict[str, list[str]] = {"host": [], "origin": [], _FETCH_SITE: []}
    for name, value in headers:
        if name in found:
            found[name].append(value.strip())
    try:
        authority = _authority(target, found["host"])
    except ValueError as wrong:
        return error(HTTPStatus.BAD_REQUEST, str(wrong))
    if authority is not None and not names.owns(authority, arrived_at):
        return error(HTTPStatus.MISDIRECTED_REQUEST, names.refusal(str(authority), arrived_at))
    for origin in found["origin"]:
        if authority is None or not is_same_origin(origin, authority):
            text = f"requests from pages of the origin {shortened(origin)} are refused"
            return error(HTTPStatus.FORBIDDEN, text)
    if any(site not in _OWN_SITES for site in found[_FETCH_SITE]):
        text = "requests from pages of another origin are refused; to open this page, type its address into the browser"
        return error(HTTPStatus.FORBIDDEN, text)
    return None


def _authority(target: str, hosts: list[str]) -> Authority | None:
    """The host that is asked for; None in HTTP/1.0, which may leave it out. Raises ValueError for a contradiction."""
    if len(hosts) > 1:
        raise ValueError("the request has several Host headers")
    asked = None if not hosts else parse_authority(hosts[0])
    if target.startswith("/"):
        return asked
    if not target.lower().startswith(("http://", "https://")):
        raise ValueError("the target must be a path or an absolute URL")
    absolute = parse_authority(urlsplit(target).netloc)
    if asked is not None and absolute != asked:
        raise ValueError(f"the target of the request is on {absolute}, its Host header is {asked}")
    return absolute
