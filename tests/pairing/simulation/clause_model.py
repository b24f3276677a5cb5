"""The state that the clauses demand, computed from what happened, without any part of the product."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinbus.backlog import FailureKind

K = FailureKind
TRY_TIMEOUT = 4.0
LONGEST_IN_BACKLOG = 60.0
"""The least time in the backlog, in seconds, for a call without a timeout."""
# The first list of S2, with the words of the specification.
FIRST_LIST = {K.TIMEOUT, K.CONNECTION_LOST, K.DETACHED, K.INTERNAL, K.ENTITY_DISABLED, K.QUOTA_EXCEEDED}
REFUSED = {K.ENTITY_NOT_FOUND, K.UNAUTHORIZED}
CALLERS_FAULT = {K.MESSAGE_TOO_LARGE, K.CLOSED}
NEVER_EVICT = {K.SERVER_BUSY, *CALLERS_FAULT}
SLACK = 1e-5
PROBE_SECONDS = 1.0
"""S6: at most one probe a second."""


class ViolationError(BaseException):
    """A clause is violated. Not an Exception, so that the product cannot catch it as the failure of a call."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The options of a world."""

    failover_interval: float
    ping_interval: float
    ping_jitter: float
    probation: float
    raise_while_unusable: bool
    counting: frozenset[FailureKind]
    lateness: float
    """How late the driver's timers are, at most."""


@dataclass(slots=True)
class EntityModel:
    """The state of one entity of one pair that the clauses demand."""

    rules: Rules
    armed: float | None = None
    over: bool = False
    unusable: bool = False
    last_ping: float = 0.0
    pinging: bool = False
    failovers: int = 0
    restores: int = 0
    trial: bool = False
    held: bool = False
    failed_trials: int = 0
    diverted: int = 0
    closed: bool = False

    @property
    def mode(self) -> str:
        if self.closed:
            return "closed"
        if self.held:
            return "held"
        if self.over:
            return "unusable" if self.unusable else "failed_over"
        if self.trial:
            return "on_trial"
        return "healthy" if self.armed is None else "failing"

    @property
    def ping_interval(self) -> float:
        """Doubled by each trial that failed since one ended well (S14). No world lasts 30 minutes."""
        return self.rules.ping_interval * 2.0**self.failed_trials

    def sent(self, restores: int, *, with_message: bool) -> None:
        """`restores`: how many there had been when the call began."""
        if not self.over:
            self.armed = None
            if self.trial and with_message and restores == self.restores:
                self.trial, self.failed_trials = False, 0

    def failed(self, kind: FailureKind, now: float, restores: int, *, with_message: bool) -> bool:
        """Report a failed call. Returns whether the call is diverted instead of failing (S4, S5, S14)."""
        if not self.over and not self.closed and kind in self.rules.counting:
            if restores < self.restores:
                return True
            if self.trial:
                if with_message:
                    self.failed_trials += 1
                    self.engage(now)
                return True
            if self.armed is None:
                self.armed = now
            if now >= self.armed + self.rules.failover_interval:
                self.engage(now)
        return self.over and kind not in CALLERS_FAULT

    def hold(self, now: float) -> None:
        if not self.over:
            self.engage(now)
        self.held, self.unusable, self.pinging = True, False, False

    def close(self) -> None:
        self.held = False
        self.armed, self.over, self.unusable, self.pinging, self.trial = None, False, False, False, False
        self.closed = True

    def timer(self, now: float) -> None:
        if self.armed is not None and now >= self.armed + self.rules.failover_interval:
            self.engage(now)

    def engage(self, now: float) -> None:
        self.armed, self.over, self.unusable, self.trial = None, True, False, False
        self.last_ping, self.pinging = now, False
        self.failovers += 1
        self.diverted = 0

    def restore(self) -> None:
        self.held = False
        if self.over:
            self.restores += 1
            self.trial = True
        self.armed, self.over, self.unusable, self.pinging = None, False, False, False

    def ping(self, now: float) -> None:
        if not self.over or self.held:
            raise ViolationError("a ping to an entity that is not failed over, or is held")
        if self.pinging:
            raise ViolationError("two pings at once")
        if now < self.last_ping + self.ping_interval - SLACK:
            raise ViolationError(f"a ping at {now}, the last at {self.last_ping}")
        self.last_ping, self.pinging = now, True

    def pinged(self, failover: int, kind: FailureKind | None) -> None:
        if failover != self.failovers or not self.pinging:
            return
        self.pinging = False
        if kind is None:
            self.restore()
        elif kind in REFUSED:
            self.unusable = True

    def check(self, now: float, mode: str, diverted: int) -> None:
        if mode != self.mode:
            raise ViolationError(f"{mode}, but {self.mode} by the clauses")
        if diverted != self.diverted:
            raise ViolationError(f"{diverted} messages are counted as diverted, {self.diverted} were")
        if self.armed is not None and now > self.armed + self.rules.failover_interval + self.rules.lateness + SLACK:
            raise ViolationError("the failover timer did not fire")
        longest = self.ping_interval * (1 + self.rules.ping_jitter) + self.rules.lateness
        if (
            self.over
            and not self.held
            and now > self.last_ping + max(longest, TRY_TIMEOUT + self.rules.lateness) + SLACK
        ):
            raise ViolationError("no ping came")


@dataclass(slots=True)
class BacklogModel:
    """The state of the backlog queues of one pair that the clauses demand."""

    rules: Rules
    queues: tuple[str, ...]
    away: dict[str, float] = field(default_factory=dict)
    """Until when each queue is on probation; the one that is to be probed first stands first."""
    places: dict[str, str] = field(default_factory=dict)
    """The queue of each sender."""
    closed: bool = False
    answers: int = 0
    """The number of answers to sends of messages."""
    diverted: int = 0
    probing: bool = False
    next_probe: float = 0.0
    failed_probes: int = 0

    def usable(self) -> tuple[str, ...]:
        return tuple([queue for queue in self.queues if queue not in self.away]) if self.away else self.queues

    def choices(self, sender: str, tried: set[str]) -> tuple[str, ...]:
        """Return the queues that a sender may use now: its own if it is usable, otherwise any that it has not tried."""
        free = tuple([queue for queue in self.usable() if queue not in tried])
        own = self.places.get(sender)
        return (own,) if own in free else free

    def failed(self, queue: str, kind: FailureKind, now: float) -> bool:
        """Report a failed send. Returns whether another queue is tried."""
        if kind in NEVER_EVICT:
            return False
        self.away.setdefault(queue, now + self.rules.probation)
        return True

    def probe_begins(self, now: float) -> None:
        if self.probing or now < self.next_probe:
            raise ViolationError("two probes at once, or within a second")
        self.probing, self.next_probe = True, now + PROBE_SECONDS

    def probe_failed(self, queue: str, kind: FailureKind, now: float) -> bool:
        """Whether that says anything about the queue."""
        self.probing = False
        if kind in NEVER_EVICT:
            return False
        self.failed_probes += 1
        self.away[queue] = self.away.pop(queue, now + self.rules.probation)
        return True

    def probe_succeeded(self, queue: str) -> None:
        self.probing = False
        self.away.pop(queue, None)

    def ended(self, now: float) -> None:
        self.away = {queue: until for queue, until in self.away.items() if until > now}

    def check(self, now: float, usable: tuple[str, ...]) -> None:
        if usable != self.usable():
            raise ViolationError(f"the rotation is {usable}, but {self.usable()} by the clauses")
        if self.away and not self.closed and now > min(self.away.values()) + self.rules.lateness + SLACK:
            raise ViolationError("a probation did not end")
