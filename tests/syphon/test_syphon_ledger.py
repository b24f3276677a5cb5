"""The entries that a syphon writes for sends and completions let the balance find losses and duplicates (M1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from twinbus.backlog import FailureKind
from twinbus.ledger import Balance, Intent, Ledger, LedgerOptions, MessageKey, Role, Stage, State, balance, read_ledger
from twinbus.namespace import find_free_port
from twinbus.syphon.broker_clock import BrokerClock
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.progress import ProgressCounter
from twinbus.syphon.syphon_ledger import SyphonLedger
from twinbus.syphon.transport import HeldMessage, OutgoingMessage, SendFailedError

QUEUE = "contoso/x-servicebus-transfer/0"
A, B = (MessageKey("contoso/orders", name) for name in "ab")


@dataclass(frozen=True, eq=False)
class Stored:
    message_id: str
    sequence_number: int = 1
    size: int = 10
    unanswered: bool = False
    locked_until: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    enqueued_time: datetime = datetime(2026, 1, 1, tzinfo=UTC)


class Case:
    """Two messages that a client put into the backlog."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder, Role.SYPHON, LedgerOptions(on_error="stop"))
        self.syphon_ledger = SyphonLedger(self.ledger, "contoso", "paris", ProgressCounter(0.0))
        self.messages = [OutgoingMessage("Orders", name, 10, b"", Stored(name)) for name in "ab"]
        self.ledger.begin(Stage.SEND_BACKLOG, "paris", QUEUE, ["a", "b"], 20, "contoso/orders").end()

    def completed(self, lost: list[HeldMessage], why: str = "lock_lost") -> None:
        self.syphon_ledger.completed(QUEUE, "Orders", self.messages, lost, why, 0.1)

    def delivered(self) -> None:
        self.syphon_ledger.send_succeeded(
            self.syphon_ledger.begin_send("Orders", self.messages), "Orders", self.messages, 0.0
        )

    def balance(self) -> Balance:
        self.ledger.close()
        return balance(read_ledger(self.folder))


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    found = Case(tmp_path)
    yield found
    found.ledger.close()


def test_what_was_completed_and_never_delivered_is_lost(case: Case) -> None:
    case.completed([])
    assert case.balance().lost == {A: 1, B: 1}


def test_what_was_delivered_and_completed_is_nowhere_else(case: Case) -> None:
    case.delivered()
    case.completed([])
    found = case.balance()
    assert found.delivered == {A: 1, B: 1}
    assert not found.lost + found.in_backlog + found.unknown + found.duplicated + found.possibly_duplicated


def test_y4_a_lock_that_was_lost_makes_a_possible_duplicate_of_that_message_alone(case: Case) -> None:
    case.delivered()
    case.completed([case.messages[1].held])
    found = case.balance()
    assert found.possibly_duplicated == {B: 1}
    assert found.delivered == {A: 1, B: 1}


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("kind", [FailureKind.CONNECTION_LOST, FailureKind.ENTITY_DISABLED])
def test_a_send_that_was_refused_or_never_left_duplicates_nothing(case: Case, kind: FailureKind, refused: bool) -> None:
    lost = case.syphon_ledger.begin_send("Orders", case.messages)
    case.syphon_ledger.send_failed(lost, SendFailedError("Orders", kind, case.messages, refused=refused), [], 0.0)
    case.delivered()
    case.completed([])
    found = case.balance()
    assert found.delivered == {A: 1, B: 1}
    assert found.possibly_duplicated == ({} if refused else {A: 1, B: 1})


@pytest.mark.parametrize("failures", [[], [False], [True, False], [False, False, True]])
@pytest.mark.parametrize("lock_lost", [False, True])
def test_l6_the_summary_counts_the_duplicates_that_the_ledger_finds(
    case: Case, failures: list[bool], lock_lost: bool
) -> None:
    """A message of which some sends had no answer, or whose lock was lost so that it was delivered again."""
    for refused in failures:
        begun = case.syphon_ledger.begin_send("Orders", case.messages)
        error = SendFailedError("Orders", FailureKind.TIMEOUT, case.messages, refused=refused)
        case.syphon_ledger.send_failed(begun, error, [], 0.0)
    if lock_lost:
        case.delivered()
        case.completed([one.held for one in case.messages])
    case.delivered()
    case.completed([])
    found = case.balance()
    assert found.delivered == {A: 1, B: 1}
    assert case.syphon_ledger.counts.total.possible_duplicates == (found.duplicated + found.possibly_duplicated).total()


async def test_a_send_without_a_connection_never_left() -> None:
    nobody = f"Endpoint=sb://localhost:{find_free_port()};SharedAccessKeyName=k;SharedAccessKey=eA==;"
    transport = NativeTransport(f"{nobody}UseDevelopmentEmulator=true", f"{nobody}UseDevelopmentEmulator=true")
    with pytest.raises(SendFailedError) as raised:
        await transport.destination("orders").send([OutgoingMessage("orders", "a", 1, b"x", Stored("a"))])
    assert raised.value.refused
    assert raised.value.kind is FailureKind.CONNECTION_LOST
    await transport.close()


def test_a_completion_without_an_answer_may_have_happened(case: Case) -> None:
    refused = case.syphon_ledger.begin_send("Orders", case.messages)
    error = SendFailedError("Orders", FailureKind.SERVER_BUSY, case.messages, refused=True)
    case.syphon_ledger.send_failed(refused, error, [], 0.0)
    case.completed([message.held for message in case.messages], "timeout")
    found = case.balance()
    assert found.unknown == {A: 1, B: 1}
    assert not found.lost


def test_what_was_delivered_can_be_completed_while_the_ledger_refuses_new_operations(case: Case) -> None:
    case.delivered()
    case.ledger.close()
    case.completed([])
    assert case.syphon_ledger.counts.operations[Stage.COMPLETE_BACKLOG] == 2


# --- clocks ----------------------------------------------------------------------------------------------------------

NOON = 1_800_000_000_000


def test_l5_a_return_has_the_time_that_each_message_waited_by_the_brokers_clock(case: Case) -> None:
    messages = [one._replace(enqueued=NOON - 1000 * waited) for one, waited in zip(case.messages, (5, 3), strict=True)]
    case.syphon_ledger.begin_send("Orders", messages, NOON)
    case.ledger.close()
    (found,) = [one for one in read_ledger(case.folder) if isinstance(one, Intent)]
    assert (found.ids, found.broker_at, found.waited) == (("a", "b"), NOON, (5000, 3000))


def test_l5_a_message_without_an_arrival_leaves_out_the_times_of_its_load(case: Case) -> None:
    case.syphon_ledger.begin_send("Orders", [case.messages[0]._replace(enqueued=NOON), case.messages[1]], NOON)
    case.ledger.close()
    (found,) = [one for one in read_ledger(case.folder) if isinstance(one, Intent)]
    assert (found.broker_at, found.waited) == (NOON, ())


def test_l5_the_clock_is_recorded_once_and_when_it_changed_by_more_than_a_second(case: Case) -> None:
    clock = BrokerClock(60)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    clock.observe(start + timedelta(seconds=60), start - timedelta(hours=1), 0.0)
    for seconds, ahead in ((0, 1200), (1, 1200.9), (2, 1199.1), (3, 1201.1), (4, 1201), (5, 0), (6, 0.9)):
        case.syphon_ledger.compare_clocks(QUEUE, clock, seconds, start + timedelta(seconds=seconds + ahead))
    case.ledger.close()
    found = [one.facts for one in read_ledger(case.folder) if isinstance(one, State)]
    assert found == [{"ahead": ahead, "queue": QUEUE, "lock": 60, "lock_known": True} for ahead in (1200, 1201.1, 0)]


def test_l5_queues_that_show_different_times_are_recorded_once_each(case: Case) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    clocks = {"a": BrokerClock(60), "b": BrokerClock(60), "c": BrokerClock()}
    for clock in clocks.values():  # the lock of "c" is 100 s, and it is not known
        clock.observe(start + timedelta(seconds=100 if clock.lock_seconds is None else 60), start, 0.0)
    for seconds in range(5):
        for queue, clock in clocks.items():
            case.syphon_ledger.compare_clocks(queue, clock, seconds, start + timedelta(seconds=seconds))
    case.ledger.close()
    found = [one.facts for one in read_ledger(case.folder) if isinstance(one, State)]
    assert [(one["queue"], one["ahead"], one["lock_known"]) for one in found] == [("a", 0, True), ("c", -40, False)]


def test_l5_without_a_message_there_is_no_clock_to_compare_with(case: Case) -> None:
    case.syphon_ledger.compare_clocks(QUEUE, BrokerClock(60), 0.0, datetime.now(UTC))
    case.ledger.close()
    assert not [one for one in read_ledger(case.folder) if isinstance(one, State)]
