"""The shared state in a queue of the secondary (S16): its properties and its messages.

The queue `<name of the primary>/x-twinbus-state` holds changes of the state, a few in each message. Readers peek at all
messages, and apply the changes in the order of the sequence numbers: the broker's order, so that no clock decides which
change is the last one. Writers only send. So the Send and Listen rights are enough, and sessions are not needed, which
the Basic tier lacks.

A message with failovers or restores has a time to live of the age limit: the broker removes it when nobody may believe
it any more. Holds and releases stay.

`sync.state_access` and `aio.state_access` peek and send.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

from azure.servicebus import ServiceBusMessage

from twinbus.pairing.decide.failover import MAX_PING_INTERVAL
from twinbus.pairing.decide.known_state import (
    AGE_LIMIT,
    FailoverRecord,
    HoldRecord,
    ReleaseRecord,
    StateChange,
    StateFormatError,
    StateReading,
    apply_changes,
    read_state,
    state_text,
)
from twinbus.pairing.provisioning import LONGEST

STATE_CONTENT_TYPE: Final = "application/vnd.twinbus.state+json"
STATE_PROPERTIES: Final[Mapping[str, int | str | bool]] = {
    "max_size_in_megabytes": 1024,
    "max_delivery_count": 2147483647,
    "default_message_time_to_live": LONGEST,
    "auto_delete_on_idle": LONGEST,
    "dead_lettering_on_message_expiration": False,
    "enable_batched_operations": True,
}
"""The properties of a state queue. Messages that expire disappear."""
PEEK_PAGE: Final = 250
# About 35 KB: below one billing unit of 64 KB (M2).
_MOST_CHANGES: Final = 100


def state_messages(changes: Sequence[StateChange]) -> list[ServiceBusMessage]:
    """Return messages that carry changes, in their order."""
    holds = [change for change in changes if isinstance(change, HoldRecord | ReleaseRecord)]
    others = [change for change in changes if not isinstance(change, HoldRecord | ReleaseRecord)]
    groups = [
        (kind[first : first + _MOST_CHANGES], expires)
        for kind, expires in ((holds, False), (others, True))
        for first in range(0, len(kind), _MOST_CHANGES)
    ]
    return [
        ServiceBusMessage(
            state_text(group),
            message_id=uuid4().hex,
            content_type=STATE_CONTENT_TYPE,
            time_to_live=_time_to_live(group) if expires else None,
        )
        for group, expires in groups
    ]


def _time_to_live(changes: Iterable[StateChange]) -> timedelta:
    # A restore must live as long as any failover that it ends.
    intervals = [one.ping_interval if isinstance(one, FailoverRecord) else MAX_PING_INTERVAL for one in changes]
    return timedelta(seconds=AGE_LIMIT * max(intervals))


def state_of_messages(messages: Iterable[Any]) -> StateReading:
    """Return what is known from the peeked messages of a state queue, in the order of their sequence numbers.

    An unreadable message hides no hold that was read before: messages do not change, and only a release ends a hold.
    """
    changes: list[StateChange] = []
    unreadable: list[str] = []
    for message in messages:
        try:
            changes += read_state(b"".join(message.body))
        except (StateFormatError, TypeError) as error:
            unreadable.append(f"message {message.sequence_number}: {error}")
    return StateReading(apply_changes(changes), tuple(unreadable))
