import pytest

from tests.amqp.joined import Joined, closing_error, only
from twinbus.amqp.connection import Connection
from twinbus.amqp.events import Opened
from twinbus.amqp.frames import AMQP_HEADER, SASL_FRAME, SASL_HEADER, TLS_HEADER, encode_frame, performative_frame
from twinbus.amqp.negotiation import SaslCredential, SaslReceived
from twinbus.amqp.performatives import Open, SaslInit, SaslMechanisms, SaslOutcome


@pytest.mark.parametrize(
    ("credential", "mechanism", "response"),
    [
        ("ANONYMOUS", "ANONYMOUS", b""),
        ("EXTERNAL", "EXTERNAL", b""),
        ("MSSBCBS", "MSSBCBS", b""),
        (("PLAIN", "user", "pässword"), "PLAIN", "\0user\0pässword".encode()),
    ],
)
def test_each_mechanism_opens_the_connection(credential: SaslCredential, mechanism: str, response: bytes) -> None:
    joined = Joined(Connection.client("c", "host", sasl=credential))
    at_client, at_server = joined.exchange()
    assert only(SaslReceived, at_server) == [SaslReceived(mechanism, response, "host")]
    assert [event.remote.container_id for event in only(Opened, at_client)] == ["server"]
    assert [event.remote.hostname for event in only(Opened, at_server)] == ["host"]


def test_a_verifier_may_refuse_a_credential() -> None:
    server = Connection.server("s", verifier=lambda mechanism, response: response == b"\0u\0right")
    joined = Joined(Connection.client("c", "h", sasl=("PLAIN", "u", "wrong")), server)
    at_client, at_server = joined.exchange()
    for events in (at_client, at_server):
        error = closing_error(events)
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
    assert joined.client.is_closed
    assert joined.server.is_closed


def test_a_mechanism_that_is_not_offered_is_refused_by_both_sides() -> None:
    server = Connection.server("s", mechanisms=("PLAIN",))
    at_client, _ = Joined(Connection.client("c", "h"), server).exchange()
    error = closing_error(at_client)
    assert error is not None
    assert error.condition == "amqp:unauthorized-access"

    stubborn = Connection.server("s", mechanisms=("PLAIN",))
    stubborn.receive(SASL_HEADER, 0.0)
    stubborn.receive(performative_frame(0, SaslInit("ANONYMOUS"), SASL_FRAME), 0.0)
    assert performative_frame(0, SaslOutcome(1), SASL_FRAME) == stubborn.data_to_send()[-1]
    assert stubborn.is_closed


def test_amqp_without_sasl_is_accepted_if_allowed() -> None:
    joined = Joined(Connection.client("c", "h", sasl=None), Connection.server("s", bare_allowed=True))
    at_client, at_server = joined.exchange()
    assert len(only(Opened, at_client)) == len(only(Opened, at_server)) == 1


@pytest.mark.parametrize(
    "header",
    [
        AMQP_HEADER,
        TLS_HEADER,
        b"AMQP\x00\x00\x09\x01",
        b"AMQP\x03\x01\x00\x01",
        b"GET / HT",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        bytes(8),
    ],
)
def test_an_unknown_protocol_header_is_answered_with_ours_and_closed(header: bytes) -> None:
    server = Connection.server("s")
    error = closing_error(server.receive(header, 0.0))
    assert error is not None
    assert error.condition == "amqp:connection:framing-error"
    assert server.data_to_send() == [SASL_HEADER]
    assert server.is_closed
    assert server.receive(b"more", 0.0) == []


def test_an_unknown_header_after_sasl_is_answered_with_the_amqp_header() -> None:
    server = Connection.server("s")
    server.receive(SASL_HEADER + performative_frame(0, SaslInit("ANONYMOUS"), SASL_FRAME), 0.0)
    server.data_to_send()
    events = server.receive(SASL_HEADER, 0.0)
    assert closing_error(events) is not None
    assert server.data_to_send() == [AMQP_HEADER]


def test_a_client_ends_if_the_server_sends_another_protocol_header() -> None:
    client = Connection.client("c", "h")
    assert client.data_to_send() == [SASL_HEADER]
    assert closing_error(client.receive(b"HTTP/1.1", 0.0)) is not None
    assert client.data_to_send() == []


def test_a_header_may_come_byte_by_byte() -> None:
    server = Connection.server("s")
    for byte in SASL_HEADER[:-1]:
        assert server.receive(bytes((byte,)), 0.0) == []
        assert server.data_to_send() == []
    server.receive(SASL_HEADER[-1:], 0.0)
    assert server.data_to_send()[0] == SASL_HEADER


@pytest.mark.parametrize(
    "data",
    [
        performative_frame(0, SaslOutcome(0), SASL_FRAME),
        performative_frame(0, Open("c")),
        performative_frame(0, SaslMechanisms(["PLAIN"]), SASL_FRAME),
        encode_frame(0, b"\x00\x53\x41\x45", SASL_FRAME),
        encode_frame(0, b"", SASL_FRAME),
        encode_frame(0, b"\x40", SASL_FRAME),
        performative_frame(0, SaslInit("PLAIN", b"x" * 600), SASL_FRAME),
        (2**32 - 1).to_bytes(4) + bytes(8),
        bytes(8),
    ],
    ids=["outcome", "open", "mechanisms", "no fields", "empty", "no list", "above 512", "huge", "size zero"],
)
def test_any_other_frame_than_sasl_init_ends_the_connection(data: bytes) -> None:
    server = Connection.server("s")
    server.receive(SASL_HEADER, 0.0)
    assert closing_error(server.receive(data, 0.0)) is not None
    assert server.is_closed


def test_a_second_sasl_init_is_refused() -> None:
    server = Connection.server("s")
    init = performative_frame(0, SaslInit("ANONYMOUS"), SASL_FRAME)
    assert closing_error(server.receive(SASL_HEADER + init + init, 0.0)) is not None


def test_a_client_refuses_an_outcome_before_its_choice() -> None:
    client = Connection.client("c", "h")
    outcome = performative_frame(0, SaslOutcome(0), SASL_FRAME)
    assert closing_error(client.receive(SASL_HEADER + outcome, 0.0)) is not None


def test_closing_before_any_frame_sends_nothing() -> None:
    client = Connection.client("c", "h")
    client.close()
    assert client.is_closed
