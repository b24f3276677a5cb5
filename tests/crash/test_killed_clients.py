"""L1 and L2: after each kill -9 of a syphon or an application, the ledger agrees with a count of the queues.

The count is taken from the files of the namespaces (`stored_ids`), and from the files in which applications write down
what was reported safe. `ledger_oracle` compares it with the balance. Killed are, at every step and at random instants:

| process | steps |
| --- | --- |
| syphon, native and over the SDK | `killed_clients.PLACES`, `killed_clients.DEAD_LETTER_PLACES` |
| dead-letter tool, for the same and for another destination | `killed_clients.RESUBMIT_PLACES` |
| application, sync and asyncio, healthy and diverted | `killed_clients.ACCEPTED`, `AFTER_RETURN`, `AT_EXIT` |
| syphon in an application | `killed_clients.RETURNED` |

Spark's processes are killed in `tests/pipeline/test_spark_syphon.py` and `test_spark_kills.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.crash.killed_clients import (
    ACCEPTED,
    AFTER_RETURN,
    AIO,
    AT_EXIT,
    DEAD_LETTER_PLACES,
    PLACES,
    RESUBMIT_PLACES,
    RETURNED,
    SYNC,
    TRANSPORTS,
    WINDOW,
    Application,
    Durability,
    KilledProcess,
    KillPlan,
    Resubmission,
    later,
    reported_safe,
    run_application,
    run_resubmission,
    run_syphon,
)
from tests.crash.killed_pair import QUEUE, KilledPair, killed_pairs
from tests.crash.stored_ids import marked_body
from tests.tiers import budget
from twinbus.ledger import MessageKey, Verdict, judge_ledger
from twinbus.testing import LocalNamespaces

pytestmark = pytest.mark.timeout(600)

KILLS = budget(2, 60, 300)
"""Kills of each kind of process."""
KILLS_PER_RUN = 60
SEEDS = range(-(-KILLS // KILLS_PER_RUN))
FILL = 4 * WINDOW
RANDOM_SECONDS = 0.08
APPLICATIONS = [(driver, is_diverted) for driver in (SYNC, AIO) for is_diverted in (False, True)]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with killed_pairs() as made:
        yield made


@pytest.fixture
def pair(namespaces: LocalNamespaces, tmp_path: Path) -> KilledPair:
    return KilledPair(namespaces, tmp_path)


def syphon_kills(chance: Random, count: int) -> list[KillPlan]:
    """Every place in turn, and as many random instants."""
    places = [KillPlan(place, chance.choice((1, 1, 2))) for place in PLACES]
    chance.shuffle(places)
    return [
        KillPlan(seconds=chance.uniform(0, RANDOM_SECONDS)) if number % 2 else places[number // 2 % len(places)]
        for number in range(count)
    ]


def application_kills(chance: Random, count: int) -> list[KillPlan]:
    times = (1, 1, 5, 20)
    return [
        (
            KillPlan(ACCEPTED, chance.choice((5, 20, 50))),  # so often that some sends have returned before
            KillPlan(AFTER_RETURN, chance.choice(times)),
            KillPlan(AT_EXIT, chance.choice(times)),
            KillPlan(seconds=chance.uniform(0, RANDOM_SECONDS)),
            KillPlan(RETURNED),
            KillPlan(seconds=chance.uniform(0, RANDOM_SECONDS)),
        )[number % 6]
        for number in range(count)
    ]


def ids(counted: Counter[MessageKey]) -> set[str]:
    return {message.id for message in counted}


def judge(pair: KilledPair, figures: Counter[str], *, is_whole: bool = True) -> None:
    """Brings everything home, and counts for the last time. `is_whole`: no entry can be missing from the ledger."""
    pair.drain()
    found = pair.check("after the drain", is_over=True)
    figures.update(found.sums())
    print(dict(sorted(figures.items())))
    assert not pair.wrong, "\n".join([f"{len(pair.wrong)} wrong", *pair.wrong[:20]])
    assert found.delivered.total() == found.accepted.total() >= len(pair.safe) > 0
    judged = judge_ledger(found.sums(), found.incomplete)
    is_twice = figures["duplicated"] + figures["possibly_duplicated"] > 0
    proven = Verdict.POSSIBLE_DUPLICATES if is_twice else Verdict.PROVEN
    assert judged.verdict is (proven if is_whole else Verdict.NOT_PROVEN), judged


def kill_syphons(
    namespaces: LocalNamespaces, pair: KilledPair, seed: int, count: int, durability: Durability
) -> Counter[str]:
    """Kills so many syphons with each transport. Returns figures."""
    figures: Counter[str] = Counter()
    # Some sends are refused, so that syphons put messages aside and recall them.
    fault = namespaces["primary"].faults.set("server-busy", points=["send"], probability=0.25, seed=seed)
    for number, plan in enumerate(syphon_kills(Random(seed), count)):
        pair.fill([f"{number}-{part}" for part in range(FILL)])
        for transport in TRANSPORTS:
            work = pair.syphon(transport=transport, durability=durability, plan=plan)
            place = KilledProcess(run_syphon, work, plan).until_killed()
            figures[f"{transport} killed: {place or 'at random'}"] += 1
            pair.check(f"kill {number} of {transport}: {plan}")
    namespaces["primary"].faults.clear(fault["id"])
    return figures


@pytest.mark.parametrize("seed", SEEDS)
def test_l1_after_each_kill_of_a_syphon_the_ledger_agrees_with_the_queues(
    namespaces: LocalNamespaces, pair: KilledPair, seed: int
) -> None:
    count = min(KILLS, KILLS_PER_RUN)
    figures = kill_syphons(namespaces, pair, seed, count, "process")
    judge(pair, figures)
    assert figures["delivered"] == count * FILL
    assert figures["possibly_duplicated"] <= count * len(TRANSPORTS) * WINDOW
    if count >= KILLS_PER_RUN:
        assert [place for place in PLACES if not any(figures[f"{one} killed: {place}"] for one in TRANSPORTS)] == []


@pytest.mark.thorough
def test_l1_a_syphon_with_a_lazy_ledger_records_each_delivery_before_its_completion_too(
    namespaces: LocalNamespaces, pair: KilledPair
) -> None:
    """What else its dead writers have not written is not known, so nothing is proven."""
    figures = kill_syphons(namespaces, pair, 1, len(PLACES), "lazy")
    judge(pair, figures, is_whole=False)


@pytest.mark.thorough
def test_l1_after_a_kill_every_message_in_the_dead_letter_queue_is_dead_lettered_by_the_ledger(
    pair: KilledPair,
) -> None:
    figures: Counter[str] = Counter()
    before = pair.dead_letters()
    for number, place in enumerate(budget(1, 1, 20) * DEAD_LETTER_PLACES):
        plan = KillPlan(place)
        for transport in TRANSPORTS:
            pair.fill([f"{pair.entity}-{transport}-{number}-{part}" for part in range(3)], timetolive="not a number")
            work = pair.syphon(transport=transport, plan=plan)
            figures[f"{transport} killed: {KilledProcess(run_syphon, work, plan).until_killed()}"] += 1
            found = pair.check(f"kill {number} of {transport}: {plan}")
            dead = pair.dead_letters() - before
            pair.wrong += [f"{name}: a dead letter, and not by the ledger" for name in dead - ids(found.dead_lettered)]
    pair.drain()
    found = pair.check("after the drain", is_over=True)
    print(dict(sorted(figures.items())))
    assert not pair.wrong, "\n".join([f"{len(pair.wrong)} wrong", *pair.wrong[:20]])
    assert ids(found.dead_lettered) == pair.dead_letters() - before == pair.safe
    assert found.in_backlog.total() == 0
    assert {f"{one} killed: {place}" for one in TRANSPORTS for place in DEAD_LETTER_PLACES} <= figures.keys()


@pytest.mark.parametrize("is_redirected", [False, True])
def test_l1_after_each_kill_of_the_dead_letter_tool_the_ledger_agrees_with_the_queues(
    pair: KilledPair, is_redirected: bool
) -> None:
    """Each place has messages of its own. Those that are dead letters after the kill are resubmitted at the end."""
    figures: Counter[str] = Counter()
    to = pair.elsewhere if is_redirected else None
    places = budget(1, 3, 20) * RESUBMIT_PLACES

    def resubmission(prefix: str, plan: KillPlan) -> KilledProcess:
        work = Resubmission(pair.secondary, QUEUE, pair.ledger, prefix, to, plan)
        return KilledProcess(run_resubmission, work, plan)

    for number, place in enumerate(places):
        prefix = f"{pair.entity}-{number}-"
        # Not earlier: a killed program keeps the locks of all dead letters that it received.
        pair.dead_letter([f"{prefix}{part}" for part in range(3)])
        figures[f"killed: {resubmission(prefix, KillPlan(place)).until_killed()}"] += 1
        found = pair.check(f"kill at {place}")
        # No message may be on its way for ever: what is not at the one destination is at the other.
        assert found.accepted.total() == len(pair.safe)
        assert ids(found.in_backlog) | ids(found.dead_lettered) == pair.safe
    while pair.dead_letters() & pair.safe:  # the killed programs hold some for as long as their locks last
        resubmission(f"{pair.entity}-", KillPlan()).join(60.0)
    judge(pair, figures)
    at_home, elsewhere = pair.arrived.ever(), pair.arrived_elsewhere.ever()
    assert (set(elsewhere) if is_redirected else set(at_home)) == pair.safe
    assert not (at_home if is_redirected else elsewhere)
    assert {f"killed: {place}" for place in places} <= figures.keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_l2_after_each_kill_of_an_application_every_message_it_reported_safe_is_in_the_ledger(
    pair: KilledPair, seed: int
) -> None:
    """In each round four applications are killed: one of each kind, at the same time, with the same ledger."""
    figures: Counter[str] = Counter()
    plans = application_kills(Random(seed), min(KILLS, KILLS_PER_RUN))
    for number, plan in enumerate(plans):
        running: list[tuple[Application, KilledProcess]] = []
        for driver, is_diverted in APPLICATIONS:
            name = f"{driver}-{'diverted' if is_diverted else 'healthy'}-{number}"
            # Some healthy applications also bring home what the diverted ones sent. In a round with kills of a syphon,
            # one application has a syphon, and the others are killed at random instants.
            is_returned = plan.place == RETURNED
            returns = driver == (SYNC, AIO)[number // 6 % 2] if is_returned else number % 5 == 4
            has_syphon = returns and not is_diverted
            work = Application(
                primary=pair.primary,
                secondary=pair.secondary,
                entity=pair.entity,
                ledger=pair.ledger,
                told=pair.folder / f"{name}.told",
                name=name,
                driver=driver,
                is_diverted=is_diverted,
                has_syphon=has_syphon,
                plan=KillPlan(seconds=RANDOM_SECONDS) if is_returned and not has_syphon else plan,
            )
            running.append((work, KilledProcess(run_application, work, work.plan)))
        for work, process in running:
            figures[f"{work.driver} killed: {process.until_killed() or 'at random'}"] += 1
            safe = reported_safe(work.told)
            figures[f"reported safe: {work.driver}, {'diverted' if work.is_diverted else 'healthy'}"] += len(safe)
            pair.safe |= safe
        found = pair.check(f"round {number}: {plan}")
        figures["accepted without an entry"] = len(pair.not_accepted(found))
    judge(pair, figures)
    killed = sum(figures[f"{driver} killed: {ACCEPTED}"] for driver in (SYNC, AIO))
    assert figures["accepted without an entry"] >= killed > 0
    if len(plans) >= KILLS_PER_RUN:
        assert all(figures[f"{driver} killed: {RETURNED}"] for driver in (SYNC, AIO))
    # Each application has reported something as safe.
    assert min(figures[name] for name in figures if name.startswith("reported safe")) >= len(plans)


@pytest.mark.thorough
def test_the_count_from_the_files_is_the_count_of_the_official_client(pair: KilledPair) -> None:
    names = ["once", "twice", "twice", "deferred", "completed"]
    messages = [ServiceBusMessage(marked_body(name), message_id=name) for name in names]
    with (
        ServiceBusClient.from_connection_string(pair.primary) as client,
        client.get_queue_sender(pair.entity) as sender,
        client.get_queue_receiver(pair.entity) as receiver,
    ):
        sender.send_messages(messages)
        sender.schedule_messages(ServiceBusMessage(marked_body("later"), message_id="later"), later())
        assert pair.arrived.ever() == Counter([*names, "later"])
        for message in receiver.receive_messages(len(names), max_wait_time=5):
            if message.message_id == "deferred":
                receiver.defer_message(message)
            elif message.message_id == "completed":
                receiver.complete_message(message)
        peeked = Counter(str(one.message_id) for one in receiver.peek_messages(100, sequence_number=1))
    assert pair.arrived.all() == peeked == Counter(["once", "twice", "twice", "deferred", "later"])
