"""Mutations of recorded AMQP traffic against a running namespace, while a well-behaved client uses it.

    python -m tests.fuzz.front --inputs 20000 --seed 1

Nothing may be logged as an error, every connection has to end when its peer does, memory stays bounded, and what the
other client stored is neither lost nor altered. Frames with colliding map keys take CPU time in proportion to their
bytes (X1). A failure shows the input that brought it about.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import Metric

from tests.fuzz import cpu_cost, hostile_maps, random_frames, websocket_frames
from tests.fuzz.harness import FindingError
from tests.fuzz.memory import peak_mib
from tests.fuzz.recording import QUEUE, SESSIONS, SUBSCRIPTION, TOPIC, Recording, recordings
from twinbus.amqp import frames as amqp_frames
from twinbus.amqp.performatives import Begin, Open
from twinbus.connect import ReceivedMessage, ServiceBusConnection, connect
from twinbus.message import Message
from twinbus.namespace import (
    NamespaceOptions,
    NamespaceServer,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)

INPUTS_PER_WORLD = 1000
_AT_ONCE = 10
_WEBSOCKET_SHARE = 0.1  # of all inputs
_SECONDS = 20.0
_HOSTILE_EVERY = 10  # rounds
_HOSTILE_KEYS = 3000
_MOST_GROWTH = 400 * 1024  # KiB of memory, over what the recordings took
ENTITIES = (
    QueueDescription(path=QUEUE),
    QueueDescription(path=SESSIONS, requires_session=True),
    TopicDescription(path=TOPIC),
    SubscriptionDescription(topic=TOPIC, name=SUBSCRIPTION),
    QueueDescription(path="kept"),
    QueueDescription(path="passing"),
)


@dataclass
class FrontFuzzCounts:
    inputs: int = 0
    answered: int = 0
    rounds: int = 0
    operations: int = 0
    """How many requests of the damaged traffic were carried out."""
    slowest: float = 0.0
    """CPU time of a frame with colliding keys over that of an ordinary one of the same size."""


class Errors(logging.Handler):
    """What the namespace or its loop logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


# --- damage --------------------------------------------------------------------------------------------------------


def mutate(chance: random.Random, recorded: Sequence[Recording]) -> list[bytes]:
    """One recording, damaged, in the pieces in which it is sent."""
    frames = list(chance.choice(recorded))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        if not frames:
            break
        place = chance.randrange(len(frames))
        match chance.randrange(10):
            case 0:
                frames[place] = _flipped(chance, frames[place])
            case 1:
                frames[place] = _renumbered(chance, frames[place])
            case 2:
                frames[place] = frames[place][: chance.randrange(len(frames[place]) + 1)]
            case 3:
                frames.insert(place, frames[place])
            case 4:
                other = chance.randrange(len(frames))
                frames[place], frames[other] = frames[other], frames[place]
            case 5:
                start = chance.randrange(len(source := chance.choice(recorded)))
                frames[place:place] = source[start : start + chance.choice((1, 3, 20))]
            case 6:
                del frames[place : place + chance.choice((1, 1, 4))]
            case 7:
                del frames[place:]
            case 8:
                frames.insert(place, random_frames.hostile_frame(chance, chance.choice((10, 64, 200))))
            case _:
                frames[place] = _resized(chance, frames[place])
    pieces = _in_pieces(chance, [frame for frame in frames if frame] or [b"\x00"])
    return websocket_frames.in_websocket(chance, pieces) if chance.random() < _WEBSOCKET_SHARE else pieces


def _in_pieces(chance: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Split the bytes as a network does: mostly one frame, sometimes several frames, or a part of a frame."""
    together = chance.choice((0.0, 0.0, 0.1, 1.0))
    pieces = [b""]
    for frame in frames:
        if pieces[-1] and chance.random() >= together:
            pieces.append(b"")
        pieces[-1] += frame
    if chance.random() < 0.3:
        place = chance.randrange(len(pieces))
        cut = chance.randrange(len(pieces[place])) or 1
        pieces[place : place + 1] = [piece for piece in (pieces[place][:cut], pieces[place][cut:]) if piece]
    return pieces


def _flipped(chance: random.Random, frame: bytes) -> bytes:
    damaged = bytearray(frame)
    for _ in range(chance.choice((1, 1, 4))):
        if damaged:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def _renumbered(chance: random.Random, frame: bytes) -> bytes:
    """Replace the channel, or a small number at a place where a handle, an id or a code may be."""
    damaged = bytearray(frame)
    if len(damaged) < 16:
        return frame
    if chance.random() < 0.3:
        damaged[6:8] = chance.choice((0, 1, 2, 3, 500, 65535)).to_bytes(2, "big")
    else:
        damaged[chance.randrange(10, min(len(damaged), 40))] = chance.choice((0x00, 0x01, 0x02, 0x40, 0x41, 0x43, 0xFF))
    return bytes(damaged)


def _resized(chance: random.Random, frame: bytes) -> bytes:
    """Remove or repeat bytes inside a frame, and correct its size: the frame is complete, its content is not valid."""
    start = chance.randrange(8, max(9, len(frame)))
    length = chance.choice((1, 2, 8, 64))
    body = frame[8:start] + frame[start:][length:] if chance.random() < 0.5 else frame[8:start] + frame[start:] * 2
    return (len(body) + 8).to_bytes(4, "big") + frame[4:8] + body


# --- the world -----------------------------------------------------------------------------------------------------


@dataclass
class Steady:
    """A well-behaved client: its stored messages must stay, and its sent messages must arrive unchanged."""

    bus: ServiceBusConnection
    kept: list[bytes] = field(default_factory=list)

    async def work(self, chance: random.Random) -> None:
        body = chance.randbytes(chance.choice((1, 100, 3000)))
        async with asyncio.timeout(_SECONDS):
            await (await self.bus.sender("kept")).send([Message(body)])
            self.kept.append(body)
            sender, receiver = await self.bus.sender("passing"), await self.bus.receiver("passing")
            await sender.send([Message(body), Message(body[::-1])])
            found: list[ReceivedMessage] = []
            while len(found) < 2:
                found += await receiver.receive(2 - len(found), _SECONDS)
            if [bytes(message.body) for message in found] != [body, body[::-1]]:
                raise FindingError("a message arrived altered")
            await receiver.complete(found)
            await sender.close()
            await receiver.close()

    async def check(self) -> None:
        found: list[bytes] = []
        async with asyncio.timeout(_SECONDS):
            number = 0
            while page := await self.bus.management("kept").peek(number, 100):
                found += [bytes(message.body) for message in page]
                number = (page[-1].sequence_number or 0) + 1
        if found != self.kept:
            raise FindingError(f"{len(self.kept)} messages were stored, {len(found)} are there, or they are others")


async def converse(port: int, pieces: Sequence[bytes], turns: int) -> int:
    """Send all pieces and close, then read until the namespace closes. Returns the number of bytes that it sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def listen() -> None:
        with suppress(OSError):  # the namespace closed before all pieces were sent
            while data := await reader.read(1 << 20):
                answer.extend(data)

    listening = asyncio.ensure_future(listen())
    try:
        async with asyncio.timeout(_SECONDS):
            with suppress(OSError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    for _ in range(turns):  # of the loop, so that the namespace can act on it
                        await asyncio.sleep(0)
                writer.write_eof()
            await listening
    except TimeoutError as error:
        raise FindingError(f"the connection did not end with its peer: {pieces!r}") from error
    finally:
        listening.cancel()
        writer.transport.abort()
    return len(answer)


async def _batch(
    server: NamespaceServer, seed: int, numbers: range, recorded: list[Recording], tally: FrontFuzzCounts
) -> None:
    inputs = []
    for number in numbers:
        chance = random.Random(f"{seed}/{number}")
        inputs.append((mutate(chance, recorded), chance.choice((1, 3, 8))))
    answers = await asyncio.gather(*(converse(server.port, pieces, turns) for pieces, turns in inputs))
    tally.inputs += len(answers)
    tally.answered += sum(map(bool, answers))


async def _compare_costs(server: NamespaceServer, chance: random.Random, tally: FrontFuzzCounts) -> None:
    """A frame with colliding keys, to a server that does not know the peer, beside one with ordinary keys."""
    kind, place = chance.choice(list(hostile_maps.KEYS)), chance.choice(list(hostile_maps.PERFORMATIVES))
    made = hostile_maps.PERFORMATIVES[place]
    hostile = made(hostile_maps.encoded_map(hostile_maps.KEYS[kind](_HOSTILE_KEYS)))
    ordinary = made(hostile_maps.map_of_size("text", len(hostile)))
    opening = amqp_frames.AMQP_HEADER
    if not place.startswith("open"):
        begin = Begin(next_outgoing_id=0, incoming_window=5, outgoing_window=5)
        opening += amqp_frames.performative_frame(0, Open("peer"))
        opening += b"" if place.startswith("begin") else amqp_frames.performative_frame(0, begin)
    slower = await cpu_cost.ratio_of(
        lambda: converse(server.port, [opening + amqp_frames.encode_frame(0, hostile)], 1),
        lambda: converse(server.port, [opening + amqp_frames.encode_frame(0, ordinary)], 1),
    )
    tally.slowest = max(tally.slowest, slower)
    if slower > cpu_cost.MOST:
        raise FindingError(f"{_HOSTILE_KEYS} keys of kind {kind} in {place} take {slower:.0f} times as long as others")


async def _started(folder: Path, port: int = 0) -> NamespaceServer:
    server = NamespaceServer(NamespaceOptions(name="one", file=None, tls=folder, entities=ENTITIES, port=port))
    await server.start()
    return server


async def _one_world(
    server: NamespaceServer,
    recorded: list[Recording],
    seed: int,
    numbers: range,
    errors: Errors,
    tally: FrontFuzzCounts,
) -> None:
    async with connect(server.connection_string, timeout=_SECONDS) as bus:
        steady = Steady(bus)
        for start in range(numbers.start, numbers.stop, _AT_ONCE):
            part = range(start, min(start + _AT_ONCE, numbers.stop))
            try:
                work = steady.work(random.Random(start))
                await asyncio.gather(_batch(server, seed, part, recorded, tally), work)
            except Exception as wrong:
                raise FindingError(f"inputs {part} of seed {seed}: {wrong!r}") from wrong
            if errors.found:
                raise FindingError(f"inputs {part} of seed {seed} made the namespace fail:\n{errors.found[0]}")
            if tally.rounds % _HOSTILE_EVERY == 0:
                await _compare_costs(server, random.Random(f"{seed}/{start}/costs"), tally)
            tally.rounds += 1
        await steady.check()
        if len(server._context.connections) != 1:
            raise FindingError(
                f"{len(server._context.connections)} connections are left of inputs {numbers} of seed {seed}"
            )
    tally.operations += sum(map(_operations, server._context.meter.registry.collect()))
    await server.stop()


def _operations(metric: Metric) -> int:
    if metric.name != "twinbus_operations":
        return 0
    return sum(int(one.value) for one in metric.samples if one.labels.get("entity", "").startswith(QUEUE))


async def run(inputs: int, seed: int, *, with_sdk: bool = True) -> FrontFuzzCounts:
    tally, errors = FrontFuzzCounts(), Errors()
    with tempfile.TemporaryDirectory() as name:
        server = await _started(Path(name))
        recorded = await recordings(server, with_sdk=with_sdk)
        await server.stop()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        logging.getLogger().addHandler(errors)
        try:
            for start in range(0, inputs, INPUTS_PER_WORLD):
                numbers = range(start, min(start + INPUTS_PER_WORLD, inputs))
                # Tokens are for a port: it stays the same.
                await _one_world(await _started(Path(name), server.port), recorded, seed, numbers, errors, tally)
        finally:
            logging.getLogger().removeHandler(errors)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > _MOST_GROWTH:
        raise FindingError(f"memory grew by {grown} KiB with seed {seed}")
    if errors.found:
        raise FindingError(errors.found[0])
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the AMQP front of a live namespace.")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"front: {options.inputs} inputs, seed {options.seed}", flush=True)
    began = time.monotonic()
    tally = asyncio.run(run(options.inputs, options.seed))
    print(
        f"front: {tally.answered} of {tally.inputs} answered, {tally.operations} operations carried out, all ended, "
        f"none failed; {tally.rounds} rounds of a client beside them, nothing lost; frames with colliding keys took at "
        f"most {tally.slowest:.1f} times as long as others; peak {peak_mib()} MiB ({time.monotonic() - began:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
