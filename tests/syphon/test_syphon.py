"""Chapter Y on real servers, clause by clause."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.syphon.two_namespaces import TwoNamespaces, config, grounds, ids, numbered, until
from twinbus.connect import NEXT_AVAILABLE, connect
from twinbus.ledger import Ledger, LedgerOptions, Move, Movement, Outcome, Role, Stage, balance, read_ledger
from twinbus.message import Message
from twinbus.pairing import AioAdministration
from twinbus.syphon import context
from twinbus.syphon.context import MoveStep, SyphonOptions
from twinbus.syphon.discovery import ListedDiscovery, SearchedDiscovery
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.plan import Readiness, RetryPolicy
from twinbus.syphon.transport import HeldMessage
from twinbus.testing import LocalNamespaces
from twinbus.values import Long, Timestamp

QUICK = RetryPolicy(first_pause=0.2, longest_pause=0.5, gone_after=1.0)
TICKS = 10_000_000


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=config()) as found:
        yield found


@pytest.fixture
def ground(namespaces: LocalNamespaces) -> Iterator[TwoNamespaces]:
    yield from grounds(namespaces)


async def test_y1_several_syphons_share_the_work(ground: TwoNamespaces) -> None:
    await ground.fill(3000)
    one, other = await asyncio.gather(ground.drain(window=200), ground.drain(window=200))
    assert one.total.returned + other.total.returned == 3000
    assert min(one.total.returned, other.total.returned) > 0
    assert ids(await ground.arrived()) == numbered(3000)


def test_y2_a_long_poll_takes_15_minutes_which_is_four_receives_an_hour() -> None:
    assert 3600 / SyphonOptions().poll == 4


async def test_y2_an_idle_pump_costs_one_receive_for_each_poll(ground: TwoNamespaces) -> None:
    async with ground.syphon(poll=0.4) as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().operations.get(Stage.EMPTY_RECEIVE, 0) >= 4)
        syphon.stop()
        progress = await running
    # The queue is scanned once, when it is first found empty.
    assert set(progress.operations) == {Stage.EMPTY_RECEIVE, Stage.PEEK_BACKLOG}
    assert progress.operations[Stage.PEEK_BACKLOG] == 1
    assert progress.operations[Stage.EMPTY_RECEIVE] <= progress.seconds / 0.4 + 1


async def test_y2_queues_beyond_the_count_are_found_by_listing_and_by_searching(ground: TwoNamespaces) -> None:
    name = "lowered"
    wanted = [f"{name}/x-servicebus-transfer/{index}" for index in (0, 1, 3, 12)]
    administration = AioAdministration.from_connection_string(ground.secondary)
    for path in (*wanted, f"{name}/other", f"{name}x/x-servicebus-transfer/0"):
        await administration.request(administration.client.create_queue, path)
    listed = ListedDiscovery(name, administration)
    assert await listed.queues() == wanted
    assert await listed.remaining() == 0
    assert [listed.lock_seconds(path) for path in (*wanted, "other")] == [60.0] * len(wanted) + [None]
    await listed.close()
    transport = NativeTransport(ground.primary, ground.secondary)
    assert await SearchedDiscovery(name, transport).queues() == wanted
    await transport.close()


async def test_y2_every_queue_has_its_pump(namespaces: LocalNamespaces, ground: TwoNamespaces) -> None:
    other = TwoNamespaces(namespaces)
    await ground.fill(10)
    await other.fill(10, ground.orders, first=10)
    await ground.drain(queues=[ground.queue, other.queue])
    assert ids(await ground.arrived()) == numbered(20)


async def test_y3_aliases_are_turned_back_and_removed(ground: TwoNamespaces) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    await ground.put(
        ground.diverted("lives", timetolive=Long(3600 * TICKS)),
        ground.diverted("later", scheduledenqueuetimeutc=Timestamp(int(at.timestamp() * 1000))),
        ground.diverted("session", "sessions", sessionid="blue"),
    )
    assert (await ground.drain()).total.returned == 3
    async with connect(ground.primary) as bus:
        peeked = {str(one.message_id): one for one in await (await bus.receiver(ground.orders)).peek(0, 10)}
        (session,) = await (await bus.receiver("sessions", session=NEXT_AVAILABLE)).receive(1, 5)
    assert peeked["lives"].time_to_live == timedelta(hours=1)
    scheduled = peeked["later"].scheduled_enqueue_time
    assert scheduled is not None
    assert abs(scheduled - at) < timedelta(milliseconds=2)
    assert session.session_id == "blue"
    for one in (*peeked.values(), session):
        assert one.application_properties == {}


async def test_y3_each_message_is_intended_sent_confirmed_and_only_then_completed(
    ground: TwoNamespaces, tmp_path: Path
) -> None:
    seen: list[MoveStep] = []
    await ground.put(ground.diverted("one"))
    with Ledger(tmp_path, "syphon") as ledger:
        await ground.drain(on_step=lambda step, held: seen.append(step), ledger=ledger)
    assert seen == [
        MoveStep.RECEIVED,
        MoveStep.INTENDED,
        MoveStep.SENDING,
        MoveStep.CONFIRMED,
        MoveStep.RECORDED,
        MoveStep.COMPLETED,
    ]


async def test_l1_the_outcome_is_in_the_file_before_the_message_is_completed(
    ground: TwoNamespaces, tmp_path: Path
) -> None:
    """With a ledger that by itself would write it a minute later."""
    seen: list[list[str]] = []

    def look(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        if step is MoveStep.RECORDED:
            seen.append([entry.result for entry in read_ledger(tmp_path) if isinstance(entry, Outcome)])

    await ground.put(ground.diverted("one"))
    options = LedgerOptions(durability="lazy", group_interval=timedelta(minutes=1))
    with Ledger(tmp_path, "syphon", options) as ledger:
        await ground.drain(on_step=look, ledger=ledger)
    assert seen == [["ok"]]


async def test_l1_a_dead_letter_is_in_the_file_before_the_message_is_settled(
    ground: TwoNamespaces, tmp_path: Path
) -> None:
    """With a ledger that by itself would write it a minute later."""
    recorded: set[str] = set()

    def look(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        if step is MoveStep.RECORDED:
            moves = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Movement)]
            recorded.update(name for entry in moves if entry.move is Move.DEAD_LETTERED for name in entry.ids)
        if step is MoveStep.DEAD_LETTERED:
            assert {str(one.message_id) for one in held} <= recorded

    await ground.put(*(ground.diverted(name, timetolive="soon") for name in ("wrong", "too")))
    options = LedgerOptions(durability="lazy", group_interval=timedelta(minutes=1))
    with Ledger(tmp_path, "syphon", options) as ledger:
        progress = await ground.drain(on_step=look, ledger=ledger)
    assert recorded == {"wrong", "too"}
    assert progress.total.dead_lettered == 2


async def test_y3_a_crash_at_any_step_repeats_under_the_same_id_and_loses_nothing(namespaces: LocalNamespaces) -> None:
    async def crash_at(step: MoveStep) -> None:
        ground = TwoNamespaces(namespaces, short_lock=True)
        await ground.fill(50)
        crashed = asyncio.Event()

        def crash(at: MoveStep, held: Sequence[HeldMessage]) -> None:
            if at is step and not crashed.is_set():
                crashed.set()
                raise SystemError("a crash")

        async with ground.syphon(on_step=crash) as syphon:
            running = asyncio.create_task(syphon.run())
            await crashed.wait()
            syphon.stop()
            await running
        await ground.drain()
        arrived = ids(await ground.arrived())
        assert set(arrived) == set(numbered(50))
        if step is not MoveStep.CONFIRMED:
            assert arrived == numbered(50)

    # At the same time, because each waits until locks end.
    await asyncio.gather(*map(crash_at, (MoveStep.RECEIVED, MoveStep.INTENDED, MoveStep.SENDING, MoveStep.CONFIRMED)))


async def test_y3_a_lost_acknowledgement_repeats_and_duplicate_detection_removes_it(ground: TwoNamespaces) -> None:
    await ground.fill(20, "watchful")
    ground.namespaces["primary"].faults.set("drop-ack", entity="watchful", points=["send"], count=1)
    progress = await ground.drain(try_timeout=1.0, retry_policy=QUICK)
    assert progress.total.returned == 20
    assert progress.total.deferred > 0
    assert ids(await ground.arrived("watchful")) == numbered(20)


@pytest.mark.thorough
async def test_y4_locks_are_renewed_while_the_primary_is_slow(namespaces: LocalNamespaces) -> None:
    ground = TwoNamespaces(namespaces, short_lock=True)
    await ground.fill(20)
    slow = namespaces["primary"].faults.set("delay", entity=ground.orders, points=["send"], delay=7.0, count=1)
    progress = await ground.drain(try_timeout=20.0)
    namespaces["primary"].faults.clear(slow["id"])
    assert progress.operations[Stage.RENEW_BACKLOG] >= 20
    assert progress.total.possible_duplicates == 0
    assert ids(await ground.arrived()) == numbered(20)


async def test_y4_a_lock_that_was_lost_is_counted_as_a_possible_duplicate(namespaces: LocalNamespaces) -> None:
    ground = TwoNamespaces(namespaces, short_lock=True)
    await ground.fill(5)
    faults = namespaces["primary"].faults, namespaces["secondary"].faults
    slow = faults[0].set("delay", entity=ground.orders, points=["send"], delay=7.0, count=1)
    busy = faults[1].set("server-busy", entity=ground.queue, points=["request"], duration=6.5)
    progress = await ground.drain(try_timeout=20.0)
    faults[0].clear(slow["id"])
    faults[1].clear(busy["id"])
    assert progress.total.possible_duplicates == 5
    assert ids(await ground.arrived()) == Counter({str(number): 2 for number in range(5)})


@pytest.mark.thorough
async def test_y5_100000_messages_for_a_dead_destination_hold_up_ten_for_a_live_one_no_minute(
    ground: TwoNamespaces,
) -> None:
    await ground.fill(100_000, "closed")
    await ground.fill(10, first=100_000)
    async with ground.syphon() as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().total.returned == 10, 60)
        progress = syphon.progress()
        syphon.stop()
        await running
    operations = sum(progress.operations.values())
    print(f"10 messages after {progress.seconds:.1f} s; {operations / 100_010:.2f} operations per message")
    assert operations <= 2.2 * 100_010
    assert ids(await ground.arrived()) == numbered(10, 100_000)


@pytest.mark.parametrize("kind", ["server-busy", "internal-error", "detach"])
async def test_y5_what_was_put_aside_arrives_once_its_destination_takes_messages(
    ground: TwoNamespaces, kind: str
) -> None:
    faults = ground.namespaces["primary"].faults
    broken = faults.set(kind, entity=ground.orders, points=["send"])
    await ground.fill(2000)
    async with ground.syphon(drain=True, wait_for_destinations=60, retry_policy=QUICK) as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().aside >= 1990)
        assert [one.readiness for one in syphon.progress().not_ready] == [Readiness.ASIDE]
        faults.clear(broken["id"])
        progress = await running
    operations = sum(progress.operations.values())
    print(f"{operations / 2000:.2f} operations per message")
    # receive, defer, receive_deferred, send, complete; what was in flight was sent once before, and once more where
    # the link was made again; and a few for probes.
    assert operations <= 7 * 2000 + 200
    assert ids(await ground.arrived()) == numbered(2000)


async def test_y5_messages_that_another_syphon_put_aside_are_found_and_moved(ground: TwoNamespaces) -> None:
    await ground.fill(300)
    async with connect(ground.secondary) as bus:
        receiver = await bus.receiver(ground.queue, prefetch=0)
        held = await receiver.receive(120, 5)
        await receiver.defer(held)
    assert (await ground.drain()).total.returned == 300
    assert ids(await ground.arrived()) == numbered(300)


async def test_y6_what_can_never_be_delivered_is_dead_lettered_with_its_reason(ground: TwoNamespaces) -> None:
    await ground.put(
        Message(b"x", message_id="nowhere"),
        ground.diverted("wrong", timetolive="soon"),
        ground.diverted("no session", "sessions"),
        ground.diverted("good"),
    )
    progress = await ground.drain()
    dead = await ground.dead_lettered()
    assert {name: reason for name, (reason, _) in dead.items()} == {
        "nowhere": "NoDestination",
        "wrong": "WrongAlias",
        "no session": "MessageRefused",
    }
    assert all(description for _, description in dead.values())
    assert (progress.total.returned, progress.total.dead_lettered) == (1, 3)


async def test_y6_m1_a_dead_letter_is_recorded_under_the_destination_it_names(
    ground: TwoNamespaces, tmp_path: Path
) -> None:
    with Ledger(tmp_path, Role.CLIENT) as client:
        client.begin(Stage.SEND_BACKLOG, "secondary", ground.queue, ["w", "e"], 20, f"primary/{ground.orders}").end()
    await ground.put(ground.diverted("e", timetolive=Long(1)))
    await asyncio.sleep(0.01)  # the time to live of "e" ends, and then "w" shows that it did: it is delivered last
    await ground.put(ground.diverted("w", sessionid=5))
    with Ledger(tmp_path, Role.SYPHON) as ledger:
        await ground.drain(ttl="absolute", ledger=ledger)
    assert {reason for reason, _ in (await ground.dead_lettered()).values()} == {"WrongAlias", "TTLExpiredException"}
    found = balance(read_ledger(tmp_path))
    assert (found.dead_lettered.total(), found.in_backlog.total()) == (2, 0)


async def test_y6_a_message_too_large_for_the_primary_is_found_among_others_and_dead_lettered(
    ground: TwoNamespaces,
) -> None:
    from twinbus.backlog import compress_body  # noqa: PLC0415

    large = ground.diverted(
        "large", body=compress_body(b"\x00\x53\x75\xb0" + (300_000).to_bytes(4, "big") + bytes(300_000))
    )
    large.application_properties = {**(large.application_properties or {}), "x-twinbus-packed": "deflate"}
    await ground.fill(30)
    await ground.put(large)
    await ground.fill(30, first=30)
    await ground.drain()
    assert (await ground.dead_lettered())["large"][0] == "MessageTooLarge"
    assert ids(await ground.arrived()) == numbered(60)


@pytest.mark.thorough
async def test_y6_a_destination_that_stays_gone_has_its_messages_dead_lettered_one_that_comes_back_has_not(
    ground: TwoNamespaces,
) -> None:
    await ground.fill(50, "never-made")
    await ground.fill(50, "made-late", first=50)
    administration = AioAdministration.from_connection_string(ground.primary)
    async with ground.syphon(
        drain=True,
        wait_for_destinations=4.0,
        retry_policy=RetryPolicy(first_pause=0.1, longest_pause=0.3, gone_after=4.0),
    ) as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().aside == 100)
        await administration.request(administration.client.create_queue, "made-late")
        await running
    await administration.close()
    dead = await ground.dead_lettered()
    assert Counter(dead.keys()) == numbered(50)
    assert {reason for reason, _ in dead.values()} == {"DestinationNotFound"}
    assert ids(await ground.arrived("made-late")) == numbered(50, 50)


async def test_y7_time_to_live_starts_anew_on_the_primary(ground: TwoNamespaces) -> None:
    await ground.put(ground.diverted("short", timetolive=Long(TICKS // 2)))
    await asyncio.sleep(0.6)
    assert (await ground.drain()).total.returned == 1


async def test_y7_absolute_deducts_the_time_in_the_backlog_and_dead_letters_what_expired(ground: TwoNamespaces) -> None:
    await ground.put(
        ground.diverted("short", timetolive=Long(TICKS // 2)),
        ground.diverted("long", timetolive=Long(3600 * TICKS)),
    )
    await asyncio.sleep(0.6)
    await ground.drain(ttl="absolute")
    (arrived,) = await ground.arrived()
    assert arrived.time_to_live is not None
    assert timedelta(minutes=59) < arrived.time_to_live <= timedelta(hours=1) - timedelta(seconds=0.5)
    assert (await ground.dead_lettered())["short"][0] == "TTLExpiredException"


async def test_y9_paused_it_moves_nothing_and_holds_nothing_until_it_is_resumed(ground: TwoNamespaces) -> None:
    async with ground.syphon() as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: Stage.EMPTY_RECEIVE in syphon.progress().operations)
        syphon.pause()
        await until(lambda: syphon.state == "paused" and not syphon.progress().held)
        await ground.fill(30)
        # No credit is granted, so another receiver can get the messages.
        async with connect(ground.secondary) as bus:
            receiver = await bus.receiver(ground.queue, prefetch=0)
            assert await receiver.receive(1, 5)
            await receiver.close()
        assert syphon.progress().total.returned == 0
        syphon.resume()
        await until(lambda: syphon.progress().total.returned >= 29)
        syphon.stop()
        await running
    assert syphon.state == "ended"


async def test_y9_progress_tells_rate_and_remaining_by_destination(ground: TwoNamespaces) -> None:
    await ground.fill(100)
    await ground.fill(20, "closed", first=100)
    async with ground.syphon() as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().aside == 20)
        progress = syphon.progress()
        syphon.stop()
        await running
    assert progress.rate > 0
    assert progress.by_destination[ground.orders].returned == 100
    assert progress.by_destination["closed"].deferred >= 20
    assert [one.path for one in progress.not_ready] == ["closed"]


@pytest.mark.thorough
async def test_y9_stopping_finishes_what_is_in_flight_and_gives_back_the_rest(ground: TwoNamespaces) -> None:
    await ground.fill(5000)
    async with ground.syphon(window=500) as syphon:
        running = asyncio.create_task(syphon.run())
        await until(lambda: syphon.progress().total.returned > 0)
        syphon.stop()
        progress = await running
    assert progress.held == 0
    assert 0 < progress.total.returned < 5000
    arrived = ids(await ground.arrived())
    assert len(arrived) == progress.total.returned
    await ground.drain()
    assert arrived + ids(await ground.arrived()) == numbered(5000)


@pytest.mark.thorough
async def test_links_to_destinations_that_nothing_is_sent_to_are_closed(
    ground: TwoNamespaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "MAX_SENDERS", 2)
    paths = [f"orders-{number}" for number in range(6)]
    for number, path in enumerate(paths):
        await ground.fill(1, path, first=number)
    async with ground.syphon(drain=True, window=1) as syphon:
        assert (await syphon.run()).total.returned == 6
        assert len(syphon._context._senders) == 2
    for path in paths:
        await ground.arrived(path)
