"""What a drain leaves, and why (Y11): one row for each destination and cause, in plain words, with the next step.

Pure: the syphon and the driver of the Spark job give the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from twinbus.backlog import FailureKind
from twinbus.syphon.plan import DestinationStatus, destination_key
from twinbus.syphon.progress import MessageCounts

KEPT: Final = "kept"
HELD: Final = "held"
DEAD_LETTERED: Final = "dead_lettered"
UNAVAILABLE: Final = "locked"
SCHEDULED: Final = "scheduled"


@dataclass(frozen=True, slots=True)
class LeftMessages:
    """Messages that a drain did not bring home, for one destination and one cause.

    `destination` is None if the messages name none, and if a backlog queue (`queue`) did not answer. `messages` is
    None if the number is not known. `cause` is for programs: a FailureKind, or a constant of this module. `why` and
    `next_step` are for people.
    """

    destination: str | None
    messages: int | None
    cause: str
    why: str
    next_step: str
    queue: str | None = None


class QueueCounts(NamedTuple):
    """What is left in one backlog queue beside the messages that are put aside, by destination.

    `unavailable` messages are locked by another receiver. `failure` is why the queue does not answer; None if it does.
    """

    queue: str
    unavailable: Counter[str]
    scheduled: Counter[str]
    failure: FailureKind | None = None


_AGAIN: Final = "Then drain again."
_AWAY: Final = f"Check the primary and the network. {_AGAIN}"
_CAUSES: Final[Mapping[FailureKind, tuple[str, str]]] = {
    FailureKind.TIMEOUT: ("the primary did not answer in time", _AWAY),
    FailureKind.CONNECTION_LOST: ("the connection to the primary broke or could not be opened", _AWAY),
    FailureKind.DETACHED: ("the primary closes the link to the entity again and again", _AWAY),
    FailureKind.INTERNAL: ("the primary reports an internal error", _AWAY),
    FailureKind.ENTITY_DISABLED: ("the entity is disabled for sending", f"Enable the entity. {_AGAIN}"),
    FailureKind.QUOTA_EXCEEDED: ("the entity is full", f"Let receivers empty it, or give it a larger size. {_AGAIN}"),
    FailureKind.DNS: ("the host name of the primary cannot be resolved", f"Check the host name and DNS. {_AGAIN}"),
    FailureKind.TLS: ("the TLS handshake with the primary fails", _AWAY),
    FailureKind.CBS: ("the primary did not check the credential: its token node $cbs failed", _AWAY),
    FailureKind.PROTOCOL: ("the primary's address does not answer with AMQP", f"Check the address. {_AGAIN}"),
    FailureKind.UNAUTHORIZED: (
        "the credential has no right to send to the entity",
        f"Give the credential the right Send on the primary. {_AGAIN}",
    ),
    FailureKind.AUTHENTICATION: (
        "the primary refuses the credential, or the credential has expired",
        f"Check the key's name and the key itself. {_AGAIN}",
    ),
    FailureKind.TOKEN_UNAVAILABLE: ("no token could be got", f"Check the issuer of the tokens. {_AGAIN}"),
    FailureKind.CERTIFICATE: ("the primary's certificate is not trusted", f"Check the certificate. {_AGAIN}"),
    FailureKind.SERVER_BUSY: ("the primary is busy", "Drain again later, or more slowly with --rate."),
    FailureKind.ENTITY_NOT_FOUND: (
        "the entity does not exist on the primary",
        "Create the entity, then drain again. Or drain with --wait-for-destinations 10m: it dead-letters these "
        "messages, and `twinbus deadletter resubmit --to` can give them another destination.",
    ),
}
_OTHER_CAUSE: Final = ("sending to the entity fails", f"See the log of the syphon. {_AGAIN}")
_NOT_BROUGHT_BACK: Final = ("the entity takes messages again, and these were not brought back yet", "Drain again.")


def left_by_destination(
    aside: Mapping[str, int],
    statuses: Iterable[DestinationStatus],
    counts: Mapping[str, MessageCounts],
    queues: Iterable[QueueCounts],
    is_held: Callable[[str], bool] = lambda path: False,
) -> tuple[LeftMessages, ...]:
    """Return what is left, by destination. `aside` and `counts` are by destination; "" is for messages without one."""
    causes = {destination_key(one.path): one.cause for one in statuses}
    unavailable: Counter[str] = Counter()
    scheduled: Counter[str] = Counter()
    failing: list[LeftMessages] = []
    for queue in queues:
        unavailable += queue.unavailable
        scheduled += queue.scheduled
        if queue.failure is not None:
            why = f"the backlog queue does not answer ({queue.failure}): what is in it is not known"
            step = f"Check the secondary and the network. {_AGAIN}"
            failing.append(LeftMessages(None, None, str(queue.failure), why, step, queue.queue))
    found: list[LeftMessages] = []
    for path in sorted({*aside, *counts, *unavailable, *scheduled}):
        name = path or None
        if count := aside.get(path, 0):
            cause = HELD if is_held(path) else str(causes.get(destination_key(path)) or "")
            found.append(LeftMessages(name, count, cause, *_aside_texts(cause)))
        found += _counted(name, counts.get(path) or MessageCounts())
        if count := unavailable[path]:
            why = "another receiver has locked them: another syphon moves them, or has died"
            step = "Drain again: locks end after some minutes if nobody renews them."
            found.append(LeftMessages(name, count, UNAVAILABLE, why, step))
        if count := scheduled[path]:
            why = "they are scheduled in the backlog queue and become available later"
            found.append(LeftMessages(name, count, SCHEDULED, why, "Drain again later."))
    return (*found, *failing)


def _aside_texts(cause: str) -> tuple[str, str]:
    if cause == HELD:
        return (
            "an operator holds the entity",
            "Release it (`twinbus drill --release`, force_restore). Then drain again.",
        )
    return _CAUSES.get(FailureKind(cause), _OTHER_CAUSE) if cause else _NOT_BROUGHT_BACK


def _counted(name: str | None, counts: MessageCounts) -> Iterable[LeftMessages]:
    if counts.kept:
        why = "this transport would change them, so they stay in the backlog"
        yield LeftMessages(name, counts.kept, KEPT, why, "Drain with --transport native.")
    for reason, count in sorted(counts.dead_letter_reasons.items()):
        step = "See `twinbus deadletter list`. Correct the cause, then run `twinbus deadletter resubmit`."
        yield LeftMessages(name, count, DEAD_LETTERED, f"they were dead-lettered: {reason}", step)
