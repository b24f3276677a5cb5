"""The two sides of a pair, open, closed or faulted (C1), and the errors of a pair that is not open.

A side leaves the state OPEN at most once, and never returns to it. The driver ends the links and timers of the side.
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
"""Seconds that one side may stay open after the other side closed or faulted, while the syphon runs (C2)."""

REFUSED_FOR_GOOD_SECONDS: Final = 600.0
"""Seconds for which every backlog queue must refuse the secondary's credential before the secondary faults (C1).

In this time a newly granted right takes effect, and an operator can replace a key.
"""


class SideState(StrEnum):
    """The states of a side. A side that left `OPEN` never returns to it.

    Example: `pair.primary.state is SideState.OPEN`.
    """

    OPEN = "open"
    CLOSED = "closed"
    FAULTED = "faulted"


# --- errors ----------------------------------------------------------------------------------------------------------


class PairClosedError(CallerError):
    """The pair, or the side of it that the call needs, was closed.

    Example: `except PairClosedError as error: print(error.side)`.
    """

    def __init__(self, side: str) -> None:
        super().__init__(f"the {side} of this pair is closed; pair the namespaces again")
        self.side = side


class PairFaultedError(OperatorError):
    """A side of the pair faulted. `cause` is the reason.

    Example: `except PairFaultedError as error: print(error.side, error.cause)`.
    """

    def __init__(self, side: str, cause: BaseException) -> None:
        super().__init__(f"the {side} of this pair faulted: {cause}", "Mend the cause and pair the namespaces again.")
        self.side = side
        self.cause = cause
        self.__cause__ = cause


class OtherSideLostError(OperatorError):
    """The reason why a side faults after the other side closed or faulted (C2). `lost` is the other side's name."""

    def __init__(self, lost: str, state: SideState) -> None:
        super().__init__(f"the {lost} is {state}, and this side was still open {OTHER_SIDE_SECONDS:g} s later")
        self.lost = lost


class CredentialRefusedError(OperatorError):
    """The reason why the secondary faults if its credential was refused for REFUSED_FOR_GOOD_SECONDS (C1)."""

    def __init__(self, refusal: BaseException) -> None:
        super().__init__(
            f"every backlog queue has refused the credential for {REFUSED_FOR_GOOD_SECONDS:g} s: {refusal}",
            "Mend the credential or its rights.",
        )
        self.__cause__ = refusal


class ClientLostError(OperatorError):
    """The reason why a side faults when its client fails to make a sender (C1)."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"its client makes no sender any more: {type(error).__name__}: {error}",
            "Make a new ServiceBusClient.",
        )
        self.__cause__ = error


class PairForkedError(CallerError):
    """The parent of this process made the pair: the pair's connections belong to the parent.

    Example: `except PairForkedError: pair = pair_connection_strings(primary, secondary)`.
    """

    def __init__(self) -> None:
        super().__init__("this pair belongs to the parent process; pair the namespaces again after the fork")


class PairLoopError(CallerError):
    """The pair was first used in another event loop, which has the pair's timers and connections.

    Example: make the pair inside `asyncio.run(main())`, not before it in another loop.
    """

    def __init__(self) -> None:
        super().__init__("this pair belongs to another event loop; make one pair for each loop")


class NotPairedError(CallerError):
    """The call needs the backlog, and the namespaces are not paired yet.

    Example: `await pair`, then `pair.force_failover("orders")`.
    """

    def __init__(self) -> None:
        super().__init__("the namespaces are not paired yet: `await pair`, enter the pair or send a message first")


class PairingRefusedError(CallerError, ValueError):
    """These two namespaces cannot be paired.

    Example: `pair_connection_strings(primary, primary)` raises it.
    """


# --- sides -----------------------------------------------------------------------------------------------------------


class Side:
    """One side of a pair. `on_change` is called once, when the side leaves the state OPEN."""

    def __init__(self, name: str, endpoint: Endpoint, on_change: Callable[[Side], None]) -> None:
        self.name = name
        self.endpoint = endpoint
        self.state = SideState.OPEN
        self.cause: BaseException | None = None
        self._on_change = on_change
        self._changing = threading.Lock()

    def refusal(self) -> Exception:
        """Return the error of a call that needs this side, which is not open (C3)."""
        if isinstance(self.cause, PairForkedError):
            return PairForkedError()
        return PairClosedError(self.name) if self.cause is None else PairFaultedError(self.name, self.cause)

    def refuse_unless_open(self) -> None:
        """Raise the error that `refusal` returns, if the side is closed or faulted."""
        if self.state is not SideState.OPEN:
            raise self.refusal()

    def leave(self, state: SideState, cause: BaseException | None = None) -> bool:
        """Close or fault the side. Returns whether this call changed it."""
        with self._changing:
            if self.state is not SideState.OPEN:
                return False
            self.cause = cause
            self.state = state
        self._on_change(self)
        return True

    def remake(self, make: Callable[[], T]) -> T:
        """Return the sender that `make` makes, in place of an earlier sender. Faults the side if `make` fails.

        Making a sender needs no namespace. If `make` fails, the client cannot be used any more (C1).
        """
        try:
            return make()
        except Exception as error:
            self.leave(SideState.FAULTED, ClientLostError(error))
            raise self.refusal() from error

    def forked(self) -> None:
        """Fault the side in the child of a fork, without a lock and without calling `on_change`."""
        self.cause = PairForkedError()
        self.state = SideState.FAULTED


class SideView:
    """What `pair.primary` and `pair.secondary` show of a side, for both drivers (C1)."""

    def __init__(self, side: Side) -> None:
        self._side = side

    @property
    def state(self) -> SideState:
        """Whether the side is open, closed or faulted.

        Example: `pair.secondary.state is SideState.OPEN`.
        """
        return self._side.state

    @property
    def cause(self) -> BaseException | None:
        """Why the side faulted.

        Example: `print(pair.secondary.cause)`.
        """
        return self._side.cause


class CredentialRefusals:
    """Finds out whether the secondary's credential is refused for good (C1).

    A credential is refused for good if every backlog queue in use has answered only with refusals, and at least
    REFUSED_FOR_GOOD_SECONDS lie between the first and the last refusal of each queue. The primary has no such rule: a
    refusal there concerns one entity, and the messages for this entity are diverted (G4).
    """

    def __init__(self) -> None:
        self.spans: dict[str, tuple[float, float]] = {}
        """Time of the first and the last refusal, by queue."""

    def refused(self, queue: str, queues: Iterable[str], now: float) -> bool:
        """Report a refusal by `queue`. Returns whether the credential is refused for good. `queues` are all in use."""
        first, _ = self.spans.get(queue, (now, now))
        self.spans[queue] = (first, now)
        spans = [self.spans.get(one) for one in queues]
        return all(span is not None and span[1] - span[0] >= REFUSED_FOR_GOOD_SECONDS for span in spans)

    def forget(self, queue: str) -> None:
        """Report that a queue accepted a message, or failed for another reason than a refusal."""
        self.spans.pop(queue, None)
