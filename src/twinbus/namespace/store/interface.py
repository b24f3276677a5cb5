"""The interface that the namespace runtime uses to store messages, and what both implementations share.

All calls may block, so the runtime makes them on two threads: the writer thread calls `commit`, `tidy` and
`take_freed`; the reader thread calls `load`. Both threads may be inside the store at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from twinbus.namespace.engine.storage_protocol import (
    DueAnswer,
    DueRows,
    ExpiredRows,
    KnownIds,
    OpenedStore,
    StoredSessionState,
    StoreRead,
    StoreWrite,
)


class Store(Protocol):
    """The messages and entities of one namespace."""

    inline: bool
    """True if no call ever blocks. The runtime then calls the store on the event loop and starts no threads."""

    def open(self) -> OpenedStore:
        """Open the store, and check it for damage (X2). Raises StoreError."""
        ...

    def load(self, read: StoreRead) -> Any:
        """Return the answer to `read`, of the type that the docstring of the read says. Sees every finished commit."""
        ...

    def commit(self, writes: Sequence[StoreWrite]) -> None:
        """Apply all writes in order, or no write. When this method has returned, the writes survive a power loss."""
        ...

    def tidy(self) -> bool:
        """Do a limited part of the housekeeping: copy the log, delete dropped rows. Return True if more is left to do.

        The runtime calls this method after the acknowledgements of a commit were sent and while there is nothing to
        commit, so that housekeeping delays no acknowledgement. The call is optional: a commit does overdue work itself.
        """
        ...

    def take_freed(self) -> Mapping[int, int]:
        """Return the bytes of shared bodies that were deleted since the last call, by topic.

        A commit that drops the last row of a body deletes the body. The bodies of a dropped entity are deleted in
        pieces afterwards.
        """
        ...

    def close(self) -> None:
        """Close the store. A second call does nothing."""
        ...


def empty_answer(read: StoreRead) -> Any:
    """Return the answer to a read of a queue that does not exist."""
    match read:
        case DueRows() | ExpiredRows():
            return DueAnswer([], None)
        case StoredSessionState():
            return None
        case KnownIds():
            return set()
        case _:
            return []
