"""The two sides of a pair, open, closed or faulted (C1), and which namespaces are paired in this process (P3).

What a side lets go of when it closes is the driver's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, TypeVar

from twinbus.backlog import Endpoint
from twinbus.errors import CallerError, OperatorError

T = TypeVar("T")

OTHER_SIDE_SECONDS: Final = 5.0
"""How long one side may stay open after the other closed or faulted, where the syphon runs (C2)."""

REFUSED_FOR_GOOD_SECONDS: Final = 600.0
"""How long every backlog queue must have refused the secondary's credential until that is for good (C1).

Long enough for a right that was just granted to take effect, and for a key to be changed.
"""


class SideState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    FAULTED = "faulted"


class PairClosedError(CallerError):
    """The pair, or the side of it that is needed, was closed (C3)."""

    def __init__(self, side: str) -> None:
        super().__init__(f"the {side} of this pair is closed; pair the namespaces again")
        self.side = side


class PairFaultedError(OperatorError):
    """A side of the pair faulted (C1); `cause` says why."""

    def __init__(self, side: str, cause: BaseException) -> None:
        super().__init__(f"the {side} of this pair faulted: {cause}", "Mend the cause and pair the namespaces again.")
        self.side = side
        self.cause = cause
        self.__cause__ = cause


class OtherSideLostError(OperatorError):
    """What the syphon faults the side with that stayed open alone (C2)."""

    def __init__(self, lost: str, state: SideState) -> None:
        super().__init__(f"the {lost} is {state}, and this side was still open {OTHER_SIDE_SECONDS:g} s later")
        self.lost = lost


class CredentialRefusedError(OperatorError):
    """What the secondary faults with when its credential is refused for good (C1)."""

    def __init__(self, refusal: BaseException) -> None:
        super().__init__(
            f"every backlog queue has refused the credential for {REFUSED_FOR_GOOD_SECONDS:g} s: {refusal}",
            "Mend the credential or its rights.",
        )
        self.__cause__ = refusal


class ClientLostError(OperatorError):
    """What a side faults with whose client cannot be recovered (C1)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"its client makes no sender any more: {type(error).__name__}: {error}",
            "Make a new ServiceBusClient.",
        )
        self.__cause__ = error


class PairForkedError(CallerError):
    """The pair was made by the parent of this process: its connections are the parent's (S13)."""

    def __init__(self) -> None:
        super().__init__("this pair belongs to the parent process; pair the namespaces again after the fork")


class PairLoopError(CallerError):
    """The pair was first used in another event loop, where its timers and connections are (S12, S13)."""

    def __init__(self) -> None:
        super().__init__("this pair belongs to another event loop; make one pair for each loop")


class NotPairedError(CallerError):
    """The call needs the backlog, and the namespaces are not paired yet (P1)."""

    def __init__(self) -> None:
        super().__init__("the namespaces are not paired yet: `await pair`, enter the pair or send a message first")


class PairingRefusedError(CallerError, ValueError):
    """These two namespaces cannot be paired (P3)."""


class Side:
    """`on_change` is called once, when it leaves OPEN."""

    def __init__(self, name: str, endpoint: Endpoint, on_change: Callable[[Side], None]) -> None:
        self.name = name
        self.endpoint = endpoint
        self.state = SideState.OPEN
        self.cause: BaseException | None = None
        self._on_change = on_change
        self._changing = threading.Lock()

    def refusal(self) -> Exception:
        """What a send is refused with (C3). Of a side that is not open."""
        if isinstance(self.cause, PairForkedError):
            return PairForkedError()
        return PairClosedError(self.name) if self.cause is None else PairFaultedError(self.name, self.cause)

    def refuse_unless_open(self) -> None:
        """Raises `refusal()` where the side is closed or faulted."""
        if self.state is not SideState.OPEN:
            raise self.refusal()

    def leave(self, state: SideState, cause: BaseException | None = None) -> bool:
        with self._changing:
            if self.state is not SideState.OPEN:
                return False
            self.cause = cause
            self.state = state
        self._on_change(self)
        return True

    def made(self, make: Callable[[], T]) -> T:
        """A sender that its client has made before, made again. Nobody is asked for that: where it fails, the client is
        at its end, and so is the side (C1)."""
        try:
            return make()
        except Exception as error:
            self.leave(SideState.FAULTED, ClientLostError(error))
            raise self.refusal() from error

    def forked(self) -> None:
        """In the child of a fork: no lock is taken, nothing is told, nothing is let go of."""
        self.cause = PairForkedError()
        self.state = SideState.FAULTED


class CredentialRefusals:
    """Whether the secondary's credential is refused for good (C1).

    It is when every backlog queue in use has answered nothing but that, each over REFUSED_FOR_GOOD_SECONDS from its
    first refusal to its last. The primary has no such rule: there a refusal is the entity's, and sends divert (G4).
    """

    def __init__(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}

    def refused(self, queue: str, queues: Iterable[str], now: float) -> bool:
        """`queues` are all those in use."""
        first, _ = self._spans.get(queue, (now, now))
        self._spans[queue] = (first, now)
        spans = [self._spans.get(one) for one in queues]
        return all(span is not None and span[1] - span[0] >= REFUSED_FOR_GOOD_SECONDS for span in spans)

    def forget(self, queue: str) -> None:
        """It took a message, or failed in another way."""
        self._spans.pop(queue, None)


# --- which namespaces are paired here (P3) ---------------------------------------------------------------------------

_registry: set[tuple[Endpoint, Endpoint]] = set()
_registering = threading.Lock()


def register(primary: Endpoint, secondary: Endpoint) -> None:
    """PairingRefusedError where P3 forbids it."""
    if primary == secondary:
        raise PairingRefusedError(f"{_name(primary)} cannot be its own secondary")
    with _registering:
        if any(primary == paired for paired, _ in _registry):
            raise PairingRefusedError(f"{_name(primary)} is the primary of a pair already: use that pair, or close it")
        if any(secondary == paired for paired, _ in _registry):
            raise PairingRefusedError(f"{_name(secondary)} is itself the primary of a pair: it cannot be a secondary")
        if any(primary == backing for _, backing in _registry):
            raise PairingRefusedError(f"{_name(primary)} is the secondary of a pair: it cannot be paired itself")
        _registry.add((primary, secondary))


def release(primary: Endpoint, secondary: Endpoint) -> None:
    with _registering:
        _registry.discard((primary, secondary))


def forget_all() -> None:
    """In the child of a fork: pairs are the parent's."""
    global _registering  # noqa: PLW0603 - its holder may not exist here
    _registering = threading.Lock()
    _registry.clear()


def _name(endpoint: Endpoint) -> str:
    return f"{endpoint.host}:{endpoint.port}"
