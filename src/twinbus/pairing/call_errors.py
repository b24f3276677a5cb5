"""Errors of a sender's calls that are types of azure-servicebus or of Python, because applications catch those types.

Errors of our own types are in `errors`, which loads no SDK.
"""

from __future__ import annotations

from azure.servicebus.exceptions import MessagingEntityNotFoundError, OperationTimeoutError

from twinbus.backlog import Endpoint


class NoTurnError(OperationTimeoutError):
    """Other calls of this process used the link for more than half of this call's time.

    So the timeout does not count as a failure of the namespace (S2, S6).
    """

    def __init__(self, link: str, seconds: float) -> None:
        super().__init__(message=f"other calls held the link to {link} for {seconds:g} s: send again, or share it less")


def closed_error() -> ValueError:
    """Return the error of a call on a closed sender. The SDK's own sender raises the same type."""
    return ValueError("The handler has already been shutdown. Please use the pair to create a new instance.")


def timed_out(text: str) -> OperationTimeoutError:
    return OperationTimeoutError(message=text)


def entity_missing(path: str, endpoint: Endpoint) -> MessagingEntityNotFoundError:
    return MessagingEntityNotFoundError(
        message=f"There is no queue or topic {path!r} on {endpoint}: create it, or correct the name."
    )
