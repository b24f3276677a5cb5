"""M1, Y2: which requests a metered backlog records, and that a poll opens its queue at most once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from twinbus.backlog import FailureKind
from twinbus.ledger import Stage
from twinbus.syphon.progress import ProgressCounter
from twinbus.syphon.syphon_ledger import MeteredBacklog, SyphonLedger
from twinbus.syphon.transport import BacklogFailedError, HeldMessage, PeekedMessage

TIME = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(eq=False)
class Held:
    sequence_number: int = 1
    message_id: str = "a"
    size: int = 10
    unanswered: bool = False
    locked_until: datetime = TIME
    enqueued_time: datetime = TIME


class ScriptedBacklog:
    """Answers each receive with the next of `answers`: a number of messages, or an error."""

    def __init__(self, *answers: int | BaseException) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []
        self.has_credit = False
        self.on_their_way = 0

    async def open(self) -> None:
        self.calls.append("open")

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        self.calls.append("receive")
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        # As the transports do: credit that is left after messages came stays granted.
        self.has_credit = 0 < answer < count
        return [Held() for _ in range(answer)]

    async def stop_receiving(self) -> Sequence[HeldMessage]:
        self.has_credit = False
        return [Held() for _ in range(self.on_their_way)]

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        raise NotImplementedError

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        raise NotImplementedError

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        raise NotImplementedError

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        raise NotImplementedError

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        raise NotImplementedError

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        raise NotImplementedError

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        raise NotImplementedError

    async def close(self) -> None: ...


def metered(inner: ScriptedBacklog) -> tuple[MeteredBacklog, ProgressCounter]:
    counts = ProgressCounter(0.0)
    return MeteredBacklog(inner, "b", SyphonLedger(None, "p", "s", counts), lambda: 0.0), counts


async def test_a_poll_opens_its_queue_once_and_not_at_all_while_credit_is_granted() -> None:
    inner = ScriptedBacklog(0, 2, 2, 5)
    backlog, _ = metered(inner)
    for _ in range(4):
        await backlog.receive(5, 1.0)
    assert inner.calls == ["open", "receive", "open", "receive", "receive", "receive"]


async def test_y2_credit_that_brought_messages_costs_no_empty_receive() -> None:
    backlog, counts = metered(ScriptedBacklog(2, 0, 0))
    for _ in range(3):
        await backlog.receive(5, 1.0)
    assert counts.operations == {Stage.RECEIVE_BACKLOG: 2, Stage.EMPTY_RECEIVE: 1}


async def test_y2_credit_that_is_taken_back_unused_is_one_empty_receive() -> None:
    inner = ScriptedBacklog(asyncio.CancelledError())
    backlog, counts = metered(inner)
    inner.has_credit = True
    with pytest.raises(asyncio.CancelledError):
        await backlog.receive(5, 1.0)
    assert counts.operations == {}
    await backlog.stop_receiving()
    assert counts.operations == {Stage.EMPTY_RECEIVE: 1}


async def test_m1_messages_that_were_on_their_way_are_received_and_settled() -> None:
    inner = ScriptedBacklog(1)
    backlog, counts = metered(inner)
    await backlog.receive(5, 1.0)
    inner.on_their_way = 3
    await backlog.stop_receiving()
    assert counts.operations == {Stage.RECEIVE_BACKLOG: 4, Stage.SETTLE_BACKLOG: 3}


async def test_m1_a_receive_that_failed_is_recorded_and_a_queue_that_could_not_be_opened_is_not() -> None:
    error = BacklogFailedError("b", FailureKind.CONNECTION_LOST)
    inner = ScriptedBacklog(error)
    backlog, counts = metered(inner)
    with pytest.raises(BacklogFailedError):
        await backlog.receive(5, 1.0)
    assert counts.operations == {Stage.EMPTY_RECEIVE: 1}

    async def refuse() -> None:
        raise error

    inner.open = refuse  # type: ignore[method-assign]
    with pytest.raises(BacklogFailedError):
        await backlog.receive(5, 1.0)
    assert counts.operations == {Stage.EMPTY_RECEIVE: 1}
