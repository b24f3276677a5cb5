"""A byte stream whose peer is gone already."""

import asyncio
import errno

from twinbus.namespace.front.byte_stream import ByteStream
from twinbus.namespace.resources import Resources


class ResetTransport(asyncio.Transport):
    """A socket that the peer has reset, before the event loop has read that."""

    aborted = False

    def is_closing(self) -> bool:
        return self.aborted

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def test_closing_after_an_error_to_a_peer_that_has_reset_the_connection_ends_it() -> None:
    transport = ResetTransport()
    stream = ByteStream(transport, lambda: False, Resources().open(lambda exceeded: None))
    stream.close_after_error()
    assert transport.aborted
    stream.connection_lost()
