"""The oracle of a crash test: records requests, answers and observed messages, and reports contradictions (`wrong`).

For every queue and subscription that a message was sent to, the oracle keeps the set of places where the message may
be, from everything that is known. It uses no client, no server and no clock: time is the order of its records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf


class Where(Enum):
    NOWHERE = "nowhere"
    ACTIVE = "active"
    DEFERRED = "deferred"
    DEAD = "dead-letter"
    SCHEDULED = "scheduled"


@dataclass(frozen=True, slots=True)
class ObservedMessage:
    """A message that was received or peeked. `enqueued` is in milliseconds since the epoch."""

    id: str
    number: int
    where: Where
    body: bytes
    delivery_count: int = 0
    enqueued: int = 0


@dataclass(slots=True, eq=False)
class ExpectedMessage:
    """What is known about one message of one queue or subscription."""

    id: str
    body: bytes
    asked_at: int
    session: str | None = None
    due: int | None = None
    known: set[Where] = field(default_factory=lambda: {Where.NOWHERE})
    """Where the message may be, without the effect of pending requests."""
    settling: list[Where] = field(default_factory=list)
    """Where pending requests would put the message."""
    sending: int = 0
    stored_by: float = inf
    """When the message was acknowledged or first observed, in ticks."""
    arrived: bool = False
    """The message was observed, so the outcome of its send no longer matters."""
    numbers: dict[bool, int] = field(default_factory=dict)
    """Its sequence number while scheduled (True) and afterwards (False)."""
    abandons_asked: int = 0
    abandons_confirmed: int = 0
    hold: int = 0
    """The last holder of its session that received it."""

    @property
    def may_be(self) -> set[Where]:
        places = self.known | set(self.settling)
        if self.sending and not self.arrived:
            places.add(Where.ACTIVE if self.due is None else Where.SCHEDULED)
        if Where.SCHEDULED in places:
            places.add(Where.ACTIVE)
        return places

    @property
    def is_gone(self) -> bool:
        return self.known == {Where.NOWHERE} and not self.settling and not self.sending

    @property
    def is_surely_active(self) -> bool:
        return self.known == {Where.ACTIVE} and not self.settling


@dataclass(frozen=True, slots=True)
class Sent:
    """One pending send or schedule request."""

    entries: tuple[tuple[EntityOracle, ExpectedMessage], ...]
    where: Where


class EntityOracle:
    """The oracle of one queue or subscription."""

    def __init__(self, oracle: Oracle, name: str, *, deletes: bool, detects_duplicates: bool) -> None:
        self.name = name
        self.deletes = deletes
        """Messages are received with receive-and-delete, so those requested but not received may be gone."""
        self.detects_duplicates = detects_duplicates
        self.outstanding = 0
        self.open: dict[str, ExpectedMessage] = {}
        self.states: defaultdict[str, set[bytes | None]] = defaultdict(lambda: {None})
        self._oracle = oracle
        self._schedules = False
        self._entries: dict[str, ExpectedMessage] = {}
        self._numbers: dict[int, tuple[ExpectedMessage, int]] = {}
        self._lines: defaultdict[str, list[ExpectedMessage]] = defaultdict(list)

    # --- requests and answers ------------------------------------------------------------------------------------

    def entry(self, id: str) -> ExpectedMessage | None:
        return self._entries.get(id)

    def entered(self, id: str, body: bytes, session: str | None, due: int | None) -> ExpectedMessage:
        entry = self._entries.get(id)
        if entry is None:
            entry = self._entries[id] = ExpectedMessage(id, body, self._oracle.tick(), session, due)
            self._schedules |= due is not None
            if session is not None:
                self._lines[session].append(entry)
        self.open[id] = entry
        return entry

    def asked(self, ids: Iterable[str], where: Where) -> None:
        """A settlement or cancellation was sent. ACTIVE stands for an abandonment."""
        for entry in self._known(ids):
            entry.settling.append(where)
            if where is Where.ACTIVE:
                entry.abandons_asked += 1

    def confirmed(self, ids: Iterable[str], where: Where) -> None:
        for entry in self._known(ids):
            entry.settling.remove(where)
            if where is Where.ACTIVE:
                # Another receiver may have received and settled it already: only the delivery count is certain.
                entry.abandons_confirmed += 1
            else:
                entry.known = {where}
            self.close_if_gone(entry)
            self._oracle.figures[f"{where.value} confirmed"] += 1

    def unanswered(self, ids: Iterable[str], where: Where) -> None:
        for entry in self._known(ids):
            entry.settling.remove(where)
            entry.known.add(where)
            self._oracle.figures[f"{where.value} unanswered"] += 1

    def cancel_refused(self, id: str, now: int) -> None:
        """A cancellation found nothing: the message must have been due at `now` (ms since the epoch) or before."""
        for entry in self._known([id]):
            entry.settling.remove(Where.NOWHERE)
            if entry.due is None or entry.due > now:
                self._wrong(id, f"is not scheduled though due at {entry.due}, after {now}")
            self.close_if_gone(entry)

    def deleted(self, sighting: ObservedMessage) -> None:
        """A message was received with receive-and-delete. It must never be observed again."""
        self.outstanding -= 1
        self.sighted(sighting)
        entry = self._entries.get(sighting.id)
        if entry is not None:
            entry.known = {Where.NOWHERE}
            self.close_if_gone(entry)
            self._oracle.figures["received and deleted"] += 1

    # --- observations --------------------------------------------------------------------------------------------

    def sighted(self, sighting: ObservedMessage, hold: int = 0) -> None:
        """A message was received or peeked. `hold` is a number for each holder of a session, 0 outside of sessions."""
        entry = self._entries.get(sighting.id)
        if entry is None:
            self._wrong(sighting.id, f"was never sent, and is {sighting.where.value}")
            return
        if sighting.where not in entry.may_be:
            told = " or ".join(sorted(where.value for where in entry.may_be))
            self._wrong(sighting.id, f"has to be {told}, and is {sighting.where.value} (number {sighting.number})")
        if sighting.body != entry.body:
            self._wrong(sighting.id, f"has another body: {sighting.body[:80]!r}")
        if not entry.abandons_confirmed <= sighting.delivery_count <= entry.abandons_asked:
            least, most = entry.abandons_confirmed, entry.abandons_asked
            self._wrong(sighting.id, f"was abandoned {least} to {most} times, not {sighting.delivery_count}")
        if entry.due is not None and sighting.where is Where.ACTIVE and sighting.enqueued < entry.due:
            self._wrong(sighting.id, f"was due at {entry.due} and came at {sighting.enqueued}")
        self.numbered(entry, sighting)
        if hold:
            self._in_line(entry, hold)
        entry.arrived = True
        entry.known = {sighting.where}
        self.open[entry.id] = entry

    def numbered(self, entry: ExpectedMessage, sighting: ObservedMessage) -> None:
        scheduled = sighting.where is Where.SCHEDULED
        number = entry.numbers.setdefault(scheduled, sighting.number)
        if number != sighting.number:
            self._wrong(entry.id, f"had number {number} and now has {sighting.number}")
        now = self._oracle.tick()
        if entry.due is None or scheduled:
            entry.stored_by = min(entry.stored_by, now)
        other, _ = self._numbers.setdefault(sighting.number, (entry, now))
        if other is not entry:
            self._wrong(entry.id, f"has number {sighting.number}, which {other.id} had")

    def _in_line(self, entry: ExpectedMessage, hold: int) -> None:
        entry.hold = hold
        line = self._lines[entry.session or ""] = [one for one in self._lines[entry.session or ""] if not one.is_gone]
        for earlier in line:
            if earlier is entry:
                return
            if earlier.is_surely_active and earlier.hold != hold:
                self._wrong(entry.id, f"came before {earlier.id} of the same session {entry.session}")

    # --- session state -------------------------------------------------------------------------------------------

    def state_asked(self, session: str, state: bytes) -> None:
        self.states[session].add(state)

    def state_certain(self, session: str, state: bytes | None) -> None:
        """The state was confirmed or read by the holder of the session. Only the holder can change it."""
        if state not in self.states[session]:
            self._wrong(session, f"has state {state!r}, none of {self.states[session]}")
        self.states[session] = {state}

    # --- everything that is stored -------------------------------------------------------------------------------

    def found(self, sightings: Sequence[ObservedMessage]) -> None:
        """All messages were listed while there was no traffic: a message that is missing is gone for good."""
        seen: dict[str, Where] = {}
        for sighting in sightings:
            before = seen.get(sighting.id)
            # A scheduled message may become due between two pages of a peek.
            if before is not None and (before, sighting.where) != (Where.SCHEDULED, Where.ACTIVE):
                self._wrong(sighting.id, f"is there twice: {before.value} and {sighting.where.value}")
            seen[sighting.id] = sighting.where
            self.sighted(sighting)
        missing = [entry for entry in self.open.values() if entry.id not in seen]
        vanished = [entry for entry in missing if Where.NOWHERE not in entry.may_be]
        if not self.deletes or len(vanished) > self.outstanding:
            for entry in vanished:
                told = " or ".join(sorted(where.value for where in entry.may_be))
                self._wrong(entry.id, f"is lost: it has to be {told}")
        self._oracle.figures["asked for, deleted and not received"] += len(vanished)
        self.outstanding = 0
        for entry in missing:
            entry.known = {Where.NOWHERE}
            self.close_if_gone(entry)

    def check_numbers(self) -> None:
        """A message that was stored before another was sent must have the lower sequence number."""
        latest, latest_entry = -1, None
        for number, (entry, seen_at) in sorted(self._numbers.items()):
            is_of_sending = entry.due is None or entry.numbers.get(True) == number
            stored_by = min(entry.stored_by, seen_at) if is_of_sending else seen_at
            if latest > stored_by and latest_entry is not None:
                self._wrong(entry.id, f"has number {number}, though stored before {latest_entry.id} was sent")
            if entry.asked_at > latest:
                latest, latest_entry = entry.asked_at, entry

    def counted(self, counts: dict[Where, int], sightings: Sequence[ObservedMessage]) -> None:
        """Compare the counts of the management API with the listed messages. Deferred messages count as active."""
        there = Counter(sighting.where for sighting in {one.id: one for one in sightings}.values())
        there[Where.ACTIVE] += there.pop(Where.DEFERRED, 0)
        told = Counter(counts)
        if self._schedules:
            # A message that becomes due between peek and count moves from one count to the other.
            there[Where.ACTIVE] += there.pop(Where.SCHEDULED, 0)
            told[Where.ACTIVE] += told.pop(Where.SCHEDULED, 0)
        if +told != +there:
            self._wrong("the count", f"is {told}, and there are {there}")

    # --- internal ------------------------------------------------------------------------------------------------

    def _known(self, ids: Iterable[str]) -> list[ExpectedMessage]:
        return [self._entries[id] for id in ids if id in self._entries]

    def close_if_gone(self, entry: ExpectedMessage) -> None:
        if entry.is_gone:
            self.open.pop(entry.id, None)

    def _wrong(self, what: str, text: str) -> None:
        self._oracle.wrong.append(f"{self.name}: {what} {text}")


class Oracle:
    """The oracles of all queues and subscriptions. The name of a subscription is `topic/Subscriptions/name`."""

    def __init__(
        self, routes: dict[str, Sequence[str]], *, deletes: Sequence[str] = (), detects_duplicates: Sequence[str] = ()
    ) -> None:
        self.wrong: list[str] = []
        self.figures: Counter[str] = Counter()
        self._ticks = 0
        names = [name for targets in routes.values() for name in targets]
        self.accounts = {
            name: EntityOracle(self, name, deletes=name in deletes, detects_duplicates=name in detects_duplicates)
            for name in names
        }
        self._routes = {entity: [self.accounts[name] for name in targets] for entity, targets in routes.items()}
        self._unresolved: list[list[ExpectedMessage]] = []

    def tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def depth(self, entity: str) -> int:
        return max(len(account.open) for account in self._routes[entity])

    def send_asked(
        self, entity: str, messages: Iterable[tuple[str, bytes, str | None]], due: int | None = None
    ) -> Sent:
        """A transfer or schedule request was sent, with messages of (id, body, session)."""
        entries = [
            (account, account.entered(id, body, session, due))
            for id, body, session in messages
            for account in self._routes[entity]
        ]
        for _, entry in entries:
            entry.sending += 1
        self.figures["sends asked"] += len(entries)
        return Sent(tuple(entries), Where.ACTIVE if due is None else Where.SCHEDULED)

    def send_confirmed(self, sent: Sent, numbers: Sequence[int] = ()) -> None:
        now = self.tick()
        for index, (account, entry) in enumerate(sent.entries):
            entry.sending -= 1
            if not entry.arrived:
                entry.known = {sent.where}
            entry.stored_by = min(entry.stored_by, now)
            account.close_if_gone(entry)
            if numbers:
                account.numbered(entry, ObservedMessage(entry.id, numbers[index], Where.SCHEDULED, entry.body))
            self.figures[f"sends to {account.name} acknowledged"] += 1
        self.figures["sends acknowledged"] += len(sent.entries)

    def send_unanswered(self, sent: Sent) -> None:
        for account, entry in sent.entries:
            entry.sending -= 1
            if not entry.arrived:
                entry.known.add(sent.where)
            account.close_if_gone(entry)
        # A transfer must be stored completely or not at all, in all subscriptions of a topic.
        whole = [entry for account, entry in sent.entries if not account.deletes and not account.detects_duplicates]
        self._unresolved.append(whole)
        self.figures["sends unanswered"] += len(sent.entries)

    def check_wholes(self) -> None:
        """After all messages were listed: the messages of one transfer must all be there, or none of them."""
        for entries in self._unresolved:
            if len({entry.arrived for entry in entries}) > 1:
                there = [entry.id for entry in entries if entry.arrived]
                missing = [entry.id for entry in entries if not entry.arrived]
                self.wrong.append(f"of one transfer {there} arrived and {missing} did not")
            if entries:
                self.figures["unanswered and " + ("stored" if entries[0].arrived else "not stored")] += 1
        self._unresolved.clear()
