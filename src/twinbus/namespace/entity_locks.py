"""Locks of root entities: the engine decides about one event of a root entity at a time.

A root entity is a queue, or a topic together with its subscriptions. A decision may pause to read rows from the store.
During the pause, the engine must not decide about other events of the same root entity, because these decisions would
see a half-made change. Decisions about other root entities continue. So every root entity has a lock, and the runtime
holds this lock during each decision.

    free --try_hold--> held --release--> the next waiting job runs with the lock held; or free, and `idle` is called

The jobs of a lock run in the order in which they were added. `try_hold` fails while jobs wait, so a new event cannot
run before the jobs that wait.

Some decisions change several root entities: a transaction, or a message that is forwarded from one queue to another.
Such a decision holds the locks of all its root entities (`hold_together`). The locks are always taken in the same
order, by the id of the root entity. A decision waits only for a lock with a higher id than all locks that it holds, so
there is no deadlock.

Two details limit the depth of the call stack. A job often releases its lock before the job returns. In this case
`release` only marks the lock as free, and the loop that called the job runs the next job. A job of `hold_together` that
had to wait for a lock continues in a later turn of the event loop: otherwise each job in a chain of waiting jobs would
run inside the job before it.

Each lock also records the commit group of the last write of a decision that held the lock. A read of the next decision
waits for that group, so a decision sees all writes of earlier decisions.

All functions of this module run on the event loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinbus.namespace.engine.registry import RootEntity


class EntityLock:
    """The lock of one root entity."""

    __slots__ = ("_idle", "_jobs", "_running_jobs", "group", "is_held", "root")

    def __init__(self, root: RootEntity, idle: Callable[[RootEntity], None]) -> None:
        """`idle` is called each time the lock was released and no job waits for the lock."""
        self.root = root
        self.is_held = False
        self.group = 0
        """The commit group of the last write of a decision that held this lock."""
        self._idle = idle
        self._jobs: deque[Callable[[], None]] = deque()
        self._running_jobs = False

    @property
    def locks(self) -> Sequence[EntityLock]:
        """A list with only this lock. The same property of `HeldTogether` has several locks."""
        return (self,)

    @property
    def is_idle(self) -> bool:
        """Whether the lock is free and no job waits for the lock."""
        return not (self.is_held or self._jobs)

    def try_hold(self) -> bool:
        """Hold the lock and return True if the lock is free and no job waits for it. Otherwise return False."""
        if self.is_held or self._jobs:
            return False
        self.is_held = True
        return True

    def add_job(self, job: Callable[[], None]) -> None:
        """Run `job` with the lock held, after all jobs that wait already.

        The job must release the lock, before it returns or in a later turn of the event loop.
        """
        self._jobs.append(job)
        if not self.is_held:
            self.run_jobs()

    def release(self) -> None:
        """Release the lock, and run the jobs that wait for the lock."""
        self.is_held = False
        self.run_jobs()

    def run_jobs(self) -> None:
        """Run waiting jobs until a job returns without releasing the lock, or no job is left."""
        if self._running_jobs:
            return  # a job called this method: the loop below continues when that job returns
        self._running_jobs = True
        try:
            while self._jobs and not self.is_held:
                self.is_held = True
                self._jobs.popleft()()
        finally:
            self._running_jobs = False
        if not self.is_held:
            self._idle(self.root)


class HeldTogether:
    """Several locks that are held for one decision. All writes of the decision are in one commit group."""

    __slots__ = ("group", "locks")

    def __init__(self, locks: Sequence[EntityLock]) -> None:
        self.locks = locks
        self.group = max(lock.group for lock in locks)

    @property
    def root(self) -> RootEntity:
        """The root entity of the first lock."""
        return self.locks[0].root

    def release(self) -> None:
        """Record the commit group in every lock, and release all locks."""
        for lock in self.locks:
            lock.group = max(lock.group, self.group)
        release_all(self.locks)


def hold_together(
    locks: Iterable[EntityLock],
    then: Callable[[HeldTogether], None],
    *,
    call_soon: Callable[[Callable[[], None]], object],
) -> None:
    """Call `then` with all locks held. If all locks are free, `then` runs before this function returns.

    Otherwise `then` runs when the last lock becomes free. `then` must make sure that the locks are released.
    `call_soon` runs its argument in a later turn of the event loop.
    """
    ordered = sorted(set(locks), key=lambda lock: lock.root.counters.queue)

    def hold_from(index: int) -> None:
        while index < len(ordered) and ordered[index].try_hold():
            index += 1
        if index < len(ordered):
            ordered[index].add_job(lambda: _ignore(call_soon(lambda: hold_from(index + 1))))
        else:
            then(HeldTogether(ordered))

    hold_from(0)


def release_all(locks: Sequence[EntityLock]) -> None:
    """Release locks that are held together. A job of any of these locks runs only after all of them are free."""
    for lock in locks:
        lock.is_held = False
    for lock in locks:
        if not lock.is_held:  # a job of another lock may hold this lock again
            lock.run_jobs()


def _ignore(_: object) -> None:
    """Drop the result of `call_soon`, because a job must return None."""
