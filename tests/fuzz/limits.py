"""Peers without a token, many at once, that try to make the namespace hold memory: the limits before authentication.

    python -m tests.fuzz.limits --inputs 2000 --seed 1

An input is one connection. Half of the connections of a round stay open until all have sent what they have. It passes
if nothing is logged as an error, every connection ends, memory stays bounded, and a client with a token works beside
them and loses nothing (X1). A finding names the seed and the numbers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.fuzz import random_frames, websocket_frames
from tests.fuzz.front import ENTITIES, Errors, Steady
from tests.fuzz.harness import FindingError, inputs_and_seed
from tests.fuzz.memory import BoundedMemory, peak_mib
from twinbus.amqp import MIB, Properties, Source, Target, build_message
from twinbus.amqp.described_types import encode_described
from twinbus.amqp.frames import AMQP_HEADER, SASL_HEADER, encode_frame, performative_frame
from twinbus.amqp.performatives import Attach, Begin, Flow, Open, Transfer
from twinbus.connect import connect
from twinbus.namespace import NamespaceOptions, NamespaceServer
from twinbus.namespace.resources import ResourceLimits, Resources

_MOST_GROWTH: Final = 150  # MiB
_AT_ONCE: Final = 25
_ROUNDS_PER_SERVER: Final = 40
_SECONDS: Final = 20.0
_LIMITS: Final = ResourceLimits(max_connections=20, memory=64 * MIB, unauthenticated_memory=1 * MIB)
_OPENED: Final = AMQP_HEADER + performative_frame(0, Open("raw", "localhost"))
_BEGIN: Final = Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100)


@dataclass
class LimitFuzzCounts:
    inputs: int = 0
    rounds: int = 0
    refused: int = 0
    """How many connections ended because of a limit, and how many peers were refused."""


def _attach(handle: int, sends: bool) -> bytes:
    target, source = Target("$cbs"), Source("$cbs")
    return performative_frame(
        0, Attach(f"l{handle}", handle, not sends, source=source, target=target, initial_delivery_count=0)
    )


def _transfer(number: int, payload: bytes, *, more: bool) -> bytes:
    transfer = Transfer(0, number, b"%d" % number, 0, False, more)
    return encode_frame(0, encode_described(transfer) + payload)


def _put_token(chance: random.Random, number: int) -> bytes:
    token = chance.choice(("", "SharedAccessSignature ", "SharedAccessSignature sr=x&sig=x&se=1&skn=x", "x" * 9000))
    properties: dict[str, Any] = {"operation": "put-token", "name": "sb://localhost/" + "x" * chance.choice((1, 500))}
    message = build_message(
        properties=Properties(message_id=str(number), reply_to="r"), application_properties=properties, value=token
    )
    return _transfer(number, message, more=False)


def _begun(chance: random.Random) -> list[bytes]:
    """What a peer does that has opened AMQP and begun a session: much of one kind."""
    count = chance.choice((1, 5, 20, 300))
    begun = _OPENED + performative_frame(0, _BEGIN)
    match chance.randrange(9):
        case 0:
            return [begun, *(_attach(handle, chance.random() < 0.5) for handle in range(count))]
        case 1:
            return [begun, *(performative_frame(channel, _BEGIN) for channel in range(1, count))]
        case 2:
            return [begun, _attach(0, True), *(_transfer(n, bytes(30_000), more=True) for n in range(min(count, 8)))]
        case 3:
            return [begun, _attach(0, True), _attach(1, False), *(_put_token(chance, n) for n in range(count))]
        case 4:
            return [begun, chance.choice((70_000, 2**31, 2**32 - 1)).to_bytes(4) + b"\2\0\0\0" + bytes(60_000)]
        case 5:
            return [begun, encode_frame(0, b"") * count * 60]
        case 6:
            return [begun, *(random_frames.hostile_frame(chance, 200) for _ in range(min(count, 20)))]
        case 7:
            flow = Flow(next_incoming_id=0, incoming_window=1, next_outgoing_id=0, outgoing_window=1, echo=True)
            return [begun, performative_frame(0, flow) * count * 3]
        case _:
            return [begun, *random_frames.conversation(chance, True)[1:]]


def hostile_peer(chance: random.Random) -> list[bytes]:
    """The bytes of one peer, in pieces."""
    match chance.randrange(9):
        case 8:
            hostile = [websocket_frames.hostile_frame(chance) for _ in range(chance.choice((1, 3, 40)))]
            return chance.choice(
                ([websocket_frames.handshake(), *hostile], websocket_frames.in_websocket(chance, _begun(chance)))
            )
        case 0:
            return [chance.choice((b"", AMQP_HEADER, SASL_HEADER, b"AM", b"\x16\x03\x01\x40\x00"))]
        case 1:
            return [b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * chance.choice((1, 5_000, 30_000))]
        case 2:
            size = chance.choice((10, 200_000, 400_000))
            return [b"PUT /q HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size, bytes(size // 2)]
        case 3:
            return [b"\x16\x03\x01\x40\x00" + chance.randbytes(chance.choice((100, 16_000, 60_000)))]
        case 4:
            return [
                SASL_HEADER
                + encode_frame(
                    0,
                    chance.randbytes(chance.choice((20, 400))),
                )
            ]
        case _:
            return _begun(chance)


async def _peer(port: int, pieces: Sequence[bytes], release: asyncio.Event | None) -> None:
    """Send all pieces and wait for the end of the connection, or for `release` and then break the connection."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return
    try:
        with suppress(OSError):  # the namespace may end the connection at any time
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            if release is not None:
                await release.wait()
                return
            writer.write_eof()
            while await reader.read(1 << 16):
                pass
    finally:
        writer.transport.abort()


async def _round(server: NamespaceServer, steady: Steady, seed: int, numbers: range) -> None:
    release = asyncio.Event()
    peers = []
    for number in numbers:
        chance = random.Random(f"{seed}/{number}/limits")
        held = release if chance.random() < 0.5 else None
        peers.append(asyncio.ensure_future(_peer(server.port, hostile_peer(chance), held)))
    try:
        await steady.work(random.Random(numbers.start))
    finally:
        release.set()
    async with asyncio.timeout(_SECONDS):
        await asyncio.gather(*peers)
        while len(server._context.connections) > 1:  # noqa: ASYNC110 - the namespace has no event for it
            await asyncio.sleep(0)


def _limits_exceeded(server: NamespaceServer) -> int:
    return sum(server.resources.refused.values())


async def run(inputs: int, seed: int) -> LimitFuzzCounts:
    tally, errors = LimitFuzzCounts(), Errors()
    logging.getLogger().addHandler(errors)
    memory: BoundedMemory | None = None
    try:
        with tempfile.TemporaryDirectory() as name:
            for first in range(0, inputs, _AT_ONCE * _ROUNDS_PER_SERVER):
                options = NamespaceOptions(name="one", file=None, tls=Path(name), entities=ENTITIES)
                server = NamespaceServer(options, Resources(_LIMITS))
                await server.start()
                memory = memory or BoundedMemory(_MOST_GROWTH)
                async with connect(server.connection_string, timeout=_SECONDS) as bus:
                    steady = Steady(bus)
                    for start in range(first, min(first + _AT_ONCE * _ROUNDS_PER_SERVER, inputs), _AT_ONCE):
                        numbers = range(start, min(start + _AT_ONCE, inputs))
                        try:
                            await _round(server, steady, seed, numbers)
                        except Exception as wrong:
                            raise FindingError(f"inputs {numbers} of seed {seed}: {wrong!r}") from wrong
                        if errors.found:
                            raise FindingError(f"inputs {numbers} of seed {seed}:\n{errors.found[0]}")
                        tally.inputs += len(numbers)
                        tally.rounds += 1
                    await steady.check()
                tally.refused += _limits_exceeded(server)
                await server.stop()
    finally:
        logging.getLogger().removeHandler(errors)
    if memory is not None:
        memory.check()
    return tally


def main() -> int:
    inputs, seed = inputs_and_seed("Fuzz the limits before authentication.", 2_000)
    logging.getLogger("twinbus").setLevel(logging.ERROR)
    tally = asyncio.run(run(inputs, seed))
    print(
        f"limits: {tally.inputs} inputs in {tally.rounds} rounds beside a client that lost nothing, {tally.refused} "
        f"ended or refused by a limit; peak {peak_mib()} MiB; nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
