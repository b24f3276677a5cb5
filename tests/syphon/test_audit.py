"""The audit on real namespaces: messages removed in every way, live senders and syphons beside it (L3)."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.syphon.audited_backlog import SECONDARY, AuditedBacklog, config
from tests.syphon.two_namespaces import until
from tests.tiers import budget
from twinbus.connect import ServiceBusError, connect
from twinbus.ledger import (
    AUDITED,
    UNKNOWN,
    Gap,
    Ledger,
    MessageKey,
    Move,
    Movement,
    Operation,
    Role,
    Stage,
    State,
    Verdict,
    balance,
    dead_writers,
    encode_entry,
    list_segments,
    read_ledger,
)
from twinbus.message import Message, MessageId
from twinbus.syphon import Syphon, SyphonState
from twinbus.testing import LocalNamespaces

Theft = Callable[[AuditedBacklog], Awaitable[object]]
IDS = [f"m{number}" for number in range(6)]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=config()) as found:
        yield found


@pytest.fixture
def backlog(namespaces: LocalNamespaces, tmp_path: Path) -> AuditedBacklog:
    return AuditedBacklog(namespaces, tmp_path / "ledger")


def ids(counted: Counter[MessageKey]) -> list[str]:
    return sorted(message.id for message, count in counted.items() for _ in range(count))


def checked(backlog: AuditedBacklog) -> list[str]:
    """What `twinbus ledger check` calls lost after the audit."""
    return ids(balance(read_ledger(backlog.ledger), dead_writers(backlog.ledger)).lost)


# --- messages that something removed ---------------------------------------------------------------------------------


async def delete(backlog: AuditedBacklog) -> None:
    await backlog.delete_queue()


async def delete_and_create(backlog: AuditedBacklog) -> None:
    await backlog.delete_queue()
    await backlog.create_queue()


async def complete(backlog: AuditedBacklog) -> None:
    await backlog.take(6)


async def receive_and_delete(backlog: AuditedBacklog) -> None:
    await backlog.take(6, receive_and_delete=True)


async def purge(backlog: AuditedBacklog) -> None:
    assert await backlog.purge() == 6


async def empty_the_dead_letters(backlog: AuditedBacklog) -> None:
    await backlog.dead_letter(6)
    await backlog.take(6, dead_letter=True)


@pytest.mark.parametrize(
    "theft", [delete, delete_and_create, complete, receive_and_delete, purge, empty_the_dead_letters]
)
async def test_l3_messages_that_were_removed_are_lost_by_id(backlog: AuditedBacklog, theft: Theft) -> None:
    await backlog.divert(*IDS)
    found = await backlog.audit()
    assert (ids(found.findings.there), found.looks, found.judgement.verdict) == (IDS, 1, Verdict.PROVEN)
    await theft(backlog)
    found = await backlog.audit()
    assert ids(found.findings.absent) == ids(found.balance.lost) == checked(backlog) == IDS
    assert (found.looks, found.judgement.verdict, found.judgement.exit_code) == (2, Verdict.LOST, 1)
    again = await backlog.audit()
    assert (again.looks, ids(again.balance.lost)) == (1, IDS), "what is recorded as lost is not looked for again"


async def test_l3_messages_that_expired_are_lost_by_id(backlog: AuditedBacklog) -> None:
    await backlog.divert("stays")
    await backlog.divert(*IDS, ttl=timedelta(milliseconds=200))
    while await backlog.peeked() != ["stays"]:  # noqa: ASYNC110 - the namespace does not say when a message expires
        await asyncio.sleep(0.05)
    found = await backlog.audit()
    assert ids(found.balance.lost) == IDS
    assert ids(found.findings.there) == ["stays"]


async def test_l3_one_of_two_messages_with_the_same_id_is_missed(backlog: AuditedBacklog) -> None:
    await backlog.divert("twice")
    await backlog.divert("twice")
    assert (await backlog.audit()).looks == 1
    await backlog.take(1)
    found = await backlog.audit()
    assert ids(found.balance.lost) == ["twice"]
    assert ids(found.balance.in_backlog) == ["twice"]


async def take_two_by_number(backlog: AuditedBacklog, syphon: Syphon) -> list[str]:
    await backlog.take_deferred("m2", "m4")
    return ["m2", "m4"]


async def let_two_expire(backlog: AuditedBacklog, syphon: Syphon) -> list[str]:
    """The syphon is paused meanwhile: messages that it puts aside do not expire."""
    syphon.pause()
    await until(lambda: syphon.state is SyphonState.PAUSED)
    await backlog.divert("e1", "e2", ttl=timedelta(milliseconds=200))
    while await backlog.peeked() != IDS:  # noqa: ASYNC110 - the namespace does not say when a message expires
        await asyncio.sleep(0.05)
    syphon.resume()
    return ["e1", "e2"]


async def delete_the_queue(backlog: AuditedBacklog, syphon: Syphon) -> list[str]:
    await backlog.delete_queue()
    return IDS


@pytest.mark.parametrize("removed", [take_two_by_number, let_two_expire, delete_the_queue])
async def test_l3_messages_removed_beside_a_live_syphon_are_lost_by_id(
    backlog: AuditedBacklog, removed: Callable[[AuditedBacklog, Syphon], Awaitable[list[str]]]
) -> None:
    """The destination `closed` refuses: its messages are put aside."""
    await backlog.divert(*IDS, path="closed")
    async with backlog.syphon() as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().aside == len(IDS))
        # Senders would fail when the queue is deleted, and would hide what expires behind their messages.
        async with sending(backlog) if removed is take_two_by_number else nullcontext():
            assert (await backlog.audit(1.2)).balance.lost == {}
            gone = await removed(backlog, syphon)
            found = await backlog.audit(1.2)
        assert not running.done()
        syphon.stop()
        await running
    # A return that was refused is no delivery: the message was never sent on.
    assert ids(found.balance.lost) == checked(backlog) == gone
    assert found.judgement.exit_code == 1


# --- messages that are there -----------------------------------------------------------------------------------------


async def test_l3_deferred_scheduled_locked_and_dead_lettered_messages_are_seen(backlog: AuditedBacklog) -> None:
    await backlog.divert(*IDS)
    await backlog.dead_letter(2)
    async with connect(backlog.secondary) as bus:
        receiver = await bus.receiver(backlog.queue, prefetch=0)
        first, second = await receiver.receive(2, 5)
        await receiver.defer([first])
        properties = {"x-ms-path": backlog.orders}
        later = Message(b"x", message_id="later", application_properties=properties)
        await (await bus.sender(backlog.queue)).schedule([later], _in_an_hour())
        with Ledger(backlog.ledger) as ledger:
            backlog.book(ledger, ["later"])
        found = await backlog.audit()
        await receiver.abandon([second])
    assert ids(found.findings.there) == ["later", *IDS]
    assert (found.look.messages, found.look.dead_letters, found.looks) == (5, 2, 1)


async def test_l3_every_page_of_a_queue_is_seen(backlog: AuditedBacklog) -> None:
    many = [f"n{number:04}" for number in range(1001)]
    await backlog.divert(*many)
    found = await backlog.audit()
    assert ids(found.findings.there) == many
    assert found.looks == 1
    peeks = [one for one in read_ledger(backlog.ledger) if isinstance(one, Operation)]
    mine = [one for one in peeks if one.stage is Stage.PEEK_BACKLOG]
    assert len(mine) == found.peeks == 7, "five pages, an empty page, and the dead-letter queue"
    assert {(one.namespace, one.entity) for one in mine} == {(SECONDARY, backlog.queue)}


async def test_l3_a_message_that_comes_after_the_reading_is_not_missed(backlog: AuditedBacklog) -> None:
    await backlog.divert("gone")
    await backlog.take(1)
    found = await backlog.audit(during_wait=lambda: backlog.divert("new"))
    assert ids(found.balance.lost) == ["gone"]
    assert ids(found.balance.in_backlog) == ["new"]


async def test_l3_a_message_that_a_syphon_brings_home_between_two_looks_is_delivered(backlog: AuditedBacklog) -> None:
    await backlog.divert("gone", "home")
    async with connect(backlog.secondary) as bus:
        receiver = await bus.receiver(backlog.queue, prefetch=0)
        one, other = await receiver.receive(2, 5)
        await receiver.complete([one])
        await receiver.abandon([other])
    found = await backlog.audit(during_wait=backlog.drain)
    assert ids(found.balance.lost) == [str(one.message_id)]
    assert ids(found.balance.delivered) == [str(other.message_id)]


async def test_l3_seen_though_delivered_will_come_again(backlog: AuditedBacklog) -> None:
    await backlog.divert("a")
    with Ledger(backlog.ledger, Role.SYPHON) as ledger:
        ledger.begin(Stage.RETURN_PRIMARY, backlog.name, backlog.orders, ["a"], 1).end()
        destination = f"{backlog.name}/{backlog.orders}"
        ledger.begin(Stage.COMPLETE_BACKLOG, SECONDARY, backlog.queue, ["a"], 0, destination).end()
    found = await backlog.audit()
    assert ids(found.findings.come_again) == ids(found.balance.possibly_duplicated) == ["a"]
    assert found.judgement.verdict is Verdict.POSSIBLE_DUPLICATES
    again = await backlog.audit()
    assert ids(again.findings.come_again) == ["a"]
    assert moves(backlog) == [(Move.POSSIBLE_DUPLICATE, ("a",))], "it is recorded once"


async def test_l3_seen_and_never_accepted_is_unconfirmed(backlog: AuditedBacklog) -> None:
    await backlog.divert("known")
    await backlog.divert("never", book=False)
    found = await backlog.audit()
    assert ids(found.findings.unconfirmed) == ["never"]
    assert (found.looks, found.judgement.verdict) == (1, Verdict.PROVEN)
    await backlog.take(1)
    found = await backlog.audit()
    assert ids(found.balance.unconfirmed) == ["never"], "two looks saw it, so it is recorded"


async def test_l3_a_delivery_that_a_dead_syphon_began_is_resolved_by_what_is_seen(backlog: AuditedBacklog) -> None:
    await backlog.divert("back", "gone")
    leave_intent(backlog, "back", "gone")
    before = balance(read_ledger(backlog.ledger), dead_writers(backlog.ledger))
    assert ids(before.unknown) == ["back", "gone"]
    async with connect(backlog.secondary) as bus:
        receiver = await bus.receiver(backlog.queue, prefetch=0)
        held = await receiver.receive(2, 5)
        await receiver.complete([one for one in held if one.message_id == "gone"])
        await receiver.abandon([one for one in held if one.message_id == "back"])
    found = await backlog.audit()
    assert ids(found.findings.found) == ids(found.balance.in_backlog) == ["back"]
    assert ids(found.balance.unknown) == ["gone"], "the dead syphon may have delivered it"
    assert (found.balance.lost, found.judgement.verdict) == ({}, Verdict.NOT_PROVEN)


def leave_intent(backlog: AuditedBacklog, *names: str) -> None:
    """Leave what a syphon leaves that is killed during a delivery: an intent, in an open segment without a lock."""
    if (child := os.fork()) == 0:
        ledger = Ledger(backlog.ledger, Role.SYPHON)
        ledger.begin(Stage.RETURN_PRIMARY, backlog.name, backlog.orders, names, 2)
        ledger.flush()
        os._exit(0)
    os.waitpid(child, 0)


# --- when the word is "not proven" -----------------------------------------------------------------------------------


async def test_l3_while_entries_are_missing_the_word_is_not_proven(backlog: AuditedBacklog) -> None:
    await backlog.divert(*IDS)
    await backlog.take(6)
    (segment,) = list_segments(backlog.ledger)
    gap = encode_entry(Gap(at=0, id="g", count=3, since=0, until=1, reason="No space left on device"))
    text = segment.path.read_text()
    segment.path.write_text(text.replace('{"v":1,"kind":"closed"', gap + '{"v":1,"kind":"closed"'))
    found = await backlog.audit()
    assert ids(found.findings.absent) == IDS
    assert found.balance.lost == {}
    assert (found.judgement.verdict, found.judgement.exit_code) == (Verdict.NOT_PROVEN, 3)
    segment.path.write_text(text)
    assert ids((await backlog.audit()).balance.lost) == IDS


async def test_l3_while_a_writer_has_not_shipped_its_entries_the_word_is_not_proven(backlog: AuditedBacklog) -> None:
    """The copy of a segment that its writer, on another host, sealed: what it wrote after that is not here."""
    await backlog.divert(*IDS)
    await backlog.take(6)
    with Ledger(backlog.ledger, Role.SYPHON) as ledger:
        ledger.state("syphon_started", {})
    (segment,) = (one for one in list_segments(backlog.ledger) if one.writer == ledger.writer)
    lines = segment.path.read_text().splitlines(keepends=True)
    segment.path.write_text("".join(line for line in lines if '"closed"' not in line))
    for copied_at in (time.time(), 0.0):
        os.utime(segment.path, (copied_at, copied_at))
        found = await backlog.audit()
        assert ids(found.findings.absent) == IDS
        assert (found.balance.lost, found.judgement.verdict) == ({}, Verdict.NOT_PROVEN)
        assert any("may not be shipped yet" in reason for reason in found.missing)
    # The user says that the writer is dead after so long a silence, and that all its entries are here.
    assert ids((await backlog.audit(silence=timedelta(0))).balance.lost) == IDS


async def test_l3_a_writer_that_may_have_entries_elsewhere_is_no_doubt_if_nothing_is_absent(
    backlog: AuditedBacklog,
) -> None:
    await backlog.divert(*IDS)
    (segment,) = list_segments(backlog.ledger)
    lines = segment.path.read_text().splitlines(keepends=True)
    segment.path.write_text("".join(line for line in lines if '"closed"' not in line))
    assert (await backlog.audit()).judgement.verdict is Verdict.PROVEN


async def test_l3_while_the_own_entries_cannot_be_written_the_word_is_not_proven(backlog: AuditedBacklog) -> None:
    """After a drain the audit uses the syphon's ledger. If it lacks the deliveries, their messages seem to be lost."""
    await backlog.divert(*IDS)
    await backlog.take(6)
    with Ledger(backlog.ledger, Role.SYPHON) as ledger:
        ledger.begin(Stage.RETURN_PRIMARY, backlog.name, backlog.orders, IDS, 6).end()
        ledger.flush()
        (segment,) = (one for one in list_segments(backlog.ledger) if one.writer == ledger.writer)
        segment.path.unlink()
        found = await backlog.audit(ledger=ledger)
    assert ids(found.findings.absent) == IDS
    assert (found.balance.lost, found.judgement.verdict) == ({}, Verdict.NOT_PROVEN)


async def redirect_without_a_record(backlog: AuditedBacklog) -> str:
    """Returns the name of the writer that resubmitted the message `a` for another destination."""
    await backlog.divert("a")
    await backlog.dead_letter(1)
    with Ledger(backlog.ledger, Role.DEADLETTER) as ledger:
        elsewhere = f"{backlog.name}/elsewhere"
        ledger.begin(Stage.RESUBMIT_BACKLOG, SECONDARY, backlog.queue, ["a"], [1], elsewhere).end(UNKNOWN)
    await backlog.take(1, dead_letter=True)
    return ledger.writer


async def test_l3_a_redirect_is_not_recorded_while_a_writer_has_not_shipped_its_entries(
    backlog: AuditedBacklog,
) -> None:
    writer = await redirect_without_a_record(backlog)
    (segment,) = (one for one in list_segments(backlog.ledger) if one.writer == writer)
    lines = segment.path.read_text().splitlines(keepends=True)
    segment.path.write_text("".join(line for line in lines if '"closed"' not in line))
    for _ in range(2):
        found = await backlog.audit()
        assert (ids(found.findings.redirected), found.judgement.verdict) == (["a"], Verdict.NOT_PROVEN)
        assert any("may not be shipped yet" in reason for reason in found.missing)


async def test_l3_a_redirect_that_only_the_audit_recorded_is_not_proven_until_the_next_audit(
    backlog: AuditedBacklog,
) -> None:
    """The copy never arrived: the resubmission had no answer, and then the dead letter was removed."""
    await redirect_without_a_record(backlog)
    found = await backlog.audit()
    assert (ids(found.findings.redirected), found.judgement.verdict) == (["a"], Verdict.NOT_PROVEN)
    assert found.missing == ("1 redirect was not recorded before this audit: audit again",)
    found = await backlog.audit()
    assert (ids(found.balance.lost), found.judgement.verdict) == (["a"], Verdict.LOST)


async def test_l3_a_queue_that_cannot_be_peeked_is_an_error_and_no_loss(
    backlog: AuditedBacklog, namespaces: LocalNamespaces
) -> None:
    await backlog.divert(*IDS)
    weak = backlog.secondary.replace("SharedAccessKey=", "SharedAccessKey=wrong")
    backlog.secondary, whole = weak, backlog.secondary
    with pytest.raises(ServiceBusError):
        await backlog.audit()
    backlog.secondary = whole
    assert checked(backlog) == []


# --- what is written -------------------------------------------------------------------------------------------------


def _in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)


def moves(backlog: AuditedBacklog) -> list[tuple[Move, tuple[str, ...]]]:
    return [(one.move, one.ids) for one in read_ledger(backlog.ledger) if isinstance(one, Movement)]


async def test_l3_an_audit_writes_down_what_it_saw(backlog: AuditedBacklog) -> None:
    await backlog.divert("a", "b")
    await backlog.take(1)
    await backlog.audit()
    (entry,) = (one for one in read_ledger(backlog.ledger) if isinstance(one, Movement))
    assert (entry.move, entry.ids, entry.source) == (Move.LOST, ("a",), f"{SECONDARY}/{backlog.queue}")
    assert entry.destination == f"{backlog.name}/{backlog.orders}"
    (state,) = (one for one in read_ledger(backlog.ledger) if isinstance(one, State))
    assert (state.event, state.pair) == (AUDITED, backlog.name)
    expected = {"queues": 1, "looks": 2, "seen": 1, "there": 1, "absent": 1, "come_again": 0, "unconfirmed": 0}
    assert {name: state.facts[name] for name in expected} == expected


async def test_l3_message_ids_of_all_types_are_compared_and_written_as_they_are(backlog: AuditedBacklog) -> None:
    given: list[MessageId] = [5, b"\x00\xff", "uuid:text", "plain"]
    properties = {"x-ms-path": backlog.orders}
    async with connect(backlog.secondary) as bus:
        messages = [Message(b"x", message_id=one, application_properties=properties) for one in given]
        await (await bus.sender(backlog.queue)).send(messages)
    with Ledger(backlog.ledger) as ledger:
        destination = f"{backlog.name}/{backlog.orders}"
        ledger.begin(Stage.SEND_BACKLOG, SECONDARY, backlog.queue, given, [1] * 4, destination).end()
    expected = ["binary:00ff", "plain", "string:uuid:text", "ulong:5"]
    assert ids((await backlog.audit()).findings.there) == expected
    await backlog.purge()
    assert ids((await backlog.audit()).balance.lost) == checked(backlog) == expected


# --- under load ------------------------------------------------------------------------------------------------------


class sending:  # noqa: N801 - used as a context manager
    """Senders that divert and book messages all the time."""

    def __init__(self, backlog: AuditedBacklog, senders: int = 2) -> None:
        self.backlog = backlog
        self.accepted = 0
        self._senders = senders
        self._stop = asyncio.Event()

    async def __aenter__(self) -> sending:
        self._tasks = [asyncio.create_task(self._send(number)) for number in range(self._senders)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def _send(self, number: int) -> None:
        properties = {"x-ms-path": self.backlog.orders}
        with Ledger(self.backlog.ledger) as ledger:
            async with connect(self.backlog.secondary) as bus:
                sender = await bus.sender(self.backlog.queue)
                for batch in itertools.count():
                    if self._stop.is_set():
                        return
                    names = [f"s{number}-{batch}-{one}" for one in range(20)]
                    messages = [Message(b"x", message_id=one, application_properties=properties) for one in names]
                    await sender.send(messages)
                    self.backlog.book(ledger, names)
                    self.accepted += len(names)
                    await asyncio.sleep(0.03)


@pytest.mark.timeout(3600)
async def test_l3_no_false_loss_beside_live_senders_and_a_live_syphon(backlog: AuditedBacklog) -> None:
    """Each round has its own ledger, so that the time of an audit does not grow with the number of audits."""
    audits, ledgers = budget(5, 50, 1000), backlog.ledger
    for first in range(0, audits, 25):
        backlog.ledger = ledgers / str(first)
        await audit_beside_others(backlog, min(25, audits - first))


async def audit_beside_others(backlog: AuditedBacklog, audits: int) -> None:
    async with backlog.syphon(window=100) as syphon:
        running = asyncio.create_task(syphon.run())
        async with sending(backlog) as senders:
            for _ in range(audits):
                found = await backlog.audit()
                assert found.balance.lost == {}
                assert found.findings.absent == {}
        assert senders.accepted > 0
        await until(lambda: syphon.progress().total.returned >= senders.accepted)
        syphon.stop()
        await running
    found = await backlog.audit()
    assert found.balance.delivered.total() == senders.accepted
    assert found.judgement.verdict in (Verdict.PROVEN, Verdict.POSSIBLE_DUPLICATES)
