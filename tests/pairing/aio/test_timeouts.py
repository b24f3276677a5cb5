"""After a deadline has ended a call, the task of the call can be used as before (S12, S13)."""

import asyncio
import time

import pytest
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing.aio.timeouts import CallDeadlines, cancel_until_done


async def ends_when_cancelled(times: int) -> str:
    """End only after this number of cancellations, as the SDK does while it cleans up."""
    for _ in range(times):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    return "answered in the last moment"


@pytest.mark.parametrize("times", [1, 2])
async def test_s12_an_answer_in_the_last_moment_stands_and_the_task_is_not_cancelled(times: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    assert await CallDeadlines().bound(ends_when_cancelled(times), 0.01) == "answered in the last moment"
    assert task.cancelling() == 0


async def test_s12_a_call_past_its_deadline_is_a_time_out_and_no_cancellation_is_left() -> None:
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(OperationTimeoutError):
        await CallDeadlines().bound(asyncio.Event().wait(), 0.01)
    assert task.cancelling() == 0


async def test_s12_deadlines_hold_in_a_loop_that_is_always_late() -> None:
    late, deadlines = True, CallDeadlines()

    def block() -> None:
        if late:
            time.sleep(0.25)
            asyncio.get_running_loop().call_soon(block)

    block()
    try:
        with pytest.raises(OperationTimeoutError):
            await deadlines.bound(asyncio.Event().wait(), 0.01)
    finally:
        late = False


async def test_s13_a_cancellation_by_anyone_else_goes_through() -> None:
    task = asyncio.create_task(CallDeadlines().bound(asyncio.Event().wait(), 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_c3_calls_under_way_are_past_their_deadlines_when_told_so() -> None:
    deadlines = CallDeadlines()
    task = asyncio.create_task(deadlines.bound(asyncio.Event().wait(), 60))
    await asyncio.sleep(0)
    deadlines.expire_all()
    with pytest.raises(OperationTimeoutError):
        await task


async def read_frames_for_ever(reading: list[asyncio.Task[None]], arrived: asyncio.Event) -> None:
    """Wait for frames as the SDK does: up to Python 3.11 `wait_for` drops a cancellation that comes with a frame."""
    while True:
        reading.append(asyncio.create_task(frame(arrived)))
        await asyncio.wait_for(reading[-1], 60)


async def frame(arrived: asyncio.Event) -> None:
    await arrived.wait()
    arrived.clear()


async def test_c3_a_task_that_loses_its_first_cancellation_is_cancelled_again() -> None:
    reading: list[asyncio.Task[None]] = []
    arrived = asyncio.Event()
    task = asyncio.create_task(read_frames_for_ever(reading, arrived))
    await asyncio.sleep(0)
    arrived.set()
    while not (reading and reading[-1].done()):  # noqa: ASYNC110 - the very step of the loop matters
        await asyncio.sleep(0)
    cancel_until_done(task)
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_c3_a_task_that_is_done_is_not_cancelled() -> None:
    task = asyncio.create_task(asyncio.sleep(0, "result"))
    await task
    cancel_until_done(task)
    assert task.result() == "result"
