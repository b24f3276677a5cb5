"""What the namespace asks of a store. Blocking calls: the driver runs them off the event loop.

One writer thread calls `commit`, one reader thread calls `load`; both may run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from twinbus.namespace.engine.rows import Need, Opened, Write


class Store(Protocol):
    """Durable memory of one namespace."""

    inline: bool
    """True if calls never block, so that the driver may make them on the event loop."""

    def open(self) -> Opened:
        """Take the store into use. Quick at any depth. Raises StoreError with what to do if it cannot."""
        ...

    def load(self, need: Need) -> Any:
        """Answer one need; the answer's type is documented at the need. Sees every finished commit."""
        ...

    def commit(self, writes: Sequence[Write]) -> None:
        """Apply the writes in order, all or nothing; on return they survive power loss."""
        ...

    def close(self) -> None:
        """Give the store back. A second close does nothing."""
        ...
