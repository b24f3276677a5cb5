"""The states of a link and of a session (amqp-core-transport §2.5.5, §2.6.3), as far as the core tells them apart."""

from enum import Enum, auto


class LinkState(Enum):
    ATTACH_RECEIVED = auto()  # the peer asked; the application has not answered
    ATTACH_SENT = auto()  # we asked
    ATTACHED = auto()
    DETACH_SENT = auto()  # what still comes is thrown away until the peer's detach
    DETACHED = auto()


class SessionState(Enum):
    BEGIN_SENT = auto()
    MAPPED = auto()
    END_SENT = auto()  # what still comes is thrown away until the peer's end
    ENDED = auto()
