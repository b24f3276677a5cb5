"""Locks of root entities: the engine decides about one event of a root entity at a time.

A root entity is a queue, or a topic together with its subscriptions. A decision may pause to read rows from the store.
While it is paused, other events of the same root entity must not be decided, because they would see a half-made change.
Events of other root entities go on. So every root entity has a lock, and the runtime holds it for each decision.

    free --try_hold--> held --release--> the next waiting job runs with the lock held; or free, and `idle` is called

The jobs of a lock run in the order in which they were added. `try_hold` fails while jobs wait, so a new event cannot
overtake them.

Some decisions change several root entities: a transaction, or a message that is forwarded from one queue to another.
They hold all locks (`hold_together`). The locks are always taken in the same order, by the id of the root entity. A
holder waits only for locks above those that it holds, so no circle of holders waits for each other.

Two details keep the call stack flat. A job often releases its lock before it returns; `release` then only marks the
lock free, and the loop that called the job runs the next one. A job of `hold_together` that got a lock after waiting
continues in a later turn of the event loop: otherwise each of a chain of holders would run inside the one before it.

Each lock also records the commit group of the last write that was made under it. A read under the lock waits for that
group, so a decision sees all writes of earlier decisions.

Everything here runs on the event loop's thread.
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
        """`idle` is called whenever the lock was released and no job waits for it."""
        self.root = root
        self.is_held = False
        self.group = 0
        """The commit group of the last write under this lock."""
        self._idle = idle
        self._jobs: deque[Callable[[], None]] = deque()
        self._running_jobs = False

    @property
    def locks(self) -> Sequence[EntityLock]:
        """The locks that are held: this one. `HeldTogether` has several."""
        return (self,)

    @property
    def is_idle(self) -> bool:
        """Whether the lock is free and no job waits for it."""
        return not (self.is_held or self._jobs)

    def try_hold(self) -> bool:
        """Hold the lock and return True, if it is free and no job waits for it."""
        if self.is_held or self._jobs:
            return False
        self.is_held = True
        return True

    def add_job(self, job: Callable[[], None]) -> None:
        """Run `job` with the lock held, after all jobs that wait already. The job must have the lock released."""
        self._jobs.append(job)
        if not self.is_held:
            self.run_jobs()

    def release(self) -> None:
        """Release the lock and run the jobs that wait for it."""
        self.is_held = False
        self.run_jobs()

    def run_jobs(self) -> None:
        """Run waiting jobs until one of them keeps the lock or none is left."""
        if self._running_jobs:
            return  # called by a job: the loop below goes on when that job returns
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
        """The first of the root entities."""
        return self.locks[0].root

    def release(self) -> None:
        """Record the commit group in every lock, and release all of them."""
        for lock in self.locks:
            lock.group = max(lock.group, self.group)
        release_all(self.locks)


def hold_together(
    locks: Iterable[EntityLock],
    then: Callable[[HeldTogether], None],
    *,
    call_soon: Callable[[Callable[[], None]], object],
) -> None:
    """Call `then` with all locks held: at once if they are free, otherwise when the last of them becomes free.

    `then` must have the locks released. `call_soon` runs a call in a later turn of the event loop.
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
    """Release locks that are held together. All are free before a job of any of them runs."""
    for lock in locks:
        lock.is_held = False
    for lock in locks:
        if not lock.is_held:  # a job of another lock may hold it again
            lock.run_jobs()


def _ignore(_: object) -> None:
    """Drop the result of `call_soon`: a job returns nothing."""
