"""Which HTTP requests are refused because of where they come from: for another name, or from another origin (X3).

Checked on the head of every request, before its body is read and whatever its path and method. No answer ever has a
CORS header, so a browser also keeps answers from pages of other origins.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from twinbus.namespace.front.http_messages import Response, error
from twinbus.namespace.own_names import Authority, OwnNames, is_same_origin, parse_authority, shortened

# A browser sets this header itself; no script can. `none`: a person typed the address.
_FETCH_SITE: Final = "sec-fetch-site"
_OWN_SITES: Final = ("same-origin", "none")


def refuse_foreign(
    target: str, headers: Iterable[tuple[str, str]], names: OwnNames, arrived_at: str | None
) -> Response | None:
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
