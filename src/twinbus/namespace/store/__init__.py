"""Stores the messages of a namespace: in SQLite on disk, or in memory. Both implement `Store`."""

from twinbus.namespace.store.errors import (
    StoreConflictError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreGoneError,
    StoreInUseError,
    StoreVersionError,
)
from twinbus.namespace.store.files import StoreLock, make_folder
from twinbus.namespace.store.interface import Store
from twinbus.namespace.store.memory import MemoryStore
from twinbus.namespace.store.sqlite import SqliteStore

__all__ = [
    "MemoryStore",
    "SqliteStore",
    "Store",
    "StoreConflictError",
    "StoreDamagedError",
    "StoreError",
    "StoreFullError",
    "StoreGoneError",
    "StoreInUseError",
    "StoreLock",
    "StoreVersionError",
    "make_folder",
]
