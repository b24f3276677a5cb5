"""Accounts of every message of one run: reported safe, tried to deliver, received. `wrong` lists every violation.

A message that arrives twice needs an explanation: a try that was never acknowledged, or a syphon that was killed or
lost a lock between delivery and completion. This module uses neither clients nor servers. It compares the ledger with
these accounts, and reports where the ledger differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.chaos.entities import PLACES, PRIMARY, WATCHFUL
from twinbus.ledger import OK, UNKNOWN, Balance, Entry, Intent, MessageKey, Operation, Outcome, Stage

Told = tuple[str, Sequence[str]]
"""A line of a syphon's log: an event, and the ids of its messages."""
_SENDS = frozenset({Stage.SEND_PRIMARY, Stage.SEND_BACKLOG})


@dataclass(slots=True)
class _MessageAccount:
    """One message id. `sure`: deliveries that the primary acknowledged. `perhaps`: deliveries without an answer."""

    destination: str
    safe: int = 0
    sure: int = 0
    perhaps: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    """Reasons why the message may have been sent once more."""
    received: Counter[str] = field(default_factory=Counter)


class MessageAccounts:
    """The accounts of one run. `wrong` lists violations; `figures` counts what happened in the run."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.figures: Counter[str] = Counter()
        self._letters: dict[str, _MessageAccount] = {}

    # --- what happened -----------------------------------------------------------------------------------------------

    def asked(self, destination: str, ids: Iterable[str]) -> None:
        """Record that a sender is about to send these messages, for the first time or again."""
        for name in ids:
            self._letters.setdefault(name, _MessageAccount(destination))

    def safe(self, ids: Iterable[str]) -> None:
        """Record that the send of these messages returned without an error."""
        for name in ids:
            self._letters[name].safe += 1
            self.figures["safe"] += 1

    def clients_ledger(self, entries: Iterable[Entry]) -> None:
        """Record the tries in the ledgers of the senders. The senders were not killed, so every try has an outcome."""
        begun: dict[str, Intent] = {}
        ended: dict[str, Outcome] = {}
        for entry in entries:
            match entry:
                case Operation() if entry.stage in _SENDS:
                    self._tried(entry, entry.result, entry.failed)
                case Intent() if entry.stage in _SENDS:
                    begun[entry.id] = entry
                case Outcome():
                    ended[entry.id] = entry
                case _:
                    pass
        for name, intent in begun.items():
            outcome = ended.get(name)
            if outcome is None:
                self.wrong.append(f"ledger: {intent.stage} of {intent.ids} by a sender that closed has no outcome")
            else:
                self._tried(intent, outcome.result, outcome.failed)

    def _tried(self, intent: Intent | Operation, result: str, failed: Sequence[str]) -> None:
        for name in intent.ids:
            letter = self._letters.get(name)
            if letter is None:
                self.wrong.append(f"ledger: {name} was never sent")
                continue
            how = OK if failed and name not in failed else result
            to_primary = intent.stage is Stage.SEND_PRIMARY
            letter.sure += to_primary and how == OK
            letter.perhaps += to_primary and how == UNKNOWN
            if how == UNKNOWN:
                self._explain(letter, f"{intent.stage} was not acknowledged")

    def life(self, told: Iterable[Told], *, killed: bool) -> None:
        """Record what one syphon did from its start to its end, from its log."""
        sending: Counter[str] = Counter()
        confirmed: Counter[str] = Counter()
        for event, ids in told:
            self.figures[f"{event} by syphons"] += len(ids)
            for name in ids:
                letter = self._letters.get(name)
                if letter is None:
                    self.wrong.append(f"{name}: {event} by a syphon, and was never sent")
                    continue
                match event:
                    case "sending":
                        sending[name] += 1
                    case "confirmed":
                        sending[name] -= 1
                        confirmed[name] += 1
                        letter.sure += 1
                    case "unsure":
                        sending[name] -= 1
                        letter.perhaps += 1
                        self._explain(letter, "return_primary was not acknowledged")
                    case "refused":
                        sending[name] -= 1
                    case "completed" | "lost" | "uncompleted":
                        if not confirmed[name]:
                            self.wrong.append(f"{name}: {event} before its delivery was confirmed")
                        confirmed[name] -= 1
                        if event != "completed":
                            why = "a lock was lost" if event == "lost" else "complete_backlog was not acknowledged"
                            self._explain(letter, why)
                    case _:
                        pass
        self._left(sending, confirmed, killed=killed)

    def _left(self, sending: Counter[str], confirmed: Counter[str], *, killed: bool) -> None:
        """Record the deliveries that a syphon had begun and not finished when it ended."""
        for name in (+sending + +confirmed).elements():
            if killed:
                self._explain(self._letters[name], "a syphon was killed")
            else:
                self.wrong.append(f"{name}: was sent and not completed, by a syphon that ended in order")
        if killed:
            for name in (+sending).elements():
                self._letters[name].perhaps += 1

    def _explain(self, letter: _MessageAccount, why: str) -> None:
        letter.explained[why] += 1
        self.figures[f"explained: {why}"] += 1

    def received(self, place: str, name: str, fault: str | None = None) -> None:
        """Record a message that the test received at the end. `fault`: how it differs from the sent message."""
        letter = self._letters.get(name)
        self.figures[f"received from {place}"] += 1
        if letter is None or place not in PLACES[letter.destination]:
            self.wrong.append(f"{name}: was received from {place}, where it was never sent")
            return
        letter.received[place] += 1
        if fault is not None:
            self.wrong.append(f"{name}: was received from {place} changed: {fault}")

    # --- what must hold ----------------------------------------------------------------------------------------------

    @property
    def lost(self) -> list[str]:
        """Return the messages that were reported safe but are missing from one of their destinations."""
        return [
            name
            for name, letter in self._letters.items()
            if letter.safe and any(not letter.received[place] for place in PLACES[letter.destination])
        ]

    def judge(self) -> None:
        self.wrong += [f"{name}: is lost, though reported safe" for name in self.lost]
        self.figures["lost"] += len(self.lost)
        for name, letter in self._letters.items():
            if letter.safe > 1:
                self.wrong.append(f"{name}: was reported safe {letter.safe} times")
            for place in PLACES[letter.destination]:
                self._judge_copies(name, letter, letter.received[place])

    def _judge_copies(self, name: str, letter: _MessageAccount, copies: int) -> None:
        watchful = letter.destination == WATCHFUL
        further = max(0, copies - 1)
        explained = letter.explained.total()
        self.figures["further copies"] += further
        if further > (0 if watchful else explained):
            told = "it detects duplicates" if watchful else f"{dict(letter.explained) or 'nothing'} explains them"
            self.wrong.append(f"{name}: {further} further copies at {letter.destination}, though {told}")
        if copies > letter.sure + letter.perhaps:
            self.wrong.append(f"{name}: received {copies} times, sent {letter.sure + letter.perhaps} times")
        if copies < (min(1, letter.sure) if watchful else letter.sure):
            self.wrong.append(f"{name}: acknowledged by the primary {letter.sure} times, received {copies} times")

    def judge_ledger(self, found: Balance) -> None:
        """Compare the balance of all ledgers of the run with the accounts. A killed writer has no excuse (L1)."""
        self.wrong += [f"ledger: {message.id} is lost" for message in found.lost]
        safe = {self._message(name) for name, letter in self._letters.items() if letter.safe}
        self.wrong += [
            f"ledger: {one.id} was reported safe, and is not accepted" for one in safe - found.accepted.keys()
        ]
        self.wrong += [
            f"ledger: {one.id} is accepted, and was not reported safe" for one in found.accepted.keys() - safe
        ]
        for message in found.delivered:
            letter = self._letters.get(message.id)
            if letter is None or any(not letter.received[place] for place in PLACES[letter.destination]):
                self.wrong.append(f"ledger: {message.id} is delivered, and was not received")
        self.wrong += [f"ledger: {message.id} is in the backlog, which is empty" for message in found.in_backlog]
        self.wrong += [f"ledger: {message.id} is unknown, though it was brought home" for message in found.unknown]
        self.wrong += [f"ledger: {message.id} is dead-lettered" for message in found.dead_lettered]
        for name, letter in self._letters.items():
            message = self._message(name)
            told = found.duplicated[message] + found.possibly_duplicated[message]
            further = max(0, max(letter.received.values(), default=0) - 1)
            if told < further:
                self.wrong.append(f"ledger: {name} is {told} times perhaps duplicated, and was {further} times")
        for title in ("accepted", "delivered", "in_backlog", "unknown", "duplicated", "possibly_duplicated"):
            self.figures[f"ledger: {title}"] = getattr(found, title).total()

    def _message(self, name: str) -> MessageKey:
        return MessageKey(f"{PRIMARY}/{self._letters[name].destination}".lower(), name)
