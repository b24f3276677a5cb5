"""Locks of root entities: one holder at a time, jobs in their order, no deadlock, no growing call stack."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.entity_locks import EntityLock, HeldTogether, hold_together, release_all


def lock(number: int, idle: Callable[[Any], None] = lambda _: None) -> EntityLock:
    root = SimpleNamespace(counters=SimpleNamespace(queue=number))
    return EntityLock(cast("Any", root), idle)


class Loop:
    """Calls for a later turn of the event loop."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def run(self) -> None:
        while self._calls:
            self._calls.pop(0)()


class TestOneLock:
    def test_a_free_lock_is_held_at_once(self) -> None:
        one = lock(1)
        assert one.is_idle
        assert one.try_hold()
        assert one.is_held
        assert not one.try_hold()

    def test_jobs_wait_for_the_release_and_run_in_their_order(self) -> None:
        one, log = lock(1), list[str]()
        assert one.try_hold()
        for name in "abc":
            one.add_job(lambda name=name: log.append(name))  # type: ignore[misc]  # each keeps the lock
        assert log == []
        one.release()
        assert log == ["a"]
        one.release()
        one.release()
        assert log == ["a", "b", "c"]
        assert not one.is_idle
        one.release()
        assert one.is_idle

    def test_a_job_that_is_added_to_a_free_lock_runs_at_once(self) -> None:
        one, log = lock(1), list[bool]()
        one.add_job(lambda: log.append(one.is_held))
        assert log == [True]

    def test_nobody_overtakes_a_job_that_waits(self) -> None:
        one, log = lock(1), list[str]()

        def first() -> None:
            one.release()
            assert not one.try_hold()  # the second job waits
            one.add_job(lambda: log.append("third"))
            log.append("first")

        def second() -> None:
            log.append("second")
            one.release()

        assert one.try_hold()
        one.add_job(first)
        one.add_job(second)
        one.release()
        assert log == ["first", "second", "third"]

    def test_any_number_of_jobs_that_release_at_once_do_not_grow_the_call_stack(self) -> None:
        one, done = lock(1), list[int]()

        def job(number: int) -> Callable[[], None]:
            def run() -> None:
                done.append(number)
                one.release()

            return run

        assert one.try_hold()
        for number in range(5_000):
            one.add_job(job(number))
        one.release()
        assert done == list(range(5_000))

    def test_idle_is_called_when_the_last_job_is_done_and_not_before(self) -> None:
        roots: list[Any] = []
        one = lock(1, roots.append)
        assert one.try_hold()
        one.add_job(lambda: None)
        one.release()
        assert roots == []
        one.release()
        assert roots == [one.root]

    def test_a_lock_goes_on_after_a_job_that_raised(self) -> None:
        one, log = lock(1), list[str]()

        def broken() -> None:
            one.release()
            raise ValueError("broken")

        try:
            one.add_job(broken)
        except ValueError:
            log.append("raised")
        one.add_job(lambda: log.append("next"))
        assert log == ["raised", "next"]


class TestSeveralLocks:
    def test_free_locks_are_held_at_once_in_the_order_of_their_ids(self) -> None:
        locks = [lock(number) for number in (3, 1, 2, 1)]
        held: list[HeldTogether] = []
        hold_together([*locks, locks[0]], held.append, call_soon=Loop().call_soon)
        assert [one.root.counters.queue for one in held[0].locks] == [1, 1, 2, 3]
        assert all(one.is_held for one in locks)
        assert held[0].root is held[0].locks[0].root
        held[0].release()
        assert all(one.is_idle for one in locks)

    def test_a_held_lock_is_waited_for_with_those_below_it_held_and_those_above_it_free(self) -> None:
        first, second, third = lock(1), lock(2), lock(3)
        loop, held = Loop(), list[HeldTogether]()
        assert second.try_hold()
        hold_together([first, second, third], held.append, call_soon=loop.call_soon)
        assert (first.is_held, third.is_held) == (True, False)
        second.release()
        loop.run()
        assert len(held) == 1
        assert first.is_held
        assert second.is_held
        assert third.is_held

    def test_the_commit_group_of_the_decision_becomes_that_of_every_lock(self) -> None:
        first, second = lock(1), lock(2)
        first.group, second.group = 7, 3
        held: list[HeldTogether] = []
        hold_together([first, second], held.append, call_soon=Loop().call_soon)
        assert held[0].group == 7
        held[0].group = 9
        held[0].release()
        assert (first.group, second.group) == (9, 9)

    def test_all_locks_are_free_before_a_job_of_any_of_them_runs(self) -> None:
        first, second, log = lock(1), lock(2), list[bool]()
        for one in (first, second):
            assert one.try_hold()
        first.add_job(lambda: log.append(second.is_held))
        release_all([first, second])
        assert log == [False]

    def test_what_a_job_adds_to_another_lock_that_is_released_with_it_does_not_overtake(self) -> None:
        first, second, log = lock(1), lock(2), list[str]()
        for one in (first, second):
            assert one.try_hold()

        def waiting() -> None:
            log.append("waiting")
            second.release()

        def add() -> None:
            assert not second.try_hold()
            second.add_job(lambda: log.append("added"))

        first.add_job(add)
        second.add_job(waiting)
        release_all([first, second])
        assert log == ["waiting", "added"]

    def test_a_long_chain_of_holders_does_not_grow_the_call_stack(self) -> None:
        locks = [lock(number) for number in range(2_000)]
        loop, done = Loop(), list[int]()
        everything: list[HeldTogether] = []
        hold_together(locks, everything.append, call_soon=loop.call_soon)

        def finish(held: HeldTogether) -> None:
            done.append(held.root.counters.queue)
            held.release()

        for number in range(len(locks) - 1):
            hold_together(locks[number : number + 2], finish, call_soon=loop.call_soon)
        everything[0].release()
        loop.run()
        assert sorted(done) == list(range(len(locks) - 1))
        assert all(one.is_idle for one in locks)

    @given(st.data())
    def test_any_holders_in_any_order_of_releases_all_get_their_locks_and_never_share_one(
        self, data: st.DataObject
    ) -> None:
        locks = [lock(number) for number in range(4)]
        wanted = data.draw(st.lists(st.lists(st.sampled_from(range(4)), min_size=1, unique=True), max_size=25))
        loop, holders, done = Loop(), list[HeldTogether](), 0
        for numbers in wanted:
            hold_together([locks[number] for number in numbers], holders.append, call_soon=loop.call_soon)
            if data.draw(st.booleans()):
                loop.run()
        while done < len(wanted):
            loop.run()
            assert holders, "every holder waits for another"
            taken = [one for held in holders for one in held.locks]
            assert len(taken) == len(set(taken))
            holders.pop(data.draw(st.integers(0, len(holders) - 1))).release()
            done += 1
        loop.run()
        assert all(one.is_idle for one in locks)
