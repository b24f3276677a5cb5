"""A delivery whose last frame has not come: what its first frame said, and the payload so far."""

from twinbus.amqp.transfers import Extras


class Partial:
    __slots__ = ("delivery_id", "extras", "message_format", "payload", "settled", "state_bytes", "tag")

    def __init__(self, delivery_id: int, tag: bytes, message_format: int, extras: Extras) -> None:
        self.delivery_id = delivery_id
        self.tag = tag
        self.message_format = message_format
        self.extras = extras
        self.payload = bytearray()
        self.state_bytes = 0  # memory of the delivery state that came with the first frame
        self.settled = False
