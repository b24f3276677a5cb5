"""The errors of a pair. The base class says what resolves the error: the caller, another try, or the operator.

This module loads no SDK. The errors that are types of azure-servicebus are in `call_errors`. The errors of a side of
the pair are in `pair_sides`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twinbus.backlog import FailureKind
from twinbus.errors import CallerError, OperatorError, RetryError


class TimeToLiveError(CallerError, ValueError):
    """The time to live does not fit an AMQP header, so the message cannot be sent to any namespace.

    Example: `except TimeToLiveError as error: print(error.milliseconds, error.longest)`.
    """

    def __init__(self, message_id: object, milliseconds: int, longest: int) -> None:
        days = longest // 86_400_000
        super().__init__(
            f"message {message_id!r} has a time to live of {milliseconds} ms; it must be 0 to {longest} ms, which is "
            f"{days} days: give it a shorter one, or none and let the entity's default hold"
        )
        self.message_id = message_id
        self.milliseconds = milliseconds
        self.longest = longest


class QueueCause(NamedTuple):
    """Why one backlog queue is not in the rotation."""

    queue: str
    kind: FailureKind
    detail: str


def listed_causes(causes: Sequence[QueueCause]) -> str:
    """Return the causes as text, each cause once: `a and 9 more: timeout (no answer)`."""
    queues: dict[tuple[FailureKind, str], list[str]] = {}
    for queue, kind, detail in causes:
        queues.setdefault((kind, detail), []).append(queue)
    return "; ".join(
        f"{found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {kind}{f' ({detail})' if detail else ''}"
        for (kind, detail), found in queues.items()
    )


class BacklogUnavailableError(RetryError):
    """No usable backlog queue is left for this call. The caller must keep the message and send it again.

    Example: `except BacklogUnavailableError as error: keep(message, error.causes)`.
    """

    def __init__(self, entity: str, causes: Sequence[QueueCause]) -> None:
        listed = listed_causes(causes)
        super().__init__(
            f"no backlog queue can take the message for {entity}: {listed or 'none was found or created'}; keep it and "
            "send it again"
        )
        self.entity = entity
        self.causes = tuple(causes)


class PrimaryUnusableError(OperatorError):
    """The entity is gone from the primary, or the primary refuses the credential, and `on_unusable` is "raise".

    Example: `except PrimaryUnusableError as error: print(error.entity, error.cause)`.
    """

    def __init__(self, entity: str, cause: FailureKind) -> None:
        super().__init__(f"{entity} on the primary is unusable: {cause}", "Create the entity or mend the credential.")
        self.entity = entity
        self.cause = cause


class MessageTooLargeForBacklogError(CallerError, ValueError):
    """The copy of a message for the backlog, which has more properties than the message, is too large.

    Example: `except MessageTooLargeForBacklogError as error: print(error.excess, error.limit)`.
    """

    def __init__(self, message_id: object, size: int, limit: int) -> None:
        super().__init__(
            f"message {message_id!r} is {size - limit} bytes too large for the backlog: {size} of at most {limit}; "
            "make it smaller, or send it again once the entity is restored"
        )
        self.message_id = message_id
        self.excess = size - limit
        self.limit = limit


class PartialSendError(RetryError):
    """A batch was split, and the backlog accepted only some of its messages.

    Example: `except PartialSendError as error: keep([m for m in messages if m.message_id in error.unsafe])`.
    """

    def __init__(self, safe: Sequence[object], unsafe: Sequence[object], cause: BaseException) -> None:
        super().__init__(
            f"{len(safe)} messages are safe, {len(unsafe)} are not: {cause}; send again those whose ids are in `unsafe`"
        )
        self.safe = tuple(safe)
        self.unsafe = tuple(unsafe)
        self.cause = cause


class ScheduledInBacklogError(RetryError):
    """A scheduled message cannot be cancelled: it waits in the backlog, or its entity is failed over.

    Example: `except ScheduledInBacklogError as error: print(error.handles)`.
    """

    def __init__(self, handles: Sequence[int]) -> None:
        super().__init__(
            f"not cancelled: {', '.join(map(str, handles))}; what was scheduled while the entity was failed over waits "
            "in the backlog and cannot be taken back, the primary's own numbers can once the entity is restored"
        )
        self.handles = tuple(handles)
