"""What the namespace asks of a store. Blocking calls: the runtime runs them off the event loop.

One writer thread calls `commit`, one reader thread calls `load`; both may run at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from twinbus.namespace.engine.storage_protocol import OpenedStore, StoreRead, StoreWrite


class Store(Protocol):
    """Durable memory of one namespace."""

    inline: bool
    """True if calls never block, so that the runtime may make them on the event loop."""

    def open(self) -> OpenedStore:
        """Take the store into use. Quick at any depth. Raises StoreError with what to do if it cannot."""
        ...

    def load(self, need: StoreRead) -> Any:
        """Answer one need; the answer's type is documented at the need. Sees every finished commit."""
        ...

    def commit(self, writes: Sequence[StoreWrite]) -> None:
        """Apply the writes in order, all or nothing; on return they survive power loss."""
        ...

    def tidy(self) -> bool:
        """A bounded piece of housekeeping by the writer thread; True while more is waiting.

        Called after a commit's acknowledgements have left and when there is nothing to commit, it keeps such work out
        of their way. It may be left out: a commit that can no longer wait does it first.
        """
        ...

    def take_freed(self) -> Mapping[int, int]:
        """Bytes of shared bodies that went since this was last asked, by their topic. For the writer thread.

        A body goes with the commit that drops the last row naming it, or bit by bit after that of a dropped entity.
        """
        ...

    def close(self) -> None:
        """Give the store back. A second close does nothing."""
        ...
