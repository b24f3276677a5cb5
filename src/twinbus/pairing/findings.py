"""Decide what `twinbus doctor` reports on a pair: findings with severity, cause and next step.

The command line gathers facts (`PrimaryFacts`, `SecondaryFacts`, `LedgerFolderFacts`), and `findings_of` turns them
into findings. A finding is one of:

    broken      senders get errors, or nothing can be diverted, until somebody acts
    attention   the pair works, and somebody should act: messages may be late or lost later, or a check was not possible
    note        something to know; nothing needs to be done

A finding says only what the facts show. For example, nobody can see the receivers of a queue from outside. So the
doctor looks twice at the oldest message of each backlog queue, and reports that the message did not move.

This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.known_state import FailoverRecord, is_current

if TYPE_CHECKING:
    from twinbus.pairing.inspection import FoundQueue, Inspection, PingCheck

NEARLY_FULL: Final = 0.8
"""A queue or topic is reported if this part of its size is used."""
LARGE_CLOCK_OFFSET: Final = 5.0
"""Seconds. The broker's time is read from a header that has whole seconds."""
LEDGER_ROOM: Final = 256 * 2**20
"""Bytes. A ledger on a disk with less free space is reported."""
_LISTED: Final = 3


# --- findings --------------------------------------------------------------------------------------------------------


class Severity(StrEnum):
    """How bad a finding is; explained at the top of this module."""

    BROKEN = "broken"
    ATTENTION = "attention"
    NOTE = "note"


class Finding(NamedTuple):
    """One result of the doctor. `check` is a stable name for programs; the other fields are for a person."""

    severity: Severity
    check: str
    what: str
    cause: str
    next_step: str


_BROKEN, _ATTENTION, _NOTE = Severity

RIGHTS: Final[Mapping[tuple[str, str], str]] = {
    ("primary", "Send"): "applications, `twinbus syphon` and `twinbus drill`",
    ("secondary", "Send"): "applications (to divert), `twinbus drill` and `twinbus deadletter resubmit`",
    ("secondary", "Listen"): (
        "`twinbus syphon`, `twinbus deadletter`, `twinbus ledger audit`, `twinbus drill`, `twinbus doctor`, and pairs "
        "that check their backlog"
    ),
    ("secondary", "Manage"): '`twinbus provision`, `twinbus doctor`, and pairs with provision="create" (the default)',
}
"""Which programs need which right on which namespace."""


# --- facts -----------------------------------------------------------------------------------------------------------


class CheckFailure(NamedTuple):
    """Why a check failed: the kind, and the text of the error."""

    kind: FailureKind
    detail: str


class EntityProperties(NamedTuple):
    """What the management API shows of an entity. `size` and `capacity` are the used and the allowed bytes."""

    status: str
    size: int
    capacity: int


@dataclass(frozen=True, slots=True)
class PrimaryFacts:
    """What the checks of the primary found.

    `failure` is the reason why the primary could not be used at all. `entities` has the entities that were tested and,
    for each that accepts no sender, the reason. `properties` has those whose status and size were read, and
    `properties_failure` is the reason why the others are not there. `may_send` says whether the Send right was seen;
    None: not tested.
    """

    host: str
    failure: CheckFailure | None = None
    entities: Mapping[str, CheckFailure | None] = field(default_factory=dict)
    properties: Mapping[str, EntityProperties] = field(default_factory=dict)
    properties_failure: CheckFailure | None = None
    may_send: bool | None = None
    pings: PingCheck | None = None


class QueueLook(NamedTuple):
    """What two peeks at one backlog queue showed.

    `destination` and `age` (seconds) are those of the oldest message that no syphon put aside; None if there is none.
    `moved` says whether this message had left its place at the second look. `aside` is the number of deferred messages
    that were seen before it, by destination: a syphon put them aside.
    """

    queue: str
    destination: str | None = None
    age: float | None = None
    moved: bool = False
    aside: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SecondaryFacts:
    """What the checks of the secondary found.

    `failure` is the reason why the secondary could not be used over AMQP, and `management` the reason why its queues
    could not be listed. `send` and `listen` are the reasons why a backlog queue refused a sender or a peek; None if it
    accepted, or was not asked. `inspection` is None if nothing is known of the queues. With `counted` False, its counts
    are the messages that were seen, and there may be more. `look_seconds` is the time between the two looks. `clock` is
    the time by which this machine's clock is ahead of the broker's, in seconds; None if not known.
    """

    host: str
    failure: CheckFailure | None = None
    management: CheckFailure | None = None
    send: CheckFailure | None = None
    listen: CheckFailure | None = None
    inspection: Inspection | None = None
    counted: bool = True
    looks: tuple[QueueLook, ...] = ()
    look_seconds: float = 0.0
    clock: float | None = None


@dataclass(frozen=True, slots=True)
class LedgerFolderFacts:
    """What was found in the folder of a ledger. `syphons` are writers of syphons that are not dead.

    `written` is False if no program has written there. `unshared_syphons` are those of `syphons` that run without a
    shared state.
    """

    path: str
    problem: str | None = None
    written: bool = True
    failing: tuple[str, ...] = ()
    syphons: tuple[str, ...] = ()
    free: int | None = None
    unshared_syphons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What was found in the shared state at the time `read_at` (S16). `held` names what an operator holds."""

    location: str
    problem: str | None = None
    held: tuple[str, ...] = ()
    failovers: tuple[FailoverRecord, ...] = ()
    read_at: float = 0.0
    is_missing: bool = False
    """The folder does not exist."""


# --- rules -----------------------------------------------------------------------------------------------------------


def findings_of(
    primary: PrimaryFacts,
    secondary: SecondaryFacts,
    ledger: LedgerFolderFacts | None = None,
    state: StateFacts | None = None,
) -> tuple[Finding, ...]:
    """Return what the facts mean, the worst findings first."""
    found = [*_about_primary(primary), *_about_secondary(secondary), *_about_clock(secondary)]
    if secondary.inspection is not None:
        found += _about_queues(secondary.inspection, secondary)
        found += _about_messages(secondary.inspection, primary, secondary, ledger, () if state is None else state.held)
    if ledger is not None:
        found += _about_ledger(ledger)
    if state is not None:
        found += _about_state(state, ledger)
    order = list(Severity)
    return tuple(sorted(found, key=lambda one: order.index(one.severity)))


def overall(findings: Iterable[Finding]) -> Severity | None:
    """Return the worst severity above a note; None if all is well."""
    severities = {one.severity for one in findings}
    return next((one for one in (_BROKEN, _ATTENTION) if one in severities), None)


# The kinds with which a namespace refuses the key or the client, until a person acts. They never count towards failover
# (S2), so senders get these errors even while the secondary works.
_REFUSED: Final = frozenset(
    {FailureKind.AUTHENTICATION, FailureKind.UNAUTHORIZED, FailureKind.CERTIFICATE, FailureKind.TOKEN_UNAVAILABLE}
)


def _about_primary(facts: PrimaryFacts) -> Iterator[Finding]:
    failure = facts.failure
    if failure is not None:
        what, step = _in_plain_words("primary", facts.host, failure.kind)
        if failure.kind in _REFUSED:
            yield Finding(_BROKEN, "primary_refused", what, failure.detail, step)
        else:
            more = "Meanwhile senders divert, if the secondary works."
            yield Finding(_ATTENTION, "primary_unreachable", what, failure.detail, f"{step} {more}")
        return
    for entity, refused in facts.entities.items():
        if refused is None:
            continue
        if refused.kind is FailureKind.UNAUTHORIZED:
            yield _missing_right(_BROKEN, "primary", "Send", f"Nothing can be sent to {entity}.", refused.detail)
        elif refused.kind is FailureKind.ENTITY_NOT_FOUND:
            what = f"{entity} does not exist on the primary."
            step = "Create it, or correct its name. Senders get an error: a missing entity never fails over."
            yield Finding(_ATTENTION, "entity_missing", what, refused.detail, step)
        else:
            what, step = f"{entity} accepts no sender ({refused.kind}).", "Look at its status and size on the primary."
            yield Finding(_ATTENTION, "entity_unusable", what, refused.detail, step)
    for entity, properties in facts.properties.items():
        if facts.entities[entity] is None:
            yield from _about_properties(entity, properties)
    unread = [entity for entity, refused in facts.entities.items() if not refused and entity not in facts.properties]
    if unread:
        what = f"Links to {_listed(unread)} open. That messages are accepted was not tested."
        cause = "A full entity opens links too, and its status and size could not be read."
        if facts.properties_failure is not None:
            cause += f" {facts.properties_failure.detail}"
        step = "Look at status and size on the primary, or give a key with Manage."
        yield Finding(_NOTE, "entity_accepts_untested", what, cause, step)
    if facts.may_send is None:
        what = "The Send right on the primary was not tested. The key itself was accepted."
        cause = "The doctor knows no entity to open, and made no scratch queue."
        yield Finding(_NOTE, "primary_send_untested", what, cause, "Give --entity with a queue or topic.")
    if facts.pings is not None:
        what = f"Pings are {facts.pings.visibility} on the primary."
        yield Finding(_NOTE, "pings", what, f"{facts.pings.detail}.", facts.pings.advice)


def _about_properties(entity: str, found: EntityProperties) -> Iterator[Finding]:
    if found.status != "Active":
        what = f"{entity} on the primary has the status {found.status}."
        cause = "Somebody disabled it. Senders that are refused fail over; receivers that are refused get nothing."
        yield Finding(_ATTENTION, "entity_not_active", what, cause, "Set its status to Active.")
    if found.capacity and found.size >= NEARLY_FULL * found.capacity:
        what = f"{entity} on the primary is {found.size / found.capacity:.0%} full."
        cause = "A full entity opens links and takes pings, but no message: senders get errors, then fail over."
        step = "Receive its messages, or raise its size."
        yield Finding(_ATTENTION, "entity_nearly_full", what, cause, step)


def _about_secondary(facts: SecondaryFacts) -> Iterator[Finding]:
    if facts.failure is not None:
        what, step = _in_plain_words("secondary", facts.host, facts.failure.kind)
        check = "secondary_refused" if facts.failure.kind in _REFUSED else "secondary_unreachable"
        yield Finding(_BROKEN, check, f"{what} Nothing can be diverted.", facts.failure.detail, step)
        return
    if facts.send is not None and facts.send.kind is FailureKind.UNAUTHORIZED:
        yield _missing_right(_BROKEN, "secondary", "Send", "Nothing can be diverted with this key.", facts.send.detail)
    elif facts.send is not None:
        what, step = f"A backlog queue accepts no sender ({facts.send.kind}).", "Look at its status and size."
        yield Finding(_ATTENTION, "backlog_refuses_senders", what, facts.send.detail, step)
    if facts.listen is not None and facts.listen.kind is FailureKind.UNAUTHORIZED:
        what = "The messages in the backlog could not be looked at."
        yield _missing_right(_ATTENTION, "secondary", "Listen", what, facts.listen.detail)
    elif facts.listen is not None:
        what, step = f"A backlog queue could not be looked at ({facts.listen.kind}).", "Look at its status, and retry."
        yield Finding(_ATTENTION, "backlog_refuses_receivers", what, facts.listen.detail, step)
    if facts.management is not None and facts.management.kind in _REFUSED - {FailureKind.CERTIFICATE}:
        what = "Properties, sizes, extras and orphans of the backlog queues could not be checked."
        yield _missing_right(_ATTENTION, "secondary", "Manage", what, facts.management.detail)
    elif facts.management is not None:
        what, step = _in_plain_words("management endpoint of the secondary", facts.host, facts.management.kind)
        what += " Properties, sizes, extras and orphans of the backlog queues could not be checked."
        yield Finding(_ATTENTION, "management_unreachable", what, facts.management.detail, step)


def _about_clock(facts: SecondaryFacts) -> Iterator[Finding]:
    if facts.clock is not None and abs(facts.clock) >= LARGE_CLOCK_OFFSET:
        direction = "ahead of" if facts.clock > 0 else "behind"
        what = f"The clock of this machine is {_span(abs(facts.clock))} {direction} that of the secondary."
        cause = "Tokens may be refused as expired or not yet valid, and times in logs and ledger cannot be compared."
        yield Finding(_ATTENTION, "clock_offset", what, cause, "Synchronise the clock of this machine (NTP).")


def _missing_right(severity: Severity, side: str, right: str, consequence: str, detail: str) -> Finding:
    what = f"The key has no {right} right on the {side}. {consequence}"
    step = f"Give a key with {right}. It is needed by {RIGHTS[side, right]}."
    return Finding(severity, f"{side}_{right.lower()}_missing", what, detail, step)


def _in_plain_words(side: str, host: str, kind: FailureKind) -> tuple[str, str]:
    """Return what a failed connection means, and the next step."""
    match kind:
        case FailureKind.DNS:
            return (
                f"The host name of the {side}, {host}, does not resolve.",
                "Check the host name in the connection string, and the DNS of this machine.",
            )
        case FailureKind.CONNECTION_LOST:
            return (
                f"The {side} cannot be reached: {host} accepts no connection.",
                "Check that the namespace runs, and that no firewall blocks the port.",
            )
        case FailureKind.TIMEOUT:
            return (
                f"The {side} does not answer: {host} was silent.",
                "Check that the namespace runs and that no firewall drops the packets. --timeout waits longer.",
            )
        case FailureKind.CERTIFICATE:
            return (
                f"The certificate of the {side}, {host}, is not trusted.",
                "Check that it is the right host. If the namespace has a CA of its own, give the CA's certificate with "
                "--ca.",
            )
        case FailureKind.TLS | FailureKind.PROTOCOL:
            return (
                f"What answers at {host} is not the {side}: it does not speak TLS and AMQP as a namespace does.",
                "Check host and port, and whether a proxy stands between.",
            )
        case FailureKind.AUTHENTICATION | FailureKind.UNAUTHORIZED | FailureKind.TOKEN_UNAVAILABLE:
            return (
                f"The {side} refuses the key.",
                "Check name and key in the connection string, and the clock of this machine. Was the key changed?",
            )
        case _:
            return f"The {side} answers with an error ({kind}).", "Run the doctor again; look at the namespace."


def _about_queues(found: Inspection, facts: SecondaryFacts) -> Iterator[Finding]:
    if found.missing:
        yield _missing_queues(found, facts)
    unsafe = [(queue, one) for queue in found.queues for one in queue.losing]
    for text, queues in _grouped((str(one), queue) for queue, one in unsafe):
        what = f"{_named(queues)} would lose messages."
        yield Finding(_ATTENTION, "queue_loses_messages", what, f"{text}.", "Change the property, or create it again.")
    losing = {(queue.path, one.property) for queue, one in unsafe}
    others = [(queue, one) for queue in found.queues for one in queue.differences]
    for text, queues in _grouped(
        (f"{one.property} is {one.found}, not {one.wanted}", queue)
        for queue, one in others
        if (queue.path, one.property) not in losing
    ):
        what = f"A property of {_named(queues)} differs from what pairs create."
        yield Finding(_ATTENTION, "queue_differs", what, f"{text}.", "Change the property, if nobody chose it.")
    for queue in (*found.queues, *found.extras):
        if queue.capacity and queue.size >= NEARLY_FULL * queue.capacity:
            what = f"{queue.path} is {queue.size / queue.capacity:.0%} full."
            cause = "A full queue accepts no message. Senders then use the others, and get errors when all are full."
            yield Finding(_ATTENTION, "queue_nearly_full", what, cause, "Run a syphon, or raise the size of the queue.")
    full = [extra for extra in found.extras if extra.depth.total]
    empty = [extra for extra in found.extras if not extra.depth.total]
    if full:
        held = sum(extra.depth.total for extra in full)
        cause = f"They are {_named(full)}: beyond the backlog_queue_count of {_count(found)}."
        what = f"{_messages(held)} in backlog queues that senders no longer use."
        yield Finding(_ATTENTION, "extras_hold_messages", what, cause, "Run `twinbus syphon`: it empties these too.")
    if empty:
        cause = f"{_named(empty)}: beyond the backlog_queue_count of {_count(found)}."
        what = f"{_queues(len(empty))} not used by senders, and empty."
        yield Finding(_NOTE, "extras", what, cause, "`twinbus doctor --clean` removes empty extra queues.")
    if found.orphans:
        yield _orphans(found.orphans)


def _missing_queues(found: Inspection, facts: SecondaryFacts) -> Finding:
    names = _listed(found.missing)
    step = "Run `twinbus provision`."
    if found.queues:
        what = f"{len(found.missing)} of {_count(found)} backlog queues are missing."
        return Finding(_ATTENTION, "queues_missing", what, f"Missing: {names}.", step)
    what = f"The secondary has no backlog queue of {found.primary!r}."
    others = _owners(found.orphans)
    if others:
        step += f" Or give --primary-name: there are backlog queues of {_listed(others)}."
    if facts.management is None:
        cause = "None was created yet, or applications set another primary_name. A pair with Manage creates them."
        return Finding(_ATTENTION, "queues_missing", what, cause, step)
    cause = "None was created yet, or applications set another primary_name. This key cannot create them."
    return Finding(_BROKEN, "queues_missing", f"{what} Nothing can be diverted.", cause, step)


def _orphans(orphans: Sequence[FoundQueue]) -> Finding:
    held = sum(orphan.depth.total for orphan in orphans)
    what = f"{_queues(len(orphans))} of other primaries: {_listed(_owners(orphans))}."
    if held:
        cause = f"They hold {_number(held)}. --clean never removes them: other pairs may use them."
        step = "If such a pair is gone, `twinbus syphon --drain` with its --primary and --primary-name empties them."
        return Finding(_NOTE, "orphans", what, cause, step)
    cause = "They are empty. --clean never removes them: other pairs may use them."
    return Finding(_NOTE, "orphans", what, cause, "Nothing, if other pairs use this secondary.")


def _about_messages(
    found: Inspection,
    primary: PrimaryFacts,
    facts: SecondaryFacts,
    ledger: LedgerFolderFacts | None,
    held: Sequence[str],
) -> Iterator[Finding]:
    own = (*found.queues, *found.extras)
    dead = [queue for queue in own if queue.depth.dead_lettered]
    if dead:
        count = sum(queue.depth.dead_lettered for queue in dead)
        at_least = "" if facts.counted else "At least "
        what = f"{at_least}{_messages(count)} in the dead-letter queues of the backlog."
        cause = f"In {_named(dead)}. A syphon could not deliver them, or they expired."
        step = "`twinbus deadletter list` shows why; `twinbus deadletter resubmit` brings them back."
        yield Finding(_ATTENTION, "dead_letters", what, cause, step)
    aside = Counter[str]()
    for look in facts.looks:
        aside.update(dict(look.aside))
    if aside:
        what = f"At least {_messages(aside.total())} put aside by a syphon: the destination was not ready."
        cause = f"For {_listed(f'{path} ({count:,})' for path, count in sorted(aside.items()))}."
        step = "Check these entities on the primary. `twinbus syphon --drain` reports why each is not ready."
        yield Finding(_ATTENTION, "messages_put_aside", what, cause, step)
    waiting = [look for look in facts.looks if look.age is not None]
    stuck = [look for look in waiting if not look.moved]
    if waiting:
        names = {look.queue for look in waiting}
        depth = sum(queue.depth.active for queue in own if queue.path in names)
        at_least = "" if facts.counted else "At least "
        messages = f"{at_least}{_messages(max(depth, len(waiting)))}"
        yield _waiting(messages, waiting, stuck, primary, facts, ledger, held)


def _waiting(
    messages: str,
    waiting: Sequence[QueueLook],
    stuck: Sequence[QueueLook],
    primary: PrimaryFacts,
    facts: SecondaryFacts,
    ledger: LedgerFolderFacts | None,
    held: Sequence[str],
) -> Finding:
    oldest = max(waiting, key=lambda look: look.age or 0.0)
    what = f"{messages} in the backlog, the oldest for {_span(oldest.age or 0.0)} (to {oldest.destination})."
    looked = f"within {facts.look_seconds:g} s"
    if not stuck:
        return Finding(_NOTE, "backlog_moves", what, f"They are being moved: the oldest left {looked}.", "Nothing.")
    if primary.failure is not None:
        cause = f"The primary cannot be used, and none left {looked}."
        return Finding(
            _ATTENTION, "backlog_waits", what, cause, "Run `twinbus syphon`: it moves them when the primary is back."
        )
    cause = f"The oldest of {_queues(len(stuck))} did not move {looked}. "
    if held:
        cause += f"An operator holds {_listed(held)}: a syphon that knows it delivers nothing there."
        step = "If the hold is not the reason, run `twinbus syphon`. `twinbus drill --release` ends the hold."
        return Finding(_ATTENTION, "backlog_waits", what, cause, step)
    if ledger is not None and ledger.syphons:
        cause += f"A syphon that writes this ledger runs ({_listed(ledger.syphons)})."
        step = "Look at its output: it may be paused, slow, or unable to reach the primary."
        return Finding(_ATTENTION, "backlog_waits", what, cause, step)
    if ledger is not None and ledger.problem is None and ledger.written:
        cause += "No syphon that writes this ledger runs."
    else:
        cause += "Perhaps no syphon runs. The receivers of a queue cannot be seen from outside."
    step = "Run `twinbus syphon`, or enable_syphon in one application."
    return Finding(_ATTENTION, "backlog_waits", what, cause, step)


def _about_ledger(facts: LedgerFolderFacts) -> Iterator[Finding]:
    if facts.problem is not None:
        what = f"The ledger {facts.path} cannot be used."
        yield Finding(_ATTENTION, "ledger_unusable", what, facts.problem, "Correct the path or its permissions.")
        return
    if not facts.written:
        what = f"The ledger {facts.path} is empty."
        cause = "No pair, syphon or namespace has written there yet."
        yield Finding(_NOTE, "ledger_empty", what, cause, "Check the path, if programs already use the ledger.")
    if facts.failing:
        what = f"Entries of {len(facts.failing)} writers are missing from the ledger {facts.path}."
        cause = f"They could not write: {_listed(facts.failing)}."
        step = "Free space on the disk, and look at the logs. `twinbus ledger check` names what is not proven."
        yield Finding(_ATTENTION, "ledger_entries_missing", what, cause, step)
    if facts.free is not None and facts.free < LEDGER_ROOM:
        what = f"The disk of the ledger {facts.path} has {facts.free / 2**20:,.0f} MiB left."
        cause = "On a full disk entries are missing, or calls are refused (ledger_on_error)."
        yield Finding(_ATTENTION, "ledger_disk_full", what, cause, "Free space, or ship sealed segments elsewhere.")


def _about_state(facts: StateFacts, ledger: LedgerFolderFacts | None) -> Iterator[Finding]:
    """Report holds, and syphons that a hold does not reach (S15)."""
    if facts.problem is not None:
        what = f"The shared state in {facts.location}, or a part of it, cannot be read."
        step = (
            "If it is a file named failover-….json, remove it: the next failover or ping writes it anew. If it has "
            "holds, run `twinbus drill --release` without --entity, and hold again what must be held. Otherwise check "
            "the folder, its permissions, or the secondary. Until then processes start as if that part held nothing, "
            "and what they hold stays held."
        )
        yield Finding(_ATTENTION, "state_unreadable", what, facts.problem, step)
    if facts.is_missing:
        what = f"The {facts.location} of the shared state does not exist."
        cause = "No process has shared a failover or a hold there yet, or applications use another folder."
        yield Finding(_NOTE, "state_missing", what, cause, "Compare it with the option `state` of the applications.")
    for record in facts.failovers:
        # Processes do not believe an old record, and start healthy.
        if is_current(record, facts.read_at):
            yield _failed_over(record, facts.read_at)
    held = _listed(facts.held)
    if facts.held:
        what, cause = f"An operator holds {held}.", "Processes that pair with this state divert, and send no pings."
        yield Finding(_NOTE, "held", what, cause, "`twinbus drill --release` ends the hold.")
    unshared = () if ledger is None else ledger.unshared_syphons
    if unshared:
        what = f"A syphon runs without the shared state: {_listed(unshared)}."
        if facts.held:
            cause = f"It delivers to what an operator holds: {held}."
            step = "Stop it until the release, or start it again with --state."
            yield Finding(_ATTENTION, "syphon_without_state", what, cause, step)
        else:
            cause = "It would deliver to an entity that an operator holds."
            yield Finding(_NOTE, "syphon_without_state", what, cause, "Start it again with --state.")


def _failed_over(record: FailoverRecord, now: float) -> Finding:
    left = record.next_ping_at - now
    due = f"in {_span(left)}" if left > 0 else "due: the next process that runs sends it"
    what = f"{record.entity} has been failed over for {_span(now - record.engaged_at)} ({record.cause})."
    cause = f"Processes with this state divert. The next ping is {due}; then one every {_span(record.ping_interval)}."
    if record.failed_trials:
        trials = "1 trial" if record.failed_trials == 1 else f"{record.failed_trials} trials"
        cause += f" {trials} failed: the primary took a ping, and then no message."
    step = "Look at its status and size on the primary. It returns with the next ping after the primary works."
    return Finding(_ATTENTION, "failed_over", what, cause, step)


# --- words -----------------------------------------------------------------------------------------------------------


def _grouped(pairs: Iterable[tuple[str, FoundQueue]]) -> Iterator[tuple[str, list[FoundQueue]]]:
    groups: dict[str, list[FoundQueue]] = {}
    for text, queue in pairs:
        groups.setdefault(text, []).append(queue)
    yield from groups.items()


def _named(queues: Sequence[FoundQueue]) -> str:
    return _listed(queue.path for queue in queues)


def _listed(texts: Iterable[str]) -> str:
    given = list(texts)
    rest = f" and {len(given) - _LISTED} more" if len(given) > _LISTED else ""
    return ", ".join(given[:_LISTED]) + rest


def _owners(orphans: Iterable[FoundQueue]) -> list[str]:
    return sorted({orphan.path.split("/", 1)[0] for orphan in orphans})


def _count(found: Inspection) -> int:
    return len(found.queues) + len(found.missing)


def _number(count: int) -> str:
    return "1 message" if count == 1 else f"{count:,} messages"


def _messages(count: int) -> str:
    return f"{_number(count)} {'is' if count == 1 else 'are'}"


def _queues(count: int) -> str:
    return "1 backlog queue" if count == 1 else f"{count:,} backlog queues"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
