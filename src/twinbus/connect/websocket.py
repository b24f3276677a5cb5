"""AMQP inside WebSocket messages, without I/O, for both ends of a connection.

Service Bus takes AMQP over a WebSocket on port 443, path `/$servicebus/websocket`, subprotocol `AMQPWSB10`, for
networks that let nothing else out. The binary messages are a stream of bytes: a message may end anywhere inside an AMQP
frame. wsproto does the handshake and the framing.

    server:  layer, answer = accept_websocket(headers, target)     # raises WebSocketRefusedError
    client:  layer = WebSocketLayer.client(); request = layer.request("contoso.servicebus.windows.net")
    both:    payload = layer.receive(data)     # the peer's AMQP bytes
             data = layer.take_output()        # answers of the layer itself, such as a pong: after every `receive`
             parts = layer.send(parts)         # AMQP bytes into messages
             data = layer.close()

Nothing is buffered: the payload of a frame is passed on as it arrives, whatever size the frame announces. No extension
is offered or accepted, so no message is compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Self
from urllib.parse import quote

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

WEBSOCKET_PATH: Final = "/$servicebus/websocket"
SUBPROTOCOL: Final = "AMQPWSB10"

# Clients limit the size of a message: aiohttp, which the asyncio SDK uses, to 4 MiB.
_MESSAGE_BYTES: Final = 256 * 1024
_REFUSAL_CHARACTERS: Final = 4096


class WebSocketRefusedError(Exception):
    """The handshake failed. On a client, `status` is the status of the response, and `text` is its body.

    On a server, `status` and `headers` are for the response to send.
    """

    def __init__(self, status: int, text: str, headers: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = tuple(headers)


class WebSocketLayer:
    """One end of a WebSocket. Made by `accept_websocket` or `WebSocketLayer.client`."""

    def __init__(self, connection: WSConnection, *, is_open: bool) -> None:
        self._connection = connection
        self._output: list[bytes] = []
        self._refusal: WebSocketRefusedError | None = None
        self.is_open = is_open
        """Whether the handshake is done."""
        self.frames = 0
        """How many frames, or pieces of frames, were received."""
        self.end: str | None = None
        """Why the WebSocket has ended, or None. It ends when the peer closes it or violates the protocol."""

    @classmethod
    def client(cls) -> Self:
        return cls(WSConnection(ConnectionType.CLIENT), is_open=False)

    def request(self, host: str) -> bytes:
        """Return the client's handshake. `host` is the value of the Host header."""
        return self._connection.send(
            Request(host=host, target=quote(WEBSOCKET_PATH, safe="/$"), subprotocols=[SUBPROTOCOL])
        )

    def receive(self, data: bytes) -> bytes:
        """Return the AMQP bytes in `data`. Raises WebSocketRefusedError if the server refuses a client's handshake.

        `data` is b"" if the transport has ended. Bytes after the end of the WebSocket are ignored.
        """
        if self.end is not None:
            return b""
        payload: list[bytes] = []
        try:
            self._connection.receive_data(data)
            for event in self._connection.events():
                self.frames += 1
                if isinstance(event, BytesMessage):
                    payload.append(bytes(event.data))
                elif self._ends_with(event):
                    break
        except RemoteProtocolError as error:  # the response to a client's handshake
            raise WebSocketRefusedError(0, f"the response is not that of a WebSocket: {error}") from error
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def take_output(self) -> bytes:
        """Return the bytes that the layer must send, such as a pong or the answer to a close. Each is returned once."""
        output, self._output = b"".join(self._output), []
        return output

    def send(self, parts: Sequence[bytes]) -> list[bytes]:
        """Return AMQP bytes as binary messages. Returns nothing if the WebSocket is being closed."""
        if self._connection.state is not ConnectionState.OPEN:
            return []
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(data) <= _MESSAGE_BYTES:
            return [self._connection.send(BytesMessage(data=data))]
        view = memoryview(data)
        pieces = (bytes(view[start : start + _MESSAGE_BYTES]) for start in range(0, len(data), _MESSAGE_BYTES))
        return [self._connection.send(BytesMessage(data=piece)) for piece in pieces]

    def close(self, code: int = CloseReason.NORMAL_CLOSURE, reason: str = "") -> bytes:
        """Return the bytes of a close frame, or b"" if one was sent before or the handshake is not done."""
        if self._connection.state not in {ConnectionState.OPEN, ConnectionState.REMOTE_CLOSING}:
            return b""
        return self._connection.send(CloseConnection(code=code, reason=reason or None))

    def _ends_with(self, event: Event) -> bool:
        """Handle an event that is not a binary message. Returns whether the WebSocket ends with it."""
        match event:
            case Ping():
                if self._connection.state is ConnectionState.OPEN:
                    self._output.append(self._connection.send(event.response()))
            case TextMessage():
                self.end = "the peer sent a text message: AMQP is sent in binary messages"
                self._output.append(self.close(CloseReason.UNSUPPORTED_DATA, self.end))
            case CloseConnection(code=code, reason=reason):
                # wsproto reports a violation by the peer in the same way as a close by the peer, with the code to send.
                self.end = f"the WebSocket was closed: {int(code)} {reason or ''}".rstrip()
                self._output.append(self.close(code))
            case AcceptConnection(subprotocol=subprotocol):
                if subprotocol != SUBPROTOCOL:
                    raise WebSocketRefusedError(101, f"the server does not speak {SUBPROTOCOL}")
                self.is_open = True
            case RejectConnection(status_code=status):
                self._refusal = WebSocketRefusedError(status, "")
                if not event.has_body:
                    raise self._refusal
            case RejectData(data=data, body_finished=is_finished):
                assert self._refusal is not None, "a body follows its head"
                text = self._refusal.text + bytes(data).decode("utf-8", "replace")
                self._refusal = WebSocketRefusedError(self._refusal.status, text[:_REFUSAL_CHARACTERS])
                if is_finished or len(text) > _REFUSAL_CHARACTERS:
                    raise self._refusal
            case _:
                pass  # a pong
        return self.end is not None


def accept_websocket(headers: Sequence[tuple[bytes, bytes]], target: bytes) -> tuple[WebSocketLayer, bytes]:
    """Return the server's end of a WebSocket, and the response to the handshake. Raises WebSocketRefusedError.

    `headers` and `target` are those of a GET request without a body.
    """
    connection = WSConnection(ConnectionType.SERVER)
    try:
        connection.initiate_upgrade_connection(list(headers), target)
        request = next(event for event in connection.events() if isinstance(event, Request))
    except RemoteProtocolError as error:
        hint = error.event_hint
        status, wanted = (400, ()) if not isinstance(hint, RejectConnection) else (hint.status_code, hint.headers)
        given = [(bytes(name).decode("latin-1"), bytes(value).decode("latin-1")) for name, value in wanted]
        raise WebSocketRefusedError(status, f"{WEBSOCKET_PATH} is for WebSockets: {error}", given) from error
    except (LocalProtocolError, UnicodeError, ValueError) as error:
        raise WebSocketRefusedError(400, f"the handshake cannot be read: {error}") from error
    if SUBPROTOCOL not in request.subprotocols:
        raise WebSocketRefusedError(400, f"the WebSocket must offer the subprotocol {SUBPROTOCOL}")
    return WebSocketLayer(connection, is_open=True), connection.send(AcceptConnection(subprotocol=SUBPROTOCOL))
