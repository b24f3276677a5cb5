"""A namespace without a network side: runtime, engine and a store in memory, on a clock that stands still."""

from typing import TypeVar

from twinbus.namespace.engine.descriptions import Description, EntityInfo
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.runtime import LockTokens, NamespaceRuntime
from twinbus.namespace.store import MemoryStore

BORN = 1_700_000_000_000

SomeRuntime = TypeVar("SomeRuntime", bound=NamespaceRuntime)


class StoppedClock:
    """Always returns the same instant."""

    def now(self) -> int:
        return BORN


def _fail(error: Exception) -> None:
    raise error


async def start_runtime(kind: type[SomeRuntime], *descriptions: Description) -> SomeRuntime:
    """Return a runtime of this class with these entities, on the running event loop."""
    runtime = kind(MemoryStore(), StoppedClock(), OperationMeter(), new_token=LockTokens(), failed=_fail)
    for description in descriptions:
        assert isinstance(await runtime.create(description), EntityInfo)
    return runtime
