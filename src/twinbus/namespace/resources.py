"""Limits for all connections of this process together: their number, and the memory that they make the process hold.

Every connection has an account. The account records the bytes that the peer makes the process hold: unfinished frames
and deliveries, attaches, answers that the peer does not read, requests, messages of open transactions. Bytes that are
freed before the next read of the socket are not recorded. Objects of a fixed size for each connection are not recorded
either, because `max_connections` limits their number.

Two pools bound the bytes: one for connections that have not authenticated, one for all connections. When a pool is
exhausted, the connection that holds the most bytes of this pool is closed. So a connection that holds few bytes is not
closed because of other connections. When there are too many connections, the oldest connection that has not
authenticated is closed.

All namespaces of a process share one `Resources` object. It is used on one event loop and takes no locks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

from twinbus.amqp import KIB, MIB, LimitExceededError
from twinbus.errors import OperatorError

_log = logging.getLogger(__name__)

DEFAULT_CONNECTIONS: Final = 10_000
DEFAULT_MEGABYTES: Final = 512
LEAST_MEGABYTES: Final = 64
_LOG_EVERY_SECONDS: Final = 10.0
# Advice to the peer in the error text, for kinds of memory that need other advice than the default.
_ADVICE: Final = {"unsent bytes": "Read what the server sends, or grant less credit."}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Limits of the process and of each connection. Sizes are in bytes."""

    max_connections: int = DEFAULT_CONNECTIONS
    memory: int = DEFAULT_MEGABYTES * MIB
    unauthenticated_memory: int = DEFAULT_MEGABYTES * MIB // 32
    connection_memory: int = 64 * MIB
    unauthenticated_connection_memory: int = 256 * KIB
    http_connection_memory: int = 4 * MIB
    authentication_seconds: float = 60.0

    @classmethod
    def of(cls, *, max_connections: int, megabytes: int) -> ResourceLimits:
        """Return limits for this number of connections and this memory. The other limits are shares of the memory."""
        if max_connections < 1:
            raise OperatorError(f"--max-connections {max_connections} is out of range", "Give at least 1.")
        if megabytes < LEAST_MEGABYTES:
            raise OperatorError(
                f"--connection-memory {megabytes} is out of range", f"Give at least {LEAST_MEGABYTES} (megabytes)."
            )
        memory = megabytes * MIB
        return cls(
            max_connections=max_connections,
            memory=memory,
            unauthenticated_memory=memory // 32,
            connection_memory=memory // 8,
        )


def _ignore(_: LimitExceededError) -> None:
    """Do nothing: the connection is closed already."""


class ConnectionAccount:
    """The memory that one connection makes the process hold, by kind."""

    __slots__ = ("_evict", "_kinds", "_limit", "_resources", "held", "is_authenticated", "is_open")

    def __init__(self, resources: Resources, limit: int, evict: Callable[[LimitExceededError], None]) -> None:
        self._resources = resources
        self._limit = limit
        self._evict = evict
        self._kinds: dict[str, int] = {}
        self.held = 0
        self.is_authenticated = False
        self.is_open = True

    def hold(self, kind: str, size: int) -> None:
        """Record that the connection now makes the process hold `size` bytes of this kind.

        This call may evict this connection or another one: it then calls the `evict` function of that connection before
        it returns. `evict` must only schedule the closing of the connection.
        """
        change = size - self._kinds.get(kind, 0)
        if not change or not self.is_open:
            return
        self._kinds[kind] = size
        self.held += change
        self._resources.changed(self, change)
        if self.held > self._limit and self.is_open:
            until = "" if self.is_authenticated else " until a token was accepted"
            largest = self.largest_kind
            advice = _ADVICE.get(largest, "Read the answers, and finish each message before the next.")
            text = (
                f"A connection may make the server hold {self._limit} bytes{until}; this one made it hold {self.held}, "
                f"most of them as {largest}. {advice}"
            )
            self.evict(LimitExceededError("connection-memory", text))

    def set_limit(self, limit: int) -> None:
        self._limit = limit

    def authenticate(self, *, keep_limit: bool = False) -> None:
        """Count the connection as authenticated from now on. Raises its memory limit, unless `keep_limit` is True."""
        if not self.is_open:
            return
        if not self.is_authenticated:
            self._resources.authenticated(self)
        if not keep_limit:
            self._limit = self._resources.limits.connection_memory

    def close(self) -> None:
        """Remove all bytes of the connection from the sums. A second call does nothing."""
        if self.is_open:
            self.is_open = False
            self._resources.closed(self)
            self._evict = _ignore  # breaks the reference cycle of account and connection

    def evict(self, exceeded: LimitExceededError) -> None:
        """Close the account, and call the `evict` function, which closes the connection."""
        evict = self._evict
        self.close()
        evict(exceeded)

    @property
    def largest_kind(self) -> str:
        return max(self._kinds, key=self._kinds.__getitem__, default="nothing")


class Resources:
    """The accounts of all connections of the process, and the number of refusals by limit."""

    def __init__(self, limits: ResourceLimits | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or ResourceLimits()
        self.held = 0
        self.unauthenticated_held = 0
        self.closed_connections = 0
        self.refused: Counter[str] = Counter()
        self._monotonic = monotonic
        # Both dicts are in the order in which the connections were opened or authenticated.
        self._authenticated: dict[ConnectionAccount, None] = {}
        self._unauthenticated: dict[ConnectionAccount, None] = {}
        self._logged: dict[str, tuple[float, int]] = {}

    @property
    def connections(self) -> int:
        return len(self._authenticated) + len(self._unauthenticated)

    @property
    def unauthenticated_connections(self) -> int:
        return len(self._unauthenticated)

    def make_room(self) -> LimitExceededError | None:
        """Make room for one more connection: evict the oldest connection without a token if there are too many.

        Returns the error for the new connection if no connection can be evicted.
        """
        most = self.limits.max_connections
        if self.connections < most:
            return None
        text = f"This server takes {most} connections at a time."
        oldest = next(iter(self._unauthenticated), None)
        if oldest is None:
            return LimitExceededError(
                "connections", f"{text} Close connections that are not needed, or raise --max-connections."
            )
        oldest.evict(
            LimitExceededError(
                "connections", f"{text} This was the oldest one without an accepted token. Connect again."
            )
        )
        return None

    def open(self, evict: Callable[[LimitExceededError], None]) -> ConnectionAccount:
        """Return an account for a new connection."""
        account = ConnectionAccount(self, self.limits.unauthenticated_connection_memory, evict)
        self._unauthenticated[account] = None
        return account

    def refuse(self, exceeded: LimitExceededError, namespace: str, *, log: bool = True) -> None:
        """Count a refusal, and log it. For each limit, at most one refusal in 10 seconds is logged."""
        self.refused[exceeded.limit] += 1
        if not log:
            return
        now = self._monotonic()
        logged_at, suppressed = self._logged.get(exceeded.limit, (-_LOG_EVERY_SECONDS, 0))
        if now - logged_at < _LOG_EVERY_SECONDS:
            self._logged[exceeded.limit] = (logged_at, suppressed + 1)
            return
        self._logged[exceeded.limit] = (now, 0)
        more = {"not_logged": suppressed} if suppressed else {}
        _log.warning(
            "limit exceeded: %s", exceeded.description, extra={"namespace": namespace, "limit": exceeded.limit, **more}
        )

    # --- for the accounts ----------------------------------------------------------------------------------------

    def changed(self, account: ConnectionAccount, change: int) -> None:
        self.held += change
        if not account.is_authenticated:
            self.unauthenticated_held += change
        if change < 0:
            return
        limits = self.limits
        while self.unauthenticated_held > limits.unauthenticated_memory:
            self._evict_largest(
                self._unauthenticated,
                "unauthenticated-memory",
                f"Connections without an accepted token may hold {limits.unauthenticated_memory} bytes together",
            )
        while self.held > limits.memory:
            self._evict_largest(
                chain(self._authenticated, self._unauthenticated),
                "memory",
                f"All connections of this server may hold {limits.memory} bytes together",
            )

    def authenticated(self, account: ConnectionAccount) -> None:
        account.is_authenticated = True
        del self._unauthenticated[account]
        self._authenticated[account] = None
        self.unauthenticated_held -= account.held

    def closed(self, account: ConnectionAccount) -> None:
        self.closed_connections += 1
        self.held -= account.held
        if account.is_authenticated:
            del self._authenticated[account]
        else:
            del self._unauthenticated[account]
            self.unauthenticated_held -= account.held

    def _evict_largest(self, accounts: Iterable[ConnectionAccount], limit: str, text: str) -> None:
        largest = max(accounts, key=lambda account: account.held)
        held = f"this one held most of them, {largest.held}, chiefly as {largest.largest_kind}"
        largest.evict(LimitExceededError(limit, f"{text}; {held}. Try again later."))
