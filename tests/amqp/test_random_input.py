from hypothesis import given, settings
from hypothesis import strategies as st

from tests.amqp.joined import Accepting, bare_server, closing_error, only
from tests.fuzz import codec, cpu_cost
from tests.fuzz.amounts import inputs_of
from twinbus.amqp.connection import Connection
from twinbus.amqp.events import ConnectionClosed
from twinbus.amqp.frames import AMQP_HEADER, SASL_HEADER, encode_frame


@given(st.binary(max_size=100))
@settings(max_examples=150, deadline=None)
def test_random_bytes_never_raise_out_of_a_server(raw: bytes) -> None:
    for header in (b"", SASL_HEADER, AMQP_HEADER):
        server = Connection.server("s", bare_allowed=True)
        server.receive(header + raw, 0.0)
        assert server.buffered_bytes <= len(raw) + 8


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0x0F, 0x19), st.binary(max_size=40)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_random_performatives_never_raise_out_of_a_server(bodies: list[tuple[int, int, bytes]]) -> None:
    server = bare_server()
    application = Accepting(server)
    for channel, code, fields in bodies:
        listed = b"\xc0" + bytes((len(fields) + 1, min(len(fields), 14))) + fields
        events = server.receive(encode_frame(channel, b"\x00\x53" + bytes((code,)) + listed), 0.0)
        application.handle(events)
        if server.is_closed:
            error = closing_error(events) if only(ConnectionClosed, events) else None
            assert error is None or error.condition.startswith("amqp:")
            break


def test_a_short_run_of_the_codec_fuzzer_finds_nothing() -> None:
    inputs = inputs_of("codec")
    tally = codec.run(inputs, seed=20)
    assert tally.inputs == inputs
    assert tally.refused > inputs // 6
    assert 0 < tally.largest_kept <= codec.MAX_KEPT
    assert tally.hostile == inputs // codec.HOSTILE_EVERY
    assert 0 < tally.slowest <= cpu_cost.MOST
