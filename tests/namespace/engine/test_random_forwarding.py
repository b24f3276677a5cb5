"""Random forwarding, transactions, rules and restarts: the counters agree with the store, and forwarding ends."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import (
    EntityStatus,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.storage_protocol import BrowseRows, QueueLane, Row
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.engine.transactions import TransactionOperation, commit_transaction

from .bus import Bus, envelope, queue

STEPS = 120
QUEUES, TOPICS = ("a", "b", "sessions"), ("t", "u")
SUBSCRIPTIONS = tuple(f"{topic}/Subscriptions/{name}" for topic in TOPICS for name in "xyz")
SOURCES = (*QUEUES, *SUBSCRIPTIONS)


class RandomNamespace:
    """A namespace in which every entity may forward to every other and to itself."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self.bus = Bus(
            queue("a"),
            queue("b", requires_duplicate_detection=True),
            queue("sessions", requires_session=True),
            TopicDescription(path="t"),
            TopicDescription(path="u", requires_duplicate_detection=True),
            *(SubscriptionDescription(topic=topic, name=name) for topic in TOPICS for name in "xyz"),
        )
        self._held: list[tuple[str, bytes]] = []
        self._number = 0
        self._deeds: list[Callable[[], None]] = [self._send] * 4
        self._deeds += [self._update, self._receive, self._settle, self._transact, self._add_rule, self._wait]
        self._rare: list[Callable[[], None]] = [self._restart, self._delete]

    def decision(self) -> None:
        self._rng.choice(self._deeds if self._rng.random() < 0.97 else self._rare)()
        self.bus.settle()  # raises if that has no end

    def _messages(self, path: str) -> tuple[RoutingFields, ...]:
        rng = self._rng
        self._number += 1
        return tuple(
            envelope(
                f"{self._number}-{index}",
                message_id=rng.choice((f"{self._number}-{index}", "twin")),
                session="s" if path == "sessions" else rng.choice((None, "s")),
                ttl=rng.choice((None, 1_000)),
                due=rng.choice((None, None, self.bus.now + 500)),
                properties={"n": rng.choice((1, "no number"))},
            )
            for index in range(rng.choice((1, 3)))
        )

    def _send(self) -> None:
        path = self._rng.choice((*QUEUES, *TOPICS))
        self.bus.submit(path, events.MessagesSent("reply", self._messages(path)))

    def _existing(self, paths: tuple[str, ...] = SOURCES) -> list[str]:
        """Return one of these paths that exists, in a list; an empty list if none of them does."""
        found = [path for path in paths if self.bus.namespace.find(path)]
        return [self._rng.choice(found)] if found else []

    def _update(self) -> None:
        change, choices = self._rng.choice(
            (
                ("forward_to", (None, *QUEUES, *TOPICS)),
                ("forward_dead_letters_to", (None, *QUEUES, *TOPICS)),
                ("status", tuple(EntityStatus)),
            )
        )
        [path] = self._existing()
        self.bus.update(path, **{change: self._rng.choice(choices)})

    def _receive(self) -> None:
        [path] = self._existing()
        credit, dead = self._rng.randrange(1, 4), self._rng.random() < 0.2
        if path == "sessions" and not dead:
            receiver = self.bus.session(path, "s", credit)
        else:
            receiver = self.bus.receiver(path, credit, dead=dead)
        if receiver.refusal is None:
            self._held += [(path, token) for token in receiver.tokens]
            self.bus.detach(path, receiver)

    def _outcome(self) -> events.MessageOutcome:
        return self._rng.choice((events.Complete(), events.Abandon(), events.MoveToDeadLetter("why"), events.Defer()))

    def _settle(self) -> None:
        if self._held:
            path, token = self._held.pop()
            if self.bus.namespace.find(path):
                self.bus.settle_tokens(path, [token], self._outcome())

    def _transact(self) -> None:
        operations: list[TransactionOperation] = []
        for _ in range(self._rng.randrange(1, 5)):
            path, token = self._held.pop() if self._held and self._rng.random() < 0.5 else ("", b"")
            if token and (entity := self.bus.namespace.find(path)) is not None:
                operations.append((entity, events.MessagesSettled(None, (token,), self._outcome())))
            else:
                path = self._rng.choice(("a", "b", *TOPICS))
                sent = events.MessagesSent(None, self._messages(path))
                operations.append((self.bus.entity(path), sent))
        self.bus.carry_out(commit_transaction(operations, "reply", self.bus.now))

    def _add_rule(self) -> None:
        self._number += 1
        condition = self._rng.choice(("n > 0", "n = 'no number'", "1=1"))
        action = self._rng.choice((None, SqlAction("SET k = n + 1"), SqlAction("SET sys.SessionId = 'q'")))
        rule = RuleDescription(f"r{self._number}", SqlFilter(condition), action)
        for path in self._existing(SUBSCRIPTIONS):
            self.bus.submit(path, events.RuleAdded("reply", rule))

    def _wait(self) -> None:
        self.bus.wait(self._rng.choice((10, 600, 61_000)))

    def _restart(self) -> None:
        self.bus.restart()
        self._held.clear()

    def _delete(self) -> None:
        for path in self._existing(SUBSCRIPTIONS):
            self.bus.delete(path)

    def check(self) -> None:
        opened = {stored.entity.queue: stored for stored in self.bus.store.open().entities}
        for root in self.bus.namespace.root_entities():
            shared: dict[int, int] = {}
            for entity in root.entities:
                need = BrowseRows(entity.counters.queue, tuple(QueueLane), 0, 1_000_000, 1 << 40)
                rows: list[Row] = self.bus.store.load(need)
                assert entity.counters.lanes == [sum(row.lane == lane for row in rows) for lane in QueueLane], (
                    entity.path
                )
                assert entity.counters.size == sum(row.charge for row in rows), entity.path
                shared |= {row.body: row.size for row in rows if row.body is not None}
            if isinstance(root, Topic):
                assert root.shared_bytes == sum(shared.values()) == opened[root.counters.queue].shared_bytes


@pytest.mark.parametrize("seed", range(8))
def test_in_random_runs_the_counters_agree_with_the_store_and_forwarding_ends(seed: int) -> None:
    namespace = RandomNamespace(seed)
    for _ in range(STEPS):
        namespace.decision()
        namespace.check()
