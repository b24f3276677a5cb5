"""A peer that sends valid frames in an invalid order. The seed chooses the frames and their order."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz import hostile_maps
from twinbus.amqp import ACCEPTED, Error, Modified, Rejected, Source, Target
from twinbus.amqp.described_types import encode_described
from twinbus.amqp.frames import AMQP_HEADER, SASL_FRAME, SASL_HEADER, encode_frame, performative_frame
from twinbus.amqp.performatives import (
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    SaslMechanisms,
    SaslOutcome,
    Transfer,
)


def conversation(chance: Random, as_server: bool) -> list[bytes]:
    """Return valid frames in a random order, for a small number of channels, handles and deliveries."""
    if as_server:
        opening = AMQP_HEADER + performative_frame(0, Open("peer", max_frame_size=512))
    else:
        mechanisms = performative_frame(0, SaslMechanisms(["ANONYMOUS"]), SASL_FRAME)
        outcome = performative_frame(0, SaslOutcome(0), SASL_FRAME)
        opening = SASL_HEADER + mechanisms + outcome + AMQP_HEADER + performative_frame(0, Open("peer"))
    begin = Begin(remote_channel=None if as_server else 0, next_outgoing_id=0, incoming_window=30, outgoing_window=30)
    links = [
        Attach(name, handle, role, source=Source("a"), target=Target("b"), initial_delivery_count=0)
        for handle, (name, role) in enumerate((("to-0", as_server is False), ("from-1", as_server)))
    ]
    opening += b"".join(performative_frame(0, performative) for performative in (begin, *links))
    return [opening, *(_random_frame(chance) for _ in range(chance.randrange(3, 40)))]


def hostile_frame(chance: Random, keys: int) -> bytes:
    """A frame with a map of colliding keys, of any kind and in any place."""
    kind, place = chance.choice(list(hostile_maps.KEYS)), chance.choice(list(hostile_maps.PERFORMATIVES))
    return encode_frame(0, hostile_maps.PERFORMATIVES[place](hostile_maps.encoded_map(hostile_maps.KEYS[kind](keys))))


def _random_frame(chance: Random) -> bytes:
    if chance.random() < 0.01:
        return hostile_frame(chance, chance.choice((1, 64, 100)))

    def maybe(value: Any) -> Any:
        return value if chance.random() < 0.7 else None

    def small() -> int:
        return chance.choice((0, 0, 0, 1, 1, 2, 3, 40, 2**31, 2**32 - 1))

    flag = chance.random() < 0.3
    error = Error("amqp:connection:forced") if flag else None
    state = chance.choice((None, ACCEPTED, Rejected(error), Modified(True, flag)))
    kinds: list[Callable[[], Any]] = [
        lambda: Begin(
            remote_channel=maybe(chance.randrange(2)) if flag else None,
            next_outgoing_id=small(),
            incoming_window=small(),
            outgoing_window=small(),
        ),
        lambda: Attach(
            chance.choice(("to-0", "from-1", "c")),
            chance.choice((0, 1, 2, 3, 31)),
            chance.random() < 0.5,
            source=maybe(Source("a")),
            target=maybe(Target("b")),
            initial_delivery_count=maybe(small()),
        ),
        lambda: Flow(
            next_incoming_id=maybe(small()),
            incoming_window=small(),
            next_outgoing_id=small(),
            outgoing_window=small(),
            handle=maybe(chance.choice((0, 0, 0, 1, 1, 1, 2))),
            delivery_count=maybe(small()),
            link_credit=maybe(small()),
            drain=flag,
            echo=chance.random() < 0.3,
        ),
        lambda: Transfer(
            chance.choice((0, 0, 0, 1, 1, 1, 2)),
            maybe(small()),
            maybe(b"tag"),
            maybe(0),
            maybe(flag),
            chance.random() < 0.4,
            None,
            state,
            chance.random() < 0.1,
            chance.random() < 0.1,
        ),
        lambda: Disposition(chance.random() < 0.5, small(), maybe(small()), flag, state),
        lambda: Detach(chance.randrange(4), flag, error),
        lambda: End(error),
        lambda: Close(error),
    ]
    weights = [0.2, 2, 10, 14, 6, 1, 0.4, 0.1]
    performative = chance.choices(kinds, weights)[0]()
    channel = 0 if chance.random() < 0.97 else chance.choice((1, 2, 15, 16))
    payload = bytes(chance.choice((0, 5, 3000))) if isinstance(performative, Transfer) else b""
    return encode_frame(channel, encode_described(performative) + payload)
