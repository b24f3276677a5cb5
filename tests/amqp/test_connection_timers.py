import pytest

from tests.amqp.joined import Joined, closing_error, opened
from twinbus.amqp.connection import Connection
from twinbus.amqp.frames import AMQP_HEADER, HEARTBEAT, SASL_HEADER, performative_frame
from twinbus.amqp.limits import Limits
from twinbus.amqp.performatives import Open
from twinbus.values import Condition


def pair(client_idle: float | None, server_idle: float | None) -> Joined:
    return opened(
        client=Connection.client("c", "h", idle_timeout=client_idle),
        server=Connection.server("s", idle_timeout=server_idle),
    )


def test_heartbeats_are_sent_at_half_the_peers_time_out() -> None:
    joined = pair(client_idle=60.0, server_idle=None)
    assert joined.server.next_timer() == 30.0
    assert joined.server.handle_timer(29.9) == []
    assert joined.server.data_to_send() == []
    joined.server.handle_timer(30.0)
    assert joined.server.data_to_send() == [HEARTBEAT]
    assert joined.server.next_timer() == 60.0


def test_no_time_out_means_no_heartbeats() -> None:
    joined = pair(client_idle=None, server_idle=None)
    assert joined.client.next_timer() is None
    assert joined.server.next_timer() is None
    assert joined.server.handle_timer(1e9) == []


def test_a_silent_peer_is_closed_after_twice_the_announced_time_out() -> None:
    joined = pair(client_idle=None, server_idle=10.0)
    assert joined.server.next_timer() == 20.0
    assert joined.server.handle_timer(19.9) == []
    error = closing_error(joined.server.handle_timer(20.0))
    assert error is not None
    assert error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
    assert joined.server.next_timer() is None
    at_client = joined.client.receive(b"".join(joined.server.data_to_send()), 20.0)
    assert closing_error(at_client) == error


def test_five_idle_minutes_are_survived_on_heartbeats_alone() -> None:
    joined = pair(client_idle=10.0, server_idle=240.0)
    while joined.now < 1000.0:
        timers = [core.next_timer() for core in (joined.client, joined.server)]
        joined.now = min(time for time in timers if time is not None)
        for core in (joined.client, joined.server):
            assert core.handle_timer(joined.now) == []
        assert joined.exchange() == ([], [])
    assert not joined.client.is_closed
    assert not joined.server.is_closed


def test_any_byte_from_the_peer_resets_the_silence_timer() -> None:
    joined = pair(client_idle=None, server_idle=10.0)
    joined.server.receive(HEARTBEAT[:3], 15.0)
    assert joined.server.next_timer() == 35.0


@pytest.mark.parametrize("said", [SASL_HEADER[:3], SASL_HEADER], ids=["half a header", "a header"])
def test_a_peer_that_does_not_open_is_closed(said: bytes) -> None:
    server = Connection.server("s", limits=Limits(handshake_seconds=5.0))
    server.receive(said, 100.0)
    assert server.next_timer() == 105.0
    assert server.handle_timer(104.9) == []
    assert closing_error(server.handle_timer(105.0)) is not None
    assert server.is_closed


def test_an_unanswered_close_ends_the_connection_in_time() -> None:
    server = Connection.server("s", bare_allowed=True, limits=Limits(closing_seconds=3.0))
    server.receive(AMQP_HEADER + performative_frame(0, Open("c", idle_time_out=10_000)), 50.0)
    server.close()
    assert server.next_timer() == 53.0
    assert not server.is_closed
    error = closing_error(server.handle_timer(53.0))
    assert error is not None
    assert error.condition == Condition.CONNECTION_FORCED
    assert server.is_closed


def test_a_closed_connection_has_no_timers() -> None:
    joined = pair(client_idle=10.0, server_idle=10.0)
    joined.client.close()
    joined.exchange()
    assert joined.client.next_timer() is None
    assert joined.server.next_timer() is None
    assert joined.server.handle_timer(1e9) == []
