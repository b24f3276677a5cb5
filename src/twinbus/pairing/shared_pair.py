"""What the pairs of the same two namespaces in one process share (P3): entities, backlog queues, pings and ledger.

A program may make several clients of one namespace, and pair each of them. All these pairs are *members* of one
`SharedPair`, so that one failover, one ping and one ledger serve all of them. Each member keeps its own clients,
credentials, links and senders.

One member is the *acting* one: its driver runs the timers and the pings. If the acting member closes or faults, another
member takes over. The last member closes what is shared.

Only sync pairs share: the timers of an asyncio pair belong to one event loop.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from twinbus.backlog import Endpoint
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import PairingRefusedError
from twinbus.pairing.recording import open_ledger
from twinbus.pairing.shared_state import PairDriver, SharedEntity, SharedRotation

if TYPE_CHECKING:
    from twinbus.pairing.pair_state import PairState

_registry: Final[dict[tuple[Endpoint, Endpoint], SharedPair]] = {}
_registering = threading.Lock()


class SharedPair:
    """The shared part of pairs. `joinable` says whether other pairs with equal options may become members."""

    def __init__(
        self, options: SendAvailabilityOptions, queues: tuple[str, ...], driver: PairDriver, *, joinable: bool
    ) -> None:
        self.options = options
        self.joinable = joinable
        self.ledger = open_ledger(options)
        """The ledger of the pairs and of their syphons, or None."""
        self.entities: dict[str, SharedEntity] = {}
        self.hold_all = False
        self.making = threading.Lock()
        self.driver = driver
        """The driver of the acting member, for new entities."""
        self.rotation = SharedRotation(queues, options.probation.total_seconds(), driver)
        self.members: list[PairState] = []
        self.is_closed = False

    def has_others(self, member: PairState) -> bool:
        return any(one is not member for one in list(self.members))

    def leave(self, member: PairState) -> list[PairState]:
        """Remove a member that closed or faulted. Returns the others. If `member` was acting, one of them acts now."""
        with _registering:
            if member in self.members:
                self.members.remove(member)
            others = list(self.members)
        if others and self.driver is member.driver:
            self.driver = others[0].driver
            for entity in list(self.entities.values()):
                entity.rebind(self.driver)
            self.rotation.rebind(self.driver)
            others[0].show_in_metrics()
        return others


def shared_pair(
    primary: Endpoint,
    secondary: Endpoint,
    options: SendAvailabilityOptions,
    queues: tuple[str, ...],
    driver: PairDriver,
    *,
    joinable: bool,
) -> SharedPair:
    """Return the part that a new pair shares with a pair of the same namespaces, or a new one."""
    with _registering:
        found = _registry.get((primary, secondary))
    if found is not None and found.joinable and joinable and found.options == options:
        return found
    return SharedPair(options, queues, driver, joinable=joinable)


def register(primary: Endpoint, secondary: Endpoint, shared: SharedPair, member: PairState) -> None:
    """Make a pair a member of `shared`. Raises PairingRefusedError if P3 forbids it."""
    if primary == secondary:
        raise PairingRefusedError(f"{primary} cannot be its own secondary")
    with _registering:
        if _registry.get((primary, secondary)) is not shared:
            _refuse(primary, secondary, shared)
            _registry[primary, secondary] = shared
        shared.members.append(member)


def _refuse(primary: Endpoint, secondary: Endpoint, shared: SharedPair) -> None:
    if (found := _registry.get((primary, secondary))) is not None and found.joinable and shared.joinable:
        raise PairingRefusedError(
            f"{primary} is paired with {secondary} already, with other options: use that pair, use equal options, or "
            "close it"
        )
    if any(primary == paired for paired, _ in _registry):
        raise PairingRefusedError(f"{primary} is the primary of a pair already: use that pair, or close it")
    if any(secondary == paired for paired, _ in _registry):
        raise PairingRefusedError(f"{secondary} is itself the primary of a pair: it cannot be a secondary")
    if any(primary == backing for _, backing in _registry):
        raise PairingRefusedError(f"{primary} is the secondary of a pair: it cannot be paired itself")
    if shared.is_closed:
        raise PairingRefusedError(f"the pair of {primary} was closed just now: pair the namespaces again")


def release(primary: Endpoint, secondary: Endpoint, shared: SharedPair) -> None:
    """Remove the shared part if it has no member left."""
    with _registering:
        if not shared.members and _registry.get((primary, secondary)) is shared:
            del _registry[primary, secondary]


def forget_all() -> None:
    """Empty the registry in the child of a fork: the pairs belong to the parent."""
    global _registering  # noqa: PLW0603 - the thread that holds the copied lock does not exist here
    _registering = threading.Lock()
    _registry.clear()
