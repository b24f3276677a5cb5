"""A namespace at work without a front: driver, engine and a store in memory, at one fixed instant."""

from typing import TypeVar

from twinbus.namespace.engine.descriptions import Description, EntityInfo
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.runtime import Driver, LockTokens
from twinbus.namespace.store.memory import MemoryStore

BORN = 1_700_000_000_000

SomeDriver = TypeVar("SomeDriver", bound=Driver)


class StoppedClock:
    """It is always the same instant."""

    def now(self) -> int:
        return BORN


def _fail(error: Exception) -> None:
    raise error


async def at_work(kind: type[SomeDriver], *descriptions: Description) -> SomeDriver:
    """A driver of this kind with these entities, on the running loop."""
    driver = kind(MemoryStore(), StoppedClock(), OperationMeter(), new_token=LockTokens(), failed=_fail)
    for description in descriptions:
        assert isinstance(await driver.create(description), EntityInfo)
    return driver
