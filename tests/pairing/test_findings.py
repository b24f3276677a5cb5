"""What the doctor's facts mean: which finding, how bad, and what to do next. Pure tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.failover_events import DrillCause
from twinbus.pairing.decide.known_state import FailoverRecord
from twinbus.pairing.findings import (
    RIGHTS,
    CheckFailure,
    EntityProperties,
    Finding,
    LedgerFolderFacts,
    PrimaryFacts,
    QueueLook,
    SecondaryFacts,
    Severity,
    StateFacts,
    findings_of,
    overall,
)
from twinbus.pairing.inspection import Depth, FoundQueue, Inspection, PingCheck, PropertyDifference, Visibility
from twinbus.pairing.provisioning import LosingProperty

K = FailureKind
BROKEN, ATTENTION, NOTE = Severity
GOOD = PrimaryFacts("primary", may_send=True)
QUEUES = tuple(FoundQueue(f"p/x-servicebus-transfer/{index}", Depth()) for index in range(2))
INSPECTED = Inspection("p", "secondary", QUEUES, (), (), ())
WELL = SecondaryFacts("secondary", inspection=INSPECTED, clock=0.2, look_seconds=5.0)
WAITING = QueueLook(QUEUES[0].path, "orders", 90.0)


def refused(kind: FailureKind) -> CheckFailure:
    return CheckFailure(kind, "the text of the service")


def inspected(*queues: FoundQueue, **changes: object) -> SecondaryFacts:
    found = replace(INSPECTED, queues=queues or QUEUES, **changes)  # type: ignore[arg-type]  # the names vary
    return replace(WELL, inspection=found)


def only(*findings: Finding) -> Finding:
    (finding,) = findings
    return finding


def test_a_pair_without_fault_has_no_finding() -> None:
    assert findings_of(GOOD, WELL, LedgerFolderFacts("ledger", free=2**40)) == ()
    assert overall(()) is None


@pytest.mark.parametrize("kind", FailureKind)
def test_a_primary_that_cannot_be_used_is_broken_if_senders_do_not_divert_and_else_needs_attention(
    kind: FailureKind,
) -> None:
    found = only(*findings_of(replace(GOOD, failure=refused(kind)), WELL))
    if kind in (K.AUTHENTICATION, K.UNAUTHORIZED, K.CERTIFICATE, K.TOKEN_UNAVAILABLE):
        assert (found.severity, found.check) == (BROKEN, "primary_refused")
    else:
        assert (found.severity, found.check) == (ATTENTION, "primary_unreachable")
        assert "senders divert" in found.next_step
    assert found.cause == "the text of the service"


@pytest.mark.parametrize("kind", FailureKind)
def test_a_secondary_that_cannot_be_used_is_broken(kind: FailureKind) -> None:
    found = only(*findings_of(GOOD, SecondaryFacts("secondary", failure=refused(kind))))
    assert found.severity is BROKEN
    assert "Nothing can be diverted" in found.what


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (K.DNS, "does not resolve"),
        (K.CONNECTION_LOST, "accepts no connection"),
        (K.TIMEOUT, "was silent"),
        (K.CERTIFICATE, "is not trusted"),
        (K.TLS, "does not speak TLS"),
        (K.PROTOCOL, "does not speak TLS and AMQP"),
        (K.AUTHENTICATION, "refuses the key"),
        (K.SERVER_BUSY, "answers with an error (server_busy)"),
    ],
)
def test_errors_of_the_network_are_told_in_plain_words(kind: FailureKind, words: str) -> None:
    assert words in only(*findings_of(GOOD, SecondaryFacts("secondary", failure=refused(kind)))).what
    assert words in only(*findings_of(replace(GOOD, failure=refused(kind)), WELL)).what


@pytest.mark.parametrize(
    ("kind", "check", "severity"),
    [
        (K.UNAUTHORIZED, "primary_send_missing", BROKEN),
        (K.ENTITY_NOT_FOUND, "entity_missing", ATTENTION),
        (K.ENTITY_DISABLED, "entity_unusable", ATTENTION),
        (K.QUOTA_EXCEEDED, "entity_unusable", ATTENTION),
    ],
)
def test_an_entity_that_applications_cannot_send_to_is_named(kind: FailureKind, check: str, severity: Severity) -> None:
    found = only(*findings_of(replace(GOOD, entities={"orders": refused(kind)}), WELL))
    assert (found.check, found.severity) == (check, severity)
    assert "orders" in found.what


@pytest.mark.parametrize(
    ("right", "changes", "severity"),
    [
        ("Send", {"send": refused(K.UNAUTHORIZED)}, BROKEN),
        ("Listen", {"listen": refused(K.UNAUTHORIZED)}, ATTENTION),
        ("Manage", {"management": refused(K.UNAUTHORIZED)}, ATTENTION),
    ],
)
def test_a_missing_right_on_the_secondary_is_named_with_the_verbs_that_need_it(
    right: str, changes: dict[str, CheckFailure], severity: Severity
) -> None:
    found = only(*findings_of(GOOD, replace(WELL, **changes)))  # type: ignore[arg-type]  # the names vary
    assert (found.check, found.severity) == (f"secondary_{right.lower()}_missing", severity)
    assert f"no {right} right" in found.what
    assert RIGHTS["secondary", right] in found.next_step


OPEN = replace(GOOD, entities={"orders": None})
SIZED = EntityProperties("Active", 0, 1000)


@pytest.mark.parametrize(("size", "share"), [(799, None), (800, "80%"), (1000, "100%")])
def test_an_entity_that_is_nearly_full_needs_attention_although_its_links_open(size: int, share: str | None) -> None:
    found = findings_of(replace(OPEN, properties={"orders": SIZED._replace(size=size)}), WELL)
    whats = [] if share is None else [f"orders on the primary is {share} full."]
    assert [(one.severity, one.check, one.what) for one in found] == [
        (ATTENTION, "entity_nearly_full", what) for what in whats
    ]


def test_an_entity_without_a_limit_is_never_full() -> None:
    assert findings_of(replace(OPEN, properties={"orders": EntityProperties("Active", 9, 0)}), WELL) == ()


@pytest.mark.parametrize("status", ["Disabled", "SendDisabled", "ReceiveDisabled"])
def test_an_entity_that_somebody_disabled_needs_attention(status: str) -> None:
    found = only(*findings_of(replace(OPEN, properties={"orders": SIZED._replace(status=status)}), WELL))
    assert (found.severity, found.check) == (ATTENTION, "entity_not_active")
    assert status in found.what


def test_an_entity_that_refused_a_link_is_reported_once() -> None:
    facts = replace(GOOD, entities={"orders": refused(K.ENTITY_DISABLED)})
    disabled = replace(facts, properties={"orders": SIZED._replace(status="Disabled")})
    assert only(*findings_of(disabled, WELL)) == only(*findings_of(facts, WELL))


def test_without_its_size_nobody_knows_whether_an_entity_accepts_messages() -> None:
    unread = replace(GOOD, entities={"orders": None, "bills": None}, properties={"bills": SIZED})
    found = only(*findings_of(unread, WELL))
    assert (found.severity, found.check) == (NOTE, "entity_accepts_untested")
    assert "Links to orders open" in found.what
    found = only(*findings_of(replace(unread, properties_failure=refused(K.UNAUTHORIZED)), WELL))
    assert "the text of the service" in found.cause


def test_what_was_not_tested_is_a_note() -> None:
    found = only(*findings_of(replace(GOOD, may_send=None), WELL))
    assert (found.severity, found.check) == (NOTE, "primary_send_untested")
    pings = PingCheck(Visibility.UNKNOWN, "the check failed")
    assert only(*findings_of(replace(GOOD, pings=pings), WELL)).severity is NOTE


@pytest.mark.parametrize(("ahead", "words"), [(5.0, "5 s ahead of"), (-7200.0, "2 hours behind")])
def test_a_large_clock_offset_needs_attention(ahead: float, words: str) -> None:
    found = only(*findings_of(GOOD, replace(WELL, clock=ahead)))
    assert (found.severity, found.check) == (ATTENTION, "clock_offset")
    assert words in found.what
    refusing = replace(WELL, clock=ahead, failure=refused(K.AUTHENTICATION))
    assert {one.check for one in findings_of(GOOD, refusing)} == {"secondary_refused", "clock_offset"}
    assert findings_of(GOOD, replace(WELL, clock=4.9 if ahead > 0 else -4.9)) == ()


# --- queues ----------------------------------------------------------------------------------------------------------


def test_p6_some_missing_queues_need_attention_and_none_at_all_is_broken_if_nobody_can_create_them() -> None:
    some = only(*findings_of(GOOD, inspected(*QUEUES[:1], missing=(QUEUES[1].path,))))
    assert (some.severity, some.what) == (ATTENTION, "1 of 2 backlog queues are missing.")
    assert "twinbus provision" in some.next_step
    none = replace(INSPECTED, queues=(), missing=tuple(queue.path for queue in QUEUES))
    assert only(*findings_of(GOOD, replace(WELL, inspection=none))).severity is ATTENTION
    weak = replace(WELL, inspection=none, management=refused(K.UNAUTHORIZED), counted=False)
    assert [one.check for one in findings_of(GOOD, weak) if one.severity is BROKEN] == ["queues_missing"]


def test_p4_a_wrong_primary_name_is_suggested_by_the_orphans() -> None:
    orphan = FoundQueue("contoso/x-servicebus-transfer/0", Depth())
    facts = replace(WELL, inspection=replace(INSPECTED, queues=(), missing=("p/0",), orphans=(orphan,)))
    missing = next(one for one in findings_of(GOOD, facts) if one.check == "queues_missing")
    assert "contoso" in missing.next_step


def test_p6_equal_differences_of_many_queues_are_one_finding() -> None:
    differs = PropertyDifference("lock_duration", "PT1M", "0:00:30")
    losing = LosingProperty("status", "Disabled", "senders cannot use the queue")
    unlike = [replace(queue, differences=(differs,), losing=(losing,)) for queue in QUEUES]
    found = {one.check: one for one in findings_of(GOOD, inspected(*unlike))}
    assert set(found) == {"queue_differs", "queue_loses_messages"}
    for one in found.values():
        assert QUEUES[0].path in one.what
        assert QUEUES[1].path in one.what
        assert one.severity is ATTENTION


def test_p6_a_property_that_loses_messages_is_not_reported_again_as_a_difference() -> None:
    queue = replace(
        QUEUES[0],
        differences=(PropertyDifference("status", "Active", "Disabled"),),
        losing=(LosingProperty("status", "Disabled", "senders cannot use the queue"),),
    )
    assert only(*findings_of(GOOD, inspected(queue))).check == "queue_loses_messages"


@pytest.mark.parametrize(("size", "reported"), [(799, False), (800, True), (1000, True)])
def test_a_backlog_queue_near_its_size_is_reported(size: int, reported: bool) -> None:
    found = findings_of(GOOD, inspected(replace(QUEUES[0], size=size, capacity=1000)))
    assert [one.check for one in found] == (["queue_nearly_full"] if reported else [])


def test_p6_extras_with_messages_need_attention_and_empty_ones_are_a_note() -> None:
    full, empty = FoundQueue("p/x-servicebus-transfer/8", Depth(active=3)), FoundQueue("p/x/9", Depth())
    found = {one.check: one for one in findings_of(GOOD, inspected(extras=(full, empty)))}
    assert found["extras_hold_messages"].severity is ATTENTION
    assert "3 messages" in found["extras_hold_messages"].what
    assert found["extras"].severity is NOTE
    assert "--clean" in found["extras"].next_step


def test_p6_orphans_are_a_note_that_names_their_primary() -> None:
    orphan = FoundQueue("contoso/x-servicebus-transfer/0", Depth(active=2))
    found = only(*findings_of(GOOD, inspected(orphans=(orphan,))))
    assert (found.severity, found.check) == (NOTE, "orphans")
    assert "contoso" in found.what
    assert "2 messages" in found.cause


# --- messages --------------------------------------------------------------------------------------------------------


def deep(active: int = 76, dead: int = 0) -> tuple[FoundQueue, ...]:
    return (replace(QUEUES[0], depth=Depth(active, dead)), QUEUES[1])


def test_y6_dead_letters_need_attention_with_their_number_and_the_next_step() -> None:
    found = only(*findings_of(GOOD, inspected(*deep(0, 1234))))
    assert (found.severity, found.check) == (ATTENTION, "dead_letters")
    assert found.what.startswith("1,234 messages")
    assert "`twinbus deadletter list`" in found.next_step


def test_y1_messages_that_did_not_move_need_attention_and_the_text_claims_no_more_than_was_seen() -> None:
    found = only(*findings_of(GOOD, replace(inspected(*deep()), looks=(WAITING,))))
    assert (found.severity, found.check) == (ATTENTION, "backlog_waits")
    assert found.what == "76 messages are in the backlog, the oldest for 90 s (to orders)."
    assert "did not move within 5 s. Perhaps no syphon runs." in found.cause
    assert "cannot be seen" in found.cause


def test_y1_messages_that_move_are_a_note() -> None:
    moving = replace(inspected(*deep()), looks=(WAITING._replace(moved=True),))
    assert only(*findings_of(GOOD, moving)).severity is NOTE


def test_y1_one_queue_that_stands_still_is_enough() -> None:
    looks = (WAITING._replace(moved=True), QueueLook(QUEUES[1].path, "events", 5.0))
    found = only(*findings_of(GOOD, replace(inspected(*deep()), looks=looks)))
    assert found.check == "backlog_waits"


@pytest.mark.parametrize(
    ("ledger", "words"),
    [
        (LedgerFolderFacts("l", syphons=("syphon-host-1-abc",)), "A syphon that writes this ledger runs"),
        (LedgerFolderFacts("l"), "No syphon that writes this ledger runs."),
        (LedgerFolderFacts("l", "It does not exist."), "Perhaps no syphon runs."),
        (LedgerFolderFacts("l", written=False), "Perhaps no syphon runs."),
    ],
)
def test_y1_a_ledger_says_whether_a_syphon_runs(ledger: LedgerFolderFacts, words: str) -> None:
    found = findings_of(GOOD, replace(inspected(*deep()), looks=(WAITING,)), ledger)
    assert words in next(one for one in found if one.check == "backlog_waits").cause


def test_s15_a_hold_is_named_as_a_reason_why_messages_wait() -> None:
    held = StateFacts("state", held=("orders",))
    found = findings_of(GOOD, replace(inspected(*deep()), looks=(WAITING,)), None, held)
    waits = next(one for one in found if one.check == "backlog_waits")
    assert "An operator holds orders" in waits.cause
    assert "--release" in waits.next_step


def test_y1_messages_wait_for_a_primary_that_is_away() -> None:
    away = replace(GOOD, failure=refused(K.CONNECTION_LOST))
    found = findings_of(away, replace(inspected(*deep()), looks=(WAITING,)))
    waits = next(one for one in found if one.check == "backlog_waits")
    assert "primary cannot be used" in waits.cause
    assert "syphon" in waits.next_step


def test_y5_messages_put_aside_are_counted_by_destination() -> None:
    looks = (QueueLook("a", aside=(("orders", 2), ("events", 1))), QueueLook("b", aside=(("orders", 1),)))
    found = only(*findings_of(GOOD, replace(WELL, looks=looks)))
    assert (found.severity, found.check) == (ATTENTION, "messages_put_aside")
    assert found.what.startswith("At least 4 messages")
    assert found.cause == "For events (1), orders (3)."


def test_without_the_right_to_count_numbers_are_lower_limits() -> None:
    facts = replace(inspected(*deep(1, 1)), looks=(WAITING,), counted=False)
    assert {one.check: one.what.split(" in ")[0] for one in findings_of(GOOD, facts)} == {
        "dead_letters": "At least 1 message is",
        "backlog_waits": "At least 1 message is",
    }


# --- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "check"),
    [
        (LedgerFolderFacts("l", "It does not exist."), "ledger_unusable"),
        (LedgerFolderFacts("l", failing=("client-host-1-abc",)), "ledger_entries_missing"),
        (LedgerFolderFacts("l", free=2**20), "ledger_disk_full"),
    ],
)
def test_l7_a_ledger_that_cannot_be_used_needs_attention(facts: LedgerFolderFacts, check: str) -> None:
    found = only(*findings_of(GOOD, WELL, facts))
    assert (found.severity, found.check) == (ATTENTION, check)


# --- the shared state ------------------------------------------------------------------------------------------------

UNSHARED = LedgerFolderFacts("l", syphons=("syphon-host-1-abc",), unshared_syphons=("syphon-host-1-abc",))


def test_s16_a_state_that_cannot_be_read_needs_attention() -> None:
    found = only(*findings_of(GOOD, WELL, None, StateFacts("folder f", "holds.json: damaged")))
    assert (found.severity, found.check, found.cause) == (ATTENTION, "state_unreadable", "holds.json: damaged")
    assert "remove it" in found.next_step
    assert "`twinbus drill --release`" in found.next_step


def test_s15_what_is_held_is_named_although_another_part_of_the_state_cannot_be_read() -> None:
    found = findings_of(GOOD, WELL, UNSHARED, StateFacts("folder f", "failover-1.json: damaged", ("orders",)))
    assert {one.check for one in found} == {"state_unreadable", "syphon_without_state", "held"}


def test_s15_a_hold_is_a_note_and_a_syphon_that_it_does_not_reach_needs_attention() -> None:
    held = StateFacts("folder f", held=("orders", "bills"))
    assert findings_of(GOOD, WELL, None, StateFacts("folder f")) == ()
    missing = only(*findings_of(GOOD, WELL, None, StateFacts("folder f", is_missing=True)))
    assert (missing.severity, missing.check) == (NOTE, "state_missing")
    note = only(*findings_of(GOOD, WELL, None, held))
    assert (note.severity, note.what) == (Severity.NOTE, "An operator holds orders, bills.")
    syphon, again = findings_of(GOOD, WELL, UNSHARED, held)
    assert again == note
    assert (syphon.severity, syphon.check) == (ATTENTION, "syphon_without_state")
    assert "syphon-host-1-abc" in syphon.what
    assert "orders, bills" in syphon.cause


def test_s15_a_syphon_without_the_state_is_named_while_nothing_is_held() -> None:
    found = only(*findings_of(GOOD, WELL, UNSHARED, StateFacts("folder f")))
    assert (found.severity, found.check) == (Severity.NOTE, "syphon_without_state")
    assert findings_of(GOOD, WELL, UNSHARED) == ()


RECORD = FailoverRecord("orders", K.QUOTA_EXCEEDED, 0.0, 8100.0, 1800.0, 12, 7190.0, "host:1:x")


def test_s14_s16_a_failover_in_the_state_needs_attention_with_its_age_pings_and_trials() -> None:
    found = only(*findings_of(GOOD, WELL, None, StateFacts("folder f", failovers=(RECORD,), read_at=7200.0)))
    assert (found.severity, found.check) == (ATTENTION, "failed_over")
    assert found.what == "orders has been failed over for 2 hours (quota_exceeded)."
    assert "The next ping is in 15 minutes; then one every 30 minutes." in found.cause
    assert "12 trials failed" in found.cause


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"next_ping_at": 7200.0}, "The next ping is due"),
        ({"failed_trials": 1}, "1 trial failed"),
        ({"cause": DrillCause.FORCED}, "(forced)"),
    ],
)
def test_s16_a_failover_is_described_by_its_record(changes: dict[str, object], words: str) -> None:
    record = replace(RECORD, **changes)  # type: ignore[arg-type] # the names vary
    found = only(*findings_of(GOOD, WELL, None, StateFacts("folder f", failovers=(record,), read_at=7200.0)))
    assert words in f"{found.what} {found.cause}"


def test_s14_a_failover_without_failed_trials_mentions_none() -> None:
    record = replace(RECORD, failed_trials=0)
    found = only(*findings_of(GOOD, WELL, None, StateFacts("folder f", failovers=(record,), read_at=7200.0)))
    assert "trial" not in found.cause


def test_s16_a_failover_that_no_process_believes_is_no_finding() -> None:
    state = StateFacts("folder f", failovers=(RECORD,), read_at=RECORD.written_at + 3 * RECORD.ping_interval + 1)
    assert findings_of(GOOD, WELL, None, state) == ()


# --- all of them -----------------------------------------------------------------------------------------------------

FAILURES = st.none() | st.builds(CheckFailure, st.sampled_from(FailureKind), st.just("text"))
DEPTHS = st.builds(Depth, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2))
FOUND = st.lists(
    st.builds(FoundQueue, st.sampled_from(["p/0", "p/1", "q/0"]), DEPTHS, size=st.integers(0, 9)), max_size=2
)
INSPECTIONS = st.none() | st.builds(
    Inspection,
    st.just("p"),
    st.just("s"),
    FOUND.map(tuple),
    st.lists(st.sampled_from(["p/2", "p/3"]), max_size=2).map(tuple),
    FOUND.map(tuple),
    FOUND.map(tuple),
)
PRIMARIES = st.builds(PrimaryFacts, st.just("host"), FAILURES, st.dictionaries(st.just("orders"), FAILURES))
SECONDARIES = st.builds(
    SecondaryFacts, st.just("host"), FAILURES, FAILURES, FAILURES, FAILURES, INSPECTIONS, st.booleans()
)


@pytest.mark.thorough
@given(PRIMARIES, SECONDARIES)
def test_every_finding_has_a_cause_and_a_next_step_and_the_worst_come_first(
    primary: PrimaryFacts, secondary: SecondaryFacts
) -> None:
    found = findings_of(primary, secondary)
    order = [list(Severity).index(one.severity) for one in found]
    assert order == sorted(order)
    for one in found:
        assert one.check.replace("_", "").isalpha()
        assert one.what.endswith(".")
        assert one.cause
        assert one.next_step.endswith((".", "?"))
    # What makes a pair unusable is never called well.
    if secondary.failure is not None:
        assert overall(found) is BROKEN
    if primary.failure is not None:
        assert overall(found) is not None
