"""Fuzzing of `twinbus.amqp`: damaged values, messages and recordings of two joined cores, and maps made to be slow.

`python -m tests.fuzz.codec --inputs 50000 --seed 1` runs this number of inputs. A finding names the seed and the number
of its input. An input passes if the readers raise nothing but DecodeError, a connection raises nothing, the memory of
the core stays within its limits, and the CPU time stays in proportion to the bytes (X1).
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import UUID

from tests.amqp.joined import Accepting, Joined, cut
from tests.fuzz import cpu_cost, hostile_maps, random_frames
from tests.fuzz.harness import FindingError, inputs_and_seed, named_input
from tests.fuzz.memory import BoundedMemory, peak_mib
from twinbus.amqp import (
    ACCEPTED,
    BATCH_FORMAT,
    RECEIVER,
    SENDER,
    AmqpError,
    Connection,
    ConnectionClosed,
    ConnectionEvent,
    DecodeError,
    Error,
    Header,
    Limits,
    Modified,
    Properties,
    Rejected,
    Source,
    Target,
    batch_messages,
    batch_payload,
    broker_annotations,
    build_message,
    decode,
    encode,
    lock_token_annotation,
    read_routing_fields,
    skip,
    splice_delivery,
    split_sections,
    with_message_id,
)
from twinbus.amqp.decoding import MAX_PREDICTABLE_KEYS, PREDICTABLE_TYPES
from twinbus.amqp.described_types import decode_described
from twinbus.values import (
    Array,
    Char,
    Condition,
    Decimal64,
    Described,
    Float32,
    Int,
    NumberKeyedMap,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
)

MAX_FRAME = 4096
LIMITS = Limits(
    handle_max=31,
    max_links=20,
    attach_bytes=8192,
    incoming_window=50,
    max_unsettled=40,
    max_message_size=6000,
    partial_bytes=8192,
    enforce_credit=False,
)
MAX_KEPT = MAX_FRAME + LIMITS.partial_bytes + LIMITS.attach_bytes + MAX_FRAME

VALUES = [
    None,
    True,
    UByte(5),
    UInt(70000),
    ULong(0x24),
    Int(-5),
    2**40,
    Float32(1.5),
    2.5,
    Char("é"),
    Decimal64(bytes(8)),
    Timestamp(1_700_000_000_000),
    UUID(int=5),
    b"binary" * 50,
    "text",
    Symbol("symbol"),
    [1, "two", [3, {"four": 5}]],
    {Symbol("key"): Described(ULong(3), [None, True])},
    Array(UInt, [UInt(1), UInt(2)]),
    Array(Symbol, [Symbol("a"), Symbol("b")], (ULong(1),)),
    Array(Array, [Array(dict, [{1: 2}])]),
]
MESSAGES = [
    build_message(data=b"hello"),
    build_message(data=[b"several", b"parts" * 100], footer={"f": 1}),
    build_message(value={"a": [1, 2, 3]}, header=Header(durable=True, priority=4, ttl=60000)),
    build_message(sequence=[[1, 2], ["three"]], properties=Properties(message_id=UUID(int=1))),
    build_message(
        data=b"full" * 100,
        header=Header(True, 9, 1000, False, 3),
        delivery_annotations={"x-opt-lock-token": UUID(int=2)},
        message_annotations={
            "x-opt-partition-key": "pk",
            "x-opt-scheduled-enqueue-time": Timestamp(5),
            "x-opt-sequence-number": 7,
        },
        properties=Properties(
            "id", b"user", "to", "subject", "reply", "corr", "text/plain", "gzip", 1, 2, "s", 3, "rs"
        ),
        application_properties={"int": 5, "text": "t" * 300, "when": Timestamp(9), "none": None},
        footer={"signature": b"x"},
    ),
]
MESSAGES.append(batch_payload(MESSAGES))
NUMBERS = [0, 1, 0x40, 0x43, 0x45, 0x53, 0x70, 0x7F, 0x80, 0xA0, 0xC0, 0xC1, 0xD0, 0xE0, 0xF0, 0xFF]


_MOST_GROWTH = 200  # MiB
HOSTILE_EVERY = 60  # inputs; a hostile map takes as long as hundreds of others
HOSTILE_KEYS = (3, 64, 65, 300, 3000)
CHAINED_KEYS = 21_845


@dataclass
class CodecFuzzCounts:
    inputs: int = 0
    refused: int = 0  # ended in the error the standard names
    largest_kept: int = 0
    hostile: int = 0
    slowest: float = 0.0  # CPU time of a hostile map over that of an ordinary one of the same size


def mutated(raw: bytes, chance: Random, others: list[bytes]) -> bytes:
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0 if data:
                data[place % len(data)] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[place % len(data)] = chance.choice(NUMBERS)
            case 2:
                data[place : place + 4] = chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, len(data))).to_bytes(4)
            case 3:
                del data[place : place + chance.randrange(1, 9)]
            case 4:
                data[place:place] = data[place : place + chance.randrange(1, 40)]
            case 5:
                data[place:place] = chance.randbytes(chance.randrange(1, 9))
            case 6:
                del data[place:]
            case _:
                other = chance.choice(others)
                data[place:] = other[chance.randrange(len(other) + 1) :]
    return bytes(data)


# --- values and messages


def try_value(chance: Random) -> bool:
    raw = mutated(chance.choice(ENCODED), chance, ENCODED)
    try:
        value, end = decode(raw)
    except DecodeError:
        return False
    if skip(raw, 0) != end:
        raise FindingError(f"skip and decode disagree on {raw.hex()}")
    again = encode(value)
    if encode(decode(again)[0]) != again:
        raise FindingError(f"{raw.hex()} does not survive a round trip")
    _check_dicts(value)
    return True


def _check_dicts(value: Any) -> None:
    """Check that no dict has so many keys with a predictable hash that it could become slow."""
    if isinstance(value, dict) and sum(isinstance(key, PREDICTABLE_TYPES) for key in value) > MAX_PREDICTABLE_KEYS:
        raise FindingError("a dict has too many keys whose hash can be predicted")
    if isinstance(value, dict | NumberKeyedMap):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            _check_dicts(one)
    elif isinstance(value, Described):
        _check_dicts(value.value)


def try_message(chance: Random) -> bool:
    raw = mutated(chance.choice(MESSAGES), chance, MESSAGES)
    sound = True
    for read in (_read_everything, batch_messages):
        try:
            read(raw)
        except DecodeError:
            sound = False
    try:
        raw = read_routing_fields(raw).raw
    except DecodeError:
        return False
    # An accepted message can get an id and be delivered, and is a valid message afterwards.
    named = with_message_id(raw, "new")
    split_sections(named)
    ours = broker_annotations(1, 2, 3)
    for overlay in (None, {"text": "over"}):
        parts = splice_delivery(
            named,
            delivery_count=chance.choice((0, 300)),
            delivery_annotations=lock_token_annotation(UUID(int=1)),
            message_annotations=ours,
            overlay=overlay,
        )
        split_sections(b"".join(parts))
    return sound


def _read_everything(raw: bytes) -> None:
    found = split_sections(raw)
    for name in ("header", "properties", "delivery_annotations", "message_annotations", "application_properties"):
        getattr(found, name)
    assert found.footer is not None
    if found.body_kind is not None:
        getattr(found, {"data": "data", "value": "value", "sequence": "sequences"}[found.body_kind])


ENCODED = [encode(value) for value in VALUES]


# --- maps whose keys collide


def try_hostile_map(chance: Random, tally: CodecFuzzCounts) -> bool:
    """Colliding keys of any kind, in any place where a map can stand."""
    kind = chance.choice(list(hostile_maps.KEYS))
    number = chance.choice(HOSTILE_KEYS)
    if number == max(HOSTILE_KEYS) and kind in hostile_maps.CHAINED:
        number = CHAINED_KEYS
    hostile = hostile_maps.encoded_map(hostile_maps.KEYS[kind](number))
    ordinary = hostile_maps.map_of_size("text", len(hostile))
    _check_dicts(decode(hostile)[0])
    frames = chance.random() < 0.6
    places = hostile_maps.PERFORMATIVES if frames else hostile_maps.SECTIONS
    place = chance.choice(list(places))
    read = _read_frame if frames else _read_section
    tally.hostile += 1
    if number < max(HOSTILE_KEYS):
        return read(places[place](mutated(hostile, chance, ENCODED) if chance.random() < 0.3 else hostile))
    made, peer = places[place](hostile), places[place](ordinary)
    slower = cpu_cost.ratio(lambda: read(made), lambda: read(peer))
    tally.slowest = max(tally.slowest, slower)
    if slower > cpu_cost.MOST:
        raise FindingError(f"{number} keys of kind {kind} in {place} take {slower:.0f} times as long as ordinary ones")
    return read(made)


def _read_frame(body: bytes) -> bool:
    try:
        decode_described(body, 0)
    except AmqpError:
        return False
    return True


def _read_section(raw: bytes) -> bool:
    for read in (_read_everything, read_routing_fields):
        try:
            read(raw)
        except DecodeError:
            return False
    return True


# --- connections


def record() -> tuple[list[bytes], list[bytes]]:
    """Return the bytes that a client and a server sent to each other, piece by piece."""
    joined = Joined(
        Connection.client("client", "host", max_frame_size=600, idle_timeout=30.0),
        Connection.server("server", max_frame_size=700),
    )
    joined.exchange()
    session, theirs = joined.begin()
    sender, _ = joined.sender(session, credit=50, max_message_size=5000)
    receiver, source = joined.receiver(session, credit=20)
    for number, raw in enumerate(MESSAGES):
        sender.send(b"%d" % number, raw, message_format=BATCH_FORMAT if number == 5 else 0)
        source.send(bytes(16), raw, settled=number == 2)
        joined.exchange()
    theirs.dispose(RECEIVER, 0, 2, settled=True, state=ACCEPTED)
    session.dispose(RECEIVER, 0, settled=False, state=Modified(True, False, {"k": 1}))
    theirs.dispose(SENDER, 0, settled=True, state=Rejected(Error("amqp:not-found", "gone", {"k": "v"})))
    receiver.flow(5, drain=True, echo=True, properties={"p": 1})
    joined.exchange()
    source.drained()
    refused = session.attach("refused", SENDER, source=Source("a", filter={"f": None}), target=Target("b"))
    joined.exchange()
    theirs.links[-1].refuse(Error("amqp:unauthorized-access", "no"))
    joined.exchange()
    sender.detach()
    joined.exchange()
    refused.detach()
    session.end()
    joined.exchange()
    joined.begin()
    joined.client.close(Error("amqp:connection:forced", "bye"))
    joined.exchange()
    return joined.to_server, joined.to_client


def try_connection(chance: Random, tally: CodecFuzzCounts) -> bool:
    as_server = chance.random() < 0.6
    core = (
        Connection.server("s", max_frame_size=MAX_FRAME, channel_max=15, bare_allowed=True, limits=LIMITS)
        if as_server
        else Connection.client("c", "host", max_frame_size=MAX_FRAME, channel_max=15, limits=LIMITS)
    )
    if not as_server:
        session = core.begin()
        session.attach("to-0", SENDER, source=Source("here"), target=Target("queue"))
        session.attach("from-1", RECEIVER, source=Source("queue"), target=Target("here"))
    pieces = (
        _damaged_recording(chance, as_server)
        if chance.random() < 0.6
        else random_frames.conversation(chance, as_server)
    )
    application = Accepting(core)
    events: list[ConnectionEvent] = []
    said = 0
    for piece in pieces:
        for part in cut(piece, chance if chance.random() < 0.2 else None):
            found = core.receive(part, 0.0)
            application.handle(found)
            events += found
            said += sum(map(len, core.data_to_send()))
            _check_bounds(core, tally)
    _check_end(core, events, said, sum(map(len, pieces)))
    return not core.is_closed


def _damaged_recording(chance: Random, as_server: bool) -> list[bytes]:
    pieces = list(TO_SERVER if as_server else TO_CLIENT)
    for _ in range(chance.choice((1, 1, 2, 5))):
        index = chance.randrange(len(pieces))
        pieces[index] = _damaged(pieces[index], chance, pieces)
    return pieces


def _damaged(piece: bytes, chance: Random, others: list[bytes]) -> bytes:
    """Damage the bytes anywhere, or inside one frame whose size field is corrected, so that the frame is decoded."""
    match chance.randrange(4):
        case 0:
            return mutated(piece, chance, others)
        case 1:
            return chance.choice(others) + piece
        case _:
            size = int.from_bytes(piece[:4])
            if not 8 < size <= len(piece):
                return mutated(piece, chance, others)
            body = mutated(piece[8:size], chance, others)
            return (len(body) + 8).to_bytes(4) + piece[4:8] + body + piece[size:]


def _check_bounds(core: Connection, tally: CodecFuzzCounts) -> None:
    kept = core.buffered_bytes
    tally.largest_kept = max(tally.largest_kept, kept)
    if kept > MAX_KEPT:
        raise FindingError(f"{kept} bytes are kept; {MAX_KEPT} are the bound")
    if len(core.links) > LIMITS.max_links + 1 or len(core.sessions) > 16:
        raise FindingError(f"{len(core.links)} links, {len(core.sessions)} sessions")
    for session in core.sessions:
        if max(len(session.unsettled_in), len(session.unsettled_out)) > LIMITS.max_unsettled:
            raise FindingError("more deliveries are unsettled than may be")


def _check_end(core: Connection, events: list[ConnectionEvent], said: int, heard: int) -> None:
    closed = [event for event in events if isinstance(event, ConnectionClosed)]
    if len(closed) > 1 or bool(closed) != core.is_closed:
        raise FindingError(f"closed {len(closed)} times, is_closed is {core.is_closed}")
    if closed and closed[0].error and closed[0].error.condition == Condition.INTERNAL_ERROR:
        raise FindingError("an internal error")
    if said > 64 * heard + 4096:
        raise FindingError(f"{said} bytes were said upon {heard}")


TO_SERVER, TO_CLIENT = record()


def run(inputs: int, seed: int) -> CodecFuzzCounts:
    tally, memory = CodecFuzzCounts(), BoundedMemory(_MOST_GROWTH)
    targets: list[Callable[[Random], bool]] = [
        try_value,
        try_message,
        lambda chance: try_connection(chance, tally),
    ]
    for number in range(inputs):
        chance = Random(f"{seed}/{number}")
        target = targets[number % len(targets)]
        with named_input(seed, number):
            if number % HOSTILE_EVERY == HOSTILE_EVERY - 1:
                taken = try_hostile_map(chance, tally)
            else:
                taken = target(chance)
        tally.inputs += 1
        tally.refused += not taken
    memory.check()
    return tally


def main() -> int:
    inputs, seed = inputs_and_seed("Fuzz the AMQP codec.", 50_000)
    tally = run(inputs, seed)
    print(
        f"codec: {tally.inputs} inputs, {tally.refused} refused, at most {tally.largest_kept} bytes kept; "
        f"{tally.hostile} maps made to be slow, at most {tally.slowest:.1f} times as slow as others; "
        f"peak {peak_mib()} MiB; nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
