"""The times of a connection (amqp-core-transport §2.4.5): heartbeats to the peer, silence of the peer, slow peers.

Time arrives as an argument; nothing here reads a clock or writes a frame.
"""

from twinbus.amqp.errors import AmqpError
from twinbus.amqp.limits import LimitExceededError, Limits
from twinbus.values import Condition


class Timers:
    def __init__(self, local_idle_ms: int | None, limits: Limits) -> None:
        # §2.4.5: what the peer is told should be half of when we give up.
        self._patience = None if local_idle_ms is None else 2 * local_idle_ms / 1000
        self._limits = limits
        self._now = 0.0
        self._handshake_until: float | None = None
        self._authentication_until: float | None = None
        self._opened = False
        self._closing_until: float | None = None
        self._heard: float | None = None
        self._beat_every: float | None = None
        self._next_beat: float | None = None

    def heard(self, now: float) -> None:
        if self._heard is None and not self._opened:
            self._handshake_until = now + self._limits.handshake_seconds
            if self._limits.authentication_seconds is not None:
                self._authentication_until = now + self._limits.authentication_seconds
        self._now = self._heard = now

    def opened(self, remote_idle_ms: int | None) -> None:
        self._opened = True
        self._handshake_until = None
        if remote_idle_ms:
            if remote_idle_ms / 1000 < self._limits.shortest_idle_seconds:
                raise AmqpError(Condition.NOT_ALLOWED, f"an idle-time-out of {remote_idle_ms} ms is too short")
            self._beat_every = remote_idle_ms / 2000
            self._next_beat = self._now + self._beat_every

    def authenticated(self, limits: Limits) -> None:
        self._limits = limits
        self._authentication_until = None

    def closing(self) -> None:
        self._closing_until = self._now + self._limits.closing_seconds
        self._next_beat = None

    def next(self) -> float | None:
        times = (
            self._handshake_until,
            self._authentication_until,
            self._closing_until,
            self._silence_ends(),
            self._next_beat,
        )
        return min((time for time in times if time is not None), default=None)

    def _silence_ends(self) -> float | None:
        if self._patience is None or self._heard is None or not self._opened:
            return None
        return self._heard + self._patience

    def expired(self, now: float) -> AmqpError | None:
        """Why the connection must end now, if it must."""
        self._now = max(self._now, now)
        if self._handshake_until is not None and now >= self._handshake_until:
            seconds = self._limits.handshake_seconds
            return LimitExceededError(
                "handshake-seconds", f"The connection was not opened within {seconds:g} s. Connect again and send open."
            )
        if self._closing_until is None and self._authentication_until is not None and now >= self._authentication_until:
            seconds = self._limits.authentication_seconds or 0.0
            return LimitExceededError(
                "authentication-seconds",
                f"No token was accepted on this connection within {seconds:g} s. Connect again and put a valid token "
                "on $cbs.",
                Condition.CONNECTION_FORCED,
            )
        if self._closing_until is not None and now >= self._closing_until:
            return AmqpError(Condition.CONNECTION_FORCED, "the peer did not answer close in time")
        silence_ends = self._silence_ends()
        if silence_ends is not None and now >= silence_ends:
            return AmqpError(Condition.RESOURCE_LIMIT_EXCEEDED, "the peer was silent for longer than the idle-time-out")
        return None

    def heartbeat_due(self, now: float) -> bool:
        if self._next_beat is None or self._beat_every is None or now < self._next_beat:
            return False
        self._next_beat = now + self._beat_every
        return True
