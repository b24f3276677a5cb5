"""HTTP/1.1 on one connection: reads requests, hands them to a handler one by one, and writes the responses in order.

h11 does the framing. The peer gets a response to every request, or the connection is closed, within the limits of time
and size below. A request that arrives while another request is being answered has to wait. Reading from the peer stops
while too many bytes wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Protocol

import h11

from twinbus.amqp import LimitExceededError
from twinbus.connect import WEBSOCKET_PATH
from twinbus.namespace.front.http_messages import (
    AbandonedError,
    BadTargetError,
    HttpRequest,
    HttpResponse,
    error_response,
    is_websocket,
    parse_target,
    refuse_foreign,
)
from twinbus.namespace.own_names import HostNames
from twinbus.namespace.resources import ConnectionAccount

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 256 * 1024

_VERSIONS: Final = (b"1.0", b"1.1")
# h11 gets the bytes in pieces of this size. h11 checks its limit only while a head is incomplete, so it would parse a
# head of any size that arrives in one piece.
_PIECE_BYTES: Final = 16 * 1024
# Bytes that arrive while a request is being answered. Above the first limit, reading stops. If the bytes that were read
# already exceed the second limit, the connection closes after the response.
_PAUSE_WAITING: Final = 16 * 1024
_MAX_WAITING: Final = 1024 * 1024
_REQUEST_SECONDS: Final = 60.0
_IDLE_SECONDS: Final = 120.0
# After a refusal, the body is still read, for this time and up to this many bytes. A close without this delay would
# reset the connection before the peer has read the response.
_LINGER_SECONDS: Final = 2.0
_LINGER_BYTES: Final = 16 * 1024 * 1024

# Headers for browsers: no page of another origin may show a response in a frame, run a response as a script or use a
# response as an image.
_FOR_BROWSERS: Final = (
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)

_log = logging.getLogger("twinbus.namespace.http")


class HttpStream(Protocol):
    """The methods of a byte stream that `HttpConnection` uses."""

    @property
    def is_full(self) -> bool: ...
    def write(self, parts: list[bytes]) -> None: ...
    def close(self) -> None: ...
    def when_room(self, call: Callable[[], None]) -> None: ...
    def take_turn(self, call: Callable[[], None]) -> None: ...
    def pause_reading(self, reason: str) -> None: ...
    def resume_reading(self, reason: str) -> None: ...


Upgrade = Callable[[list[tuple[bytes, bytes]], bytes, bytes], HttpResponse | None]
"""Takes headers and target of a request, and the bytes after it. Returns the response if the WebSocket is refused.

If it returns None, it has sent a response and taken over the stream.
"""


class HttpRequestHandler(Protocol):
    """Answers requests. Raises AbandonedError if the peer must get no response."""

    async def handle(self, request: HttpRequest) -> HttpResponse: ...


class HttpConnection:
    """Speaks HTTP on one byte stream."""

    def __init__(
        self,
        handler: HttpRequestHandler,
        stream: HttpStream,
        names: HostNames,
        account: ConnectionAccount | None = None,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
        upgrade: Upgrade | None = None,
    ) -> None:
        """`account` is charged for waiting bytes. `arrived_at` is the local address of the connection.

        `upgrade` gets the requests for the path of WebSockets. If it is None, `handler` gets these requests, too.
        """
        self._handler = handler
        self._stream = stream
        self._names = names
        self._account = account
        self._arrived_at = arrived_at
        self._upgrade = upgrade
        self._peer_is_loopback = peer_is_loopback
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._waiting = bytearray()  # received bytes that h11 does not have yet
        self._unparsed = 0  # bytes that h11 keeps because their request or chunk is incomplete
        self._answering: asyncio.Task[None] | None = None
        self._waits_for_turn = False  # a request was answered, and the next request has to wait
        self._timer: asyncio.TimerHandle | None = None
        self._is_idle = False
        self._linger_left: int | None = None
        self._peer_ended = False
        self._last = False
        self._closed = False

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self._answering is not None

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        if self._linger_left is not None:
            self._linger_left -= len(data)
            if self._linger_left < 0:
                self._close()
        else:
            self._waiting += data
            if self._may_parse:
                self._parse()
            if len(self._waiting) > _PAUSE_WAITING:
                self._stream.pause_reading("answering")
            if len(self._waiting) > _MAX_WAITING:
                self._waiting.clear()
                self._last = True
        self._update_account()

    @property
    def _may_parse(self) -> bool:
        return self._answering is None and not self._waits_for_turn and self._linger_left is None and not self._closed

    def eof_received(self) -> bool:
        """Return True, which keeps the transport open, so that the response to a running request can be written."""
        self._peer_ended = True
        if self._linger_left is not None:
            self._close()
        elif self._may_parse:
            self._parse()
        return True

    def connection_lost(self) -> None:
        """Release all objects. A running request continues, so that its change is complete; its response is dropped."""
        self._closed = True
        self._cancel_timer()
        self._waiting = self._body = bytearray()

    def evict(self, exceeded: LimitExceededError) -> None:
        """Close the connection, because it makes the process hold too much memory."""
        self._waiting.clear()
        self._last = True
        if self._answering is None and self._linger_left is None and not self._closed:
            refusal = error_response(HTTPStatus.SERVICE_UNAVAILABLE, exceeded.description, {"Retry-After": "5"})
            self._refuse(refusal, linger=True)
            self._body.clear()

    def shut_down(self) -> None:
        """Close after the response to the running request, because the namespace stops."""
        self._last = True
        if self._answering is None:
            self._close()

    # --- reading requests ----------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Pass the received bytes to h11, and handle each event that h11 returns, until a request is complete."""
        try:
            while self._may_parse:
                event = self._h11.next_event()
                if event is h11.NEED_DATA and self._pass_more():
                    continue
                if event is h11.NEED_DATA or event is h11.PAUSED:
                    self._wait_for_more()
                    return
                # `trailing_data` makes a copy of the unparsed bytes. The copy is cheap: it is a part of the last piece.
                before, self._unparsed = self._unparsed, len(self._h11.trailing_data[0])
                # An end of message has the trailers of a chunked body.
                if isinstance(event, h11.Request | h11.EndOfMessage) and before - self._unparsed > MAX_HEADER_BYTES:
                    detail = f"the headers are larger than {MAX_HEADER_BYTES} bytes"
                    self._refuse(error_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, detail), linger=True)
                    return
                self._handle(event)
        except h11.RemoteProtocolError as wrong:
            self._refuse(error_response(wrong.error_status_hint, f"the request is not HTTP/1.1: {wrong}"))

    def _pass_more(self) -> bool:
        """Pass the next piece of the received bytes to h11, or their end. Returns False if neither is there yet."""
        if not self._waiting and not self._peer_ended:
            return False
        piece = bytes(self._waiting[:_PIECE_BYTES])
        del self._waiting[:_PIECE_BYTES]
        self._h11.receive_data(piece)  # b"" is the end
        self._unparsed += len(piece)
        return True

    def _handle(self, event: h11.Event | type[h11.PAUSED] | type[h11.NEED_DATA]) -> None:
        match event:
            case h11.Request():
                self._request = event
                self._body.clear()
                if event.http_version not in _VERSIONS:
                    self._refuse(error_response(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "HTTP/1.1 is spoken here"))
                    return
                if (ambiguous := _ambiguous_framing(event)) is not None:
                    self._refuse(error_response(HTTPStatus.BAD_REQUEST, ambiguous), linger=True)
                    return
                if (refused := self._refusal_of(event)) is not None:
                    self._refuse(refused, linger=_has_body(event))
                    return
                self._check_size(int(dict(event.headers).get(b"content-length", b"0")))
            case h11.Data():
                self._body += event.data
                self._check_size(len(self._body))
            case h11.EndOfMessage():
                self._cancel_timer()
                self._begin_answer()
            case h11.ConnectionClosed():
                self._close()

    def _refusal_of(self, request: h11.Request) -> HttpResponse | None:
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers)
        return refuse_foreign(request.target.decode("latin-1"), headers, self._names, self._arrived_at)

    def _check_size(self, size: int) -> None:
        if size > MAX_BODY_BYTES:
            detail = f"the body is larger than {MAX_BODY_BYTES} bytes"
            self._refuse(error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail), linger=True)

    def _wait_for_more(self) -> None:
        if self._h11.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))
        begun = self._h11.their_state is h11.SEND_BODY or self._unparsed > 0
        if not begun:
            self._cancel_timer()
            self._is_idle = True
            self._set_timer(_IDLE_SECONDS, self._close)
        elif self._timer is None or self._is_idle:
            self._cancel_timer()
            self._set_timer(_REQUEST_SECONDS, self._request_overdue)

    def _request_overdue(self) -> None:
        self._timer = None
        self._refuse(
            error_response(
                HTTPStatus.REQUEST_TIMEOUT, f"the request was not complete in {_REQUEST_SECONDS:.0f} seconds"
            )
        )

    # --- writing responses ---------------------------------------------------------------------------------------

    def _begin_answer(self) -> None:
        assert self._request is not None, "h11 ends no message that has not begun"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._request.headers}
        method = self._request.method.decode("ascii")
        try:
            path, segments, query = parse_target(self._request.target.decode("latin-1"))
        except BadTargetError as wrong:
            self._refuse(error_response(HTTPStatus.BAD_REQUEST, str(wrong)))
            return
        if self._upgrade is not None and is_websocket(segments):
            self._hand_over(self._upgrade, self._request)
            return
        request = HttpRequest(
            method="GET" if method == "HEAD" else method,
            path=path,
            segments=segments,
            query=query,
            headers=headers,
            body=bytes(self._body),
            peer_is_loopback=self._peer_is_loopback,
            arrived_at=self._arrived_at,
            token_accepted=self._token_accepted,
        )
        self._body.clear()
        self._answering = asyncio.get_running_loop().create_task(self._answer(request, method))

    def _hand_over(self, upgrade: Upgrade, request: h11.Request) -> None:
        """Let `upgrade` continue the connection as a WebSocket, with the bytes that arrived after the request."""
        following = self._h11.trailing_data[0] + bytes(self._waiting)
        if request.method != b"GET" or self._body or request.http_version != b"1.1":
            self._refuse(
                error_response(HTTPStatus.BAD_REQUEST, "a WebSocket begins with GET in HTTP/1.1, without a body")
            )
            return
        self._waiting.clear()
        self._unparsed = 0
        refused = upgrade(list(request.headers), request.target, following)
        if refused is not None:
            self._refuse(refused)
            return
        self._closed = True
        self._log_access("GET", WEBSOCKET_PATH, HttpResponse(HTTPStatus.SWITCHING_PROTOCOLS), 0.0)

    def _token_accepted(self) -> None:
        """Mark the connection as authenticated. Its memory limit stays the same."""
        if self._account is not None:
            self._account.authenticate(keep_limit=True)

    async def _answer(self, request: HttpRequest, method: str) -> None:
        began = time.monotonic()
        try:
            response = await self._handler.handle(request)
        except AbandonedError:
            self._close()
            return
        except Exception:
            _log.exception("request failed", extra={"method": method, "path": request.path})
            response = error_response(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the namespace met an internal error; see its log"
            )
        self._log_access(method, request.path, response, time.monotonic() - began)
        self._answering = None
        if self._closed:
            return
        self._respond(response, with_body=method != "HEAD")
        self._continue()

    def _continue(self) -> None:
        """Continue with the next request when the stream is not full and it is this connection's turn."""
        if self._closed:
            return
        self._waits_for_turn = True
        if self._stream.is_full and not self._last:
            self._stream.pause_reading("answering")
            self._stream.when_room(self._continue)
            return
        if self._last or self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._close()
            return
        self._stream.take_turn(self._begin_next)

    def _begin_next(self) -> None:
        if self._closed:
            return
        self._waits_for_turn = False
        self._request = None
        self._h11.start_next_cycle()
        self._parse()
        if len(self._waiting) <= _PAUSE_WAITING:
            self._stream.resume_reading("answering")
        self._update_account()

    def _update_account(self) -> None:
        if self._account is not None:
            self._account.hold("a request", self._unparsed + len(self._body) + len(self._waiting))

    def _respond(self, response: HttpResponse, *, with_body: bool = True) -> None:
        headers = [
            ("Date", formatdate(usegmt=True)),
            ("Server", "Twinbus"),
            ("Content-Length", str(len(response.body))),
            *([("Content-Type", response.content_type)] if response.body else []),
            *_FOR_BROWSERS,
            *response.headers.items(),
            *([("Connection", "close")] if self._last else []),
        ]
        self._send(h11.Response(status_code=response.status, headers=headers))
        if with_body and response.body:
            self._send(h11.Data(data=response.body))
        self._send(h11.EndOfMessage())

    def _refuse(self, response: HttpResponse, *, linger: bool = False) -> None:
        """Respond to a request that is not passed to the handler, and close the connection."""
        self._last = True
        method = self._request.method.decode("ascii") if self._request is not None else "-"
        self._log_access(method, "-", response, 0.0)
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._respond(response, with_body=method != "HEAD")
        self._cancel_timer()
        self._waiting.clear()
        if linger and not self._peer_ended:
            self._linger_left = _LINGER_BYTES
            self._set_timer(_LINGER_SECONDS, self._close)
        else:
            self._close()

    def _send(self, event: h11.Event) -> None:
        data = self._h11.send(event)
        if data:
            self._stream.write([data])

    def _close(self) -> None:
        self._cancel_timer()
        if not self._closed:
            self._closed = True
            self._stream.close()

    def _set_timer(self, seconds: float, call: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _cancel_timer(self) -> None:
        self._is_idle = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _log_access(self, method: str, path: str, response: HttpResponse, seconds: float) -> None:
        """Log a request without its query and without bodies: a query may contain a token."""
        _log.info(
            "request",
            extra={
                "method": method,
                "path": path,
                "status": int(response.status),
                "bytes": len(response.body),
                "milliseconds": round(seconds * 1000, 3),
                "loopback": self._peer_is_loopback,
            },
        )


def _has_body(request: h11.Request) -> bool:
    headers = dict(request.headers)
    return b"transfer-encoding" in headers or int(headers.get(b"content-length", b"0")) > 0


def _ambiguous_framing(request: h11.Request) -> str | None:
    """Return why it is not certain where the body ends, or None if it is certain.

    A proxy may read such a request in another way than h11, and take a part of the body for the next request (RFC 9112,
    section 6.1).
    """
    headers = dict(request.headers)
    if b"transfer-encoding" not in headers:
        return None
    if b"content-length" in headers:
        return "the request has both Content-Length and Transfer-Encoding"
    return "Transfer-Encoding is not part of HTTP/1.0" if request.http_version == b"1.0" else None
