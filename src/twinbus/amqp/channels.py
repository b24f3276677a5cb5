"""Which session stands behind a channel, on one connection (amqp-core-transport §2.5.1).

Each peer numbers its sessions on its own; the answer to a begin ties the two numbers together.
"""

from itertools import count

from twinbus.amqp.errors import AmqpError
from twinbus.amqp.performatives import Begin
from twinbus.amqp.session import Session
from twinbus.values import Condition


class Channels:
    def __init__(self, channel_max: int) -> None:
        self._channel_max = channel_max
        self._ours: dict[int, Session] = {}
        self._theirs: dict[int, Session] = {}
        self._ended = 0  # one bit for each of the peer's channels
        self.find = self._theirs.get  # by the peer's channel

    def __len__(self) -> int:
        return len(self._ours)

    @property
    def sessions(self) -> list[Session]:
        return list(self._ours.values())

    def free(self, preferred: int, highest: int) -> int:
        channel = preferred
        if channel in self._ours:
            channel = next(channel for channel in count() if channel not in self._ours)
        if channel > highest:
            raise AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "the peer takes no more sessions")
        return channel

    def add(self, session: Session) -> None:
        self._ours[session.channel] = session

    def check_begin(self, begin: Begin, channel: int) -> Session | None:
        """The session of ours that this begin answers; None when the peer begins one."""
        if channel > self._channel_max:  # §2.7.1
            raise AmqpError(Condition.FRAMING_ERROR, f"channel {channel} is above the channel-max")
        if channel in self._theirs:
            raise AmqpError(Condition.NOT_ALLOWED, f"channel {channel} has a session already")
        if begin.remote_channel is None:
            return None
        asked = self._ours.get(begin.remote_channel)
        if asked is None or asked.remote_channel is not None:
            raise AmqpError(Condition.INVALID_FIELD, f"begin answers channel {begin.remote_channel}, which did not ask")
        return asked

    def bind(self, session: Session, channel: int) -> None:
        self._theirs[channel] = session

    def remove(self, session: Session, channel: int) -> None:
        """Both peers ended the session."""
        del self._theirs[channel]
        del self._ours[session.channel]
        self._ended |= 1 << channel

    def has_ended(self, channel: int) -> bool:
        """Whether a session had this channel, and none has it now."""
        return bool(self._ended >> channel & 1) and channel not in self._theirs

    def clear(self) -> None:
        """The connection is over."""
        self._ours.clear()
        self._theirs.clear()
