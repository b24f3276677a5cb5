"""Bytes of a client that speaks AMQP in a WebSocket, well framed or not: for the fuzzers of the namespace's front."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10


def handshake(*extra: str, port: int | None = None) -> bytes:
    """The request that opens a WebSocket, with further header lines."""
    host = "localhost" if port is None else f"localhost:{port}"
    lines = [
        "GET /$servicebus/websocket HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: AMQPWSB10",
        *extra,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def frame(opcode: int, payload: bytes, *, fin: bool = True, mask: bytes | None = b"\1\2\3\4", rsv: int = 0) -> bytes:
    """One frame of a client. Without a mask, it violates the protocol."""
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    masked = 0 if mask is None else 0x80
    if len(payload) < 126:
        head = struct.pack("!BB", first, masked | len(payload))
    elif len(payload) < 1 << 16:
        head = struct.pack("!BBH", first, masked | 126, len(payload))
    else:
        head = struct.pack("!BBQ", first, masked | 127, len(payload))
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))


def ping(payload: bytes = b"") -> bytes:
    return frame(_PING, payload)


def message(payload: bytes) -> bytes:
    return frame(_BINARY, payload)


def text(payload: bytes) -> bytes:
    return frame(_TEXT, payload)


def fragments(payloads: Sequence[bytes]) -> bytes:
    """One message in several frames."""
    last = len(payloads) - 1
    return b"".join(
        frame(_CONTINUATION if place else _BINARY, payload, fin=place == last) for place, payload in enumerate(payloads)
    )


def in_websocket(chance: random.Random, pieces: Sequence[bytes]) -> list[bytes]:
    """These pieces as messages of a WebSocket. Some have a hostile frame among them."""
    sent = [handshake()]
    for piece in pieces:
        if chance.random() < 0.3:
            cut = chance.randrange(len(piece) + 1)
            sent.append(fragments([piece[:cut], b"", piece[cut:]]))
        else:
            sent.append(message(piece))
    if chance.random() < 0.5:
        sent.insert(chance.randrange(1, len(sent) + 1), hostile_frame(chance))
    if chance.random() < 0.1:
        place = chance.randrange(len(sent))
        sent[place] = sent[place][: chance.randrange(len(sent[place]) + 1)]
    return [piece for piece in sent if piece]


def hostile_frame(chance: random.Random) -> bytes:
    """A frame, or many, that a client does not send."""
    match chance.randrange(10):
        case 0:
            return frame(_BINARY, b"AMQP", mask=None)
        case 1:
            return frame(chance.choice((_TEXT, 3, 7, 11, 15)), b"AMQP")
        case 2:
            return frame(_BINARY, b"AMQP", rsv=chance.randrange(1, 8))
        case 3:
            return b"\x82\xff" + chance.choice((1 << 20, 1 << 40, (1 << 63) - 1, 1 << 63)).to_bytes(8) + b"\0\0\0\0"
        case 4:
            return ping(b"x" * chance.choice((0, 125))) * chance.choice((1, 100, 2000))
        case 5:
            return message(b"") * chance.choice((1, 100, 5000))
        case 6:
            return frame(_CONTINUATION, b"x", fin=chance.random() < 0.5)
        case 7:
            return frame(_CLOSE, chance.choice((b"", b"\3", b"\3\xe8", b"\3\xedx", b"\3\xe8\xff\xfe", b"\xff\xff")))
        case 8:
            return frame(chance.choice((_PING, _CLOSE)), b"x" * 126)
        case _:
            return frame(_PONG, b"", fin=chance.random() < 0.5) + fragments([b""] * chance.choice((2, 3000)))
