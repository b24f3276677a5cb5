"""Limits of a connection before and after its peer has authenticated (X1): what ends, when, and with which text."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from twinbus.amqp.connection import Connection
from twinbus.amqp.events import ConnectionEvent, Delivered, LinkAttached, LinkDetached
from twinbus.amqp.frames import AMQP_HEADER, FRAME_HEADER, performative_frame
from twinbus.amqp.limits import KIB, Limits, memory_of
from twinbus.amqp.performatives import (
    SENDER,
    Attach,
    Begin,
    Detach,
    Error,
    Modified,
    Open,
    Target,
    Transfer,
)
from twinbus.values import Condition, NumberKeyedMap, Symbol

from .joined import closing_error, only

BEGIN = Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100)
AFTER = Limits(enforce_credit=False)
UNTIL = " until a token was accepted"


def before(**limits: Any) -> Limits:
    return Limits(enforce_credit=False, **limits)


def server(limits_before: Limits, after: Limits = AFTER, said: Open | None = None) -> Connection:
    made = Connection.server("s", bare_allowed=True, limits=after, limits_before=limits_before)
    made.receive(AMQP_HEADER + performative_frame(0, said or Open("c")), 0.0)
    return made


def attach(handle: int, name: str | None = None, **fields: Any) -> bytes:
    link = Attach(name or f"l{handle}", handle, SENDER, target=Target("t"), initial_delivery_count=0, **fields)
    return performative_frame(0, link)


def transfer(handle: int, delivery_id: int, payload: bytes, **fields: Any) -> bytes:
    head = performative_frame(0, Transfer(handle, delivery_id, b"t", **fields))
    return FRAME_HEADER.pack(len(head) + len(payload), 2, 0, 0) + head[8:] + payload


def with_links(made: Connection, count: int) -> Connection:
    events = made.receive(performative_frame(0, BEGIN) + b"".join(map(attach, range(count))), 0.0)
    for event in only(LinkAttached, events):
        event.link.accept()
    return made


def ended(events: Iterable[ConnectionEvent]) -> tuple[str, str | None]:
    error = closing_error(list(events))
    assert isinstance(error, Error)
    return error.condition, error.description


def test_x1_a_large_frame_is_taken_only_after_authentication() -> None:
    limits = before(max_frame_size=1000)
    frame = transfer(0, 0, b"x" * 2000)
    assert ended(with_links(server(limits), 1).receive(frame[:8], 0.0)) == (
        Condition.RESOURCE_LIMIT_EXCEEDED,
        f"A frame has at most 1000 bytes{UNTIL}; this one has {len(frame)}.",
    )
    made = with_links(server(limits), 1)
    made.authenticate()
    [delivered] = only(Delivered, made.receive(frame, 0.0))
    assert delivered.payload == b"x" * 2000


def test_x1_a_frame_above_what_was_announced_is_a_framing_error_at_any_time() -> None:
    made = server(before(max_frame_size=1000))
    condition, _ = ended(made.receive((1 << 24).to_bytes(4) + b"\x02\x00\x00\x00", 0.0))
    assert condition == Condition.FRAMING_ERROR


def test_x1_unfinished_deliveries_end_the_connection_before_and_the_link_after_authentication() -> None:
    limits = before(partial_bytes=1500)
    pieces = [transfer(handle, handle, b"x" * 1000, more=True) for handle in range(2)]
    made = with_links(server(limits), 2)
    assert made.receive(pieces[0], 0.0) == []
    assert ended(made.receive(pieces[1], 0.0)) == (
        Condition.RESOURCE_LIMIT_EXCEEDED,
        f"Unfinished deliveries of a connection hold at most 1500 bytes{UNTIL}. Finish one delivery before the next.",
    )
    assert [exceeded.limit for exceeded in made.exceeded] == ["unfinished-bytes"]
    made = with_links(server(limits, before(partial_bytes=1500)), 2)
    made.authenticate()
    [gone] = only(LinkDetached, made.receive(b"".join(pieces), 0.0))
    assert gone.error is not None
    assert gone.error.description is not None
    assert UNTIL not in gone.error.description
    assert not made.is_closed
    assert [exceeded.limit for exceeded in made.exceeded] == ["unfinished-bytes"]


def test_x1_the_delivery_state_of_an_unfinished_delivery_counts() -> None:
    many = Modified(message_annotations={Symbol("p"): [[] for _ in range(500)]})
    frame = transfer(0, 0, b"", more=True, state=many)
    made = with_links(server(before(partial_bytes=20_000)), 1)
    assert ended(made.receive(frame, 0.0))[0] == Condition.RESOURCE_LIMIT_EXCEEDED
    made = with_links(server(AFTER), 1)
    made.receive(frame, 0.0)
    assert made.partial_bytes == memory_of(many) > 20_000 > len(frame)
    made.receive(performative_frame(0, Detach(0, True)), 0.0)
    assert made.partial_bytes == 0


@pytest.mark.parametrize(
    ("limit", "value", "limits", "raw"),
    [
        ("links", 2, before(max_links=2), b"".join(map(attach, range(3)))),
        ("sessions", 1, before(max_sessions=1), performative_frame(1, BEGIN)),
        ("attach-bytes", 8000, before(attach_bytes=8000), attach(0, properties={Symbol("p"): "x" * 8192})),
        ("performative-bytes", 512, before(performative_bytes=512), attach(0, properties={Symbol("p"): "x" * 512})),
    ],
)
def test_x1_a_limit_ends_the_connection_before_authentication_and_says_which(
    limit: str, value: int, limits: Limits, raw: bytes
) -> None:
    made = server(limits)
    made.receive(performative_frame(0, BEGIN), 0.0)
    condition, text = ended(made.receive(raw, 0.0))
    assert condition == Condition.RESOURCE_LIMIT_EXCEEDED
    assert text is not None
    assert f"at most {value} " in text
    assert UNTIL in text
    assert [exceeded.limit for exceeded in made.exceeded] == [limit]
    assert made.held_bytes == 0
    made = server(limits)
    made.authenticate()
    made.receive(performative_frame(0, BEGIN) + raw, 0.0)
    assert not made.is_closed
    assert made.exceeded == []


def test_x1_the_memory_of_open_counts() -> None:
    many = Open("c", properties={Symbol("p"): [[] for _ in range(1000)]})
    made = Connection.server("s", bare_allowed=True, limits=AFTER, limits_before=before(attach_bytes=16 * KIB))
    raw = AMQP_HEADER + performative_frame(0, many)
    assert len(raw) < 16 * KIB
    assert ended(made.receive(raw, 0.0))[0] == Condition.RESOURCE_LIMIT_EXCEEDED


def test_x1_a_peer_that_only_sends_is_ended_before_authentication() -> None:
    limits = before(received_bytes=1000)
    heartbeats = b"\x00\x00\x00\x08\x02\x00\x00\x00" * 100
    made = server(limits)
    assert made.receive(heartbeats, 0.0) == []
    assert made.receive(heartbeats, 0.0) == []
    assert ended(made.receive(heartbeats, 0.0))[1] == f"A connection sends at most 1000 bytes{UNTIL}."
    made = server(limits)
    made.authenticate()
    for _ in range(10):
        made.receive(heartbeats, 0.0)
    assert not made.is_closed


def test_x1_a_connection_without_an_accepted_token_ends_in_time() -> None:
    limits = before(authentication_seconds=30.0)
    made = Connection.server("s", bare_allowed=True, limits=AFTER, limits_before=limits)
    made.receive(AMQP_HEADER + performative_frame(0, Open("c")), 100.0)
    assert made.next_timer() == 130.0
    made.receive(b"\x00\x00\x00\x08\x02\x00\x00\x00", 125.0)  # heartbeats do not delay the end
    assert made.handle_timer(129.9) == []
    assert ended(made.handle_timer(130.0)) == (
        Condition.CONNECTION_FORCED,
        "No token was accepted on this connection within 30 s. Connect again and put a valid token on $cbs.",
    )
    assert [exceeded.limit for exceeded in made.exceeded] == ["authentication-seconds"]


def test_x1_a_peer_that_authenticated_may_be_idle() -> None:
    limits = before(authentication_seconds=30.0)
    made = Connection.server("s", bare_allowed=True, limits=AFTER, limits_before=limits, idle_timeout=None)
    made.receive(AMQP_HEADER + performative_frame(0, Open("c")), 100.0)
    made.authenticate()
    assert made.next_timer() is None
    assert made.handle_timer(1000.0) == []
    assert not made.is_closed


def test_x1_links_that_are_refused_are_not_kept_even_if_the_peer_never_answers() -> None:
    made = with_links(server(AFTER, before(max_links=2)), 2)
    made.authenticate()
    for handle in range(2, 200):
        events = made.receive(attach(handle) + transfer(handle, handle, b"x"), 0.0)
        assert events == [], "a transfer that was under way is ignored"
    assert made.link_count == 2
    assert len(made.exceeded) == 198
    held = made.held_bytes
    made.receive(b"".join(performative_frame(0, Detach(handle, True)) for handle in range(2, 200)), 0.0)
    assert not made.is_closed
    assert made.held_bytes == held
    # The handle of a refused link is free again.
    made.receive(performative_frame(0, Detach(1, True)), 0.0)
    assert len(only(LinkAttached, made.receive(attach(150), 0.0))) == 1


def test_x1_memory_is_counted_as_decoded_not_as_sent() -> None:
    lists: list[list[Any]] = [[] for _ in range(1000)]
    assert memory_of(lists) > 56 * 1000, "one byte each on the wire"
    assert memory_of({"key": (b"x" * 1000, None)}) > 1000
    assert memory_of(NumberKeyedMap((number, b"x" * 100) for number in range(1000))) > 300 * 1000
    made = server(AFTER)
    made.receive(performative_frame(0, BEGIN) + attach(0, properties={Symbol("p"): lists}), 0.0)
    assert made.attach_bytes > 56 * 1000


@pytest.mark.parametrize("fails", [False, True])
def test_x1_nothing_is_held_or_kept_alive_once_the_transport_is_gone(fails: bool) -> None:
    class Application:
        core: Connection

        def verify(self, mechanism: str, response: bytes) -> bool:
            return True

    application = Application()
    made = Connection.server("s", bare_allowed=True, verifier=application.verify, limits=before())
    application.core = made
    made.receive(AMQP_HEADER + performative_frame(0, Open("c")), 0.0)
    with_links(made, 3)
    made.receive(transfer(0, 0, b"x" * 2000, more=True) + transfer(1, 1, b"x" * 100)[:50], 0.0)
    assert made.held_bytes > 2000
    core, session = weakref.ref(made), weakref.ref(made.sessions[0])
    gc.collect()
    gc.disable()
    try:
        if fails:
            ended(made.receive(b"\xff" * 1000, 0.0))
        made.drop()
        assert made.held_bytes == made.pending_bytes == made.link_count == 0
        del made, application
        assert (core(), session()) == (None, None)
    finally:
        gc.enable()
