"""Two namespaces whose clients are killed again and again, and the count of their messages after each kill."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from azure.servicebus import ServiceBusClient, ServiceBusSubQueue

from tests.crash.killed_clients import PRIMARY_NAME, SECONDARY_NAME, KilledProcess, KillPlan, SyphonWork, run_syphon
from tests.crash.ledger_oracle import contradictions, refused_returns
from tests.crash.stored_ids import StoredIds, marked_body
from twinbus.connect import connect
from twinbus.ledger import Balance, Ledger, Move, Role, Stage, balance, dead_writers, read_ledger
from twinbus.message import Message
from twinbus.testing import LocalNamespaces

QUEUE: Final = f"{PRIMARY_NAME}/x-servicebus-transfer/0"
_ENOUGH: Final = 40
_DRAIN_WINDOW: Final = 1000
_DRAIN_SECONDS: Final = 60.0
_LOCK: Final = "PT5S"
"""The shortest that Service Bus allows: what a killed syphon held comes back after this time."""


@contextmanager
def killed_pairs() -> Iterator[LocalNamespaces]:
    orders: list[dict[str, Any]] = [{"name": f"orders-{number}"} for number in range(_ENOUGH)]
    backlog = [{"name": QUEUE, "lock_duration": _LOCK, "max_delivery_count": 2**31 - 1}]
    config = {
        "namespaces": [{"name": "primary", "queues": orders}, {"name": "secondary", "queues": backlog}],
    }
    with LocalNamespaces("primary", "secondary", config=config, log_level="warning") as made:
        yield made


class KilledPair:
    """One destination and the backlog queue, with the ledger that all clients of a test share."""

    _numbers = itertools.count()

    def __init__(self, namespaces: LocalNamespaces, folder: Path) -> None:
        self.entity = f"orders-{next(self._numbers)}"
        self.primary, self.secondary = (namespaces[name].connection_string for name in ("primary", "secondary"))
        self.ledger = folder / "ledger"
        self.folder = folder
        assert namespaces.data is not None
        self.arrived = StoredIds(namespaces.data / "primary.sqlite", self.entity)
        self.elsewhere = f"orders-{next(self._numbers)}"
        """Another entity of the primary."""
        self.arrived_elsewhere = StoredIds(namespaces.data / "primary.sqlite", self.elsewhere)
        self._left = StoredIds(namespaces.data / "secondary.sqlite", QUEUE)
        self._others = set(self._left.all())
        """Dead letters that other tests have left."""
        self.safe: set[str] = set()
        """What was reported safe."""
        self.wrong: list[str] = []
        """What the checks found."""

    def fill(self, names: Sequence[str], **aliases: object) -> None:
        """Sends messages as a paired sender diverts them, and records the sends."""
        properties = {"x-ms-path": self.entity, **{f"x-ms-{name}": value for name, value in aliases.items()}}
        messages = [Message(marked_body(name), message_id=name, application_properties=properties) for name in names]
        asyncio.run(self._send(messages))
        with Ledger(self.ledger) as ledger:
            sizes = [len(message.body) for message in messages]
            place = f"{PRIMARY_NAME}/{self.entity}"
            ledger.done(Stage.SEND_BACKLOG, SECONDARY_NAME, QUEUE, names, sizes, place, seconds=0.1)
        self.safe.update(names)

    async def _send(self, messages: Sequence[Message]) -> None:
        async with connect(self.secondary) as bus:
            await (await bus.sender(QUEUE)).send(messages)

    def dead_letter(self, names: Sequence[str]) -> None:
        """Fills the backlog queue, and moves these messages to its dead-letter queue as a syphon does."""
        self.fill(names)
        with Ledger(self.ledger, Role.SYPHON) as ledger:
            source, destination = f"{SECONDARY_NAME}/{QUEUE}", f"{PRIMARY_NAME}/{self.entity}"
            ledger.moved(Move.DEAD_LETTERED, names, source, destination)
        with (
            ServiceBusClient.from_connection_string(self.secondary) as client,
            client.get_queue_receiver(QUEUE) as receiver,
        ):
            left, others = set(names), []
            while left:
                for message in receiver.receive_messages(len(left), max_wait_time=5):
                    if message.message_id not in left:
                        others.append(message)
                        continue
                    receiver.dead_letter_message(message, reason="Reason", error_description="why")
                    left.remove(message.message_id)
            for message in others:
                receiver.abandon_message(message)

    def syphon(self, **more: Any) -> SyphonWork:
        return SyphonWork(self.primary, self.secondary, (QUEUE,), self.ledger, **more)

    def dead_letters(self) -> set[str]:
        """Returns the ids in the dead-letter queue of the backlog queue, by the official client."""
        with (
            ServiceBusClient.from_connection_string(self.secondary) as client,
            client.get_queue_receiver(QUEUE, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver,
        ):
            return {str(message.message_id) for message in receiver.peek_messages(1000, sequence_number=1)}

    def drain(self) -> None:
        """Brings everything home, by a syphon that nothing happens to."""
        process = KilledProcess(run_syphon, self.syphon(drain=True, window=_DRAIN_WINDOW), KillPlan())
        code = process.join(_DRAIN_SECONDS)
        assert code == 0, f"the last syphon ended with {code}"

    def not_accepted(self, found: Balance) -> set[str]:
        """Returns the messages in the queues that the ledger has not accepted."""
        stored = self.arrived.ever() + self._left.all()
        return set(stored) - self._others - {message.id for message in found.accepted}

    def check(self, when: str, *, is_over: bool = False) -> Balance:
        """Returns the balance of the ledger, and records in `wrong` what the queues contradict."""
        # The backlog first: a message on its way between the two counts is then in both, not in none.
        left = self._left.all()
        arrived = self.arrived.ever() + self.arrived_elsewhere.ever()
        dead = dead_writers(self.ledger)
        entries = list(read_ledger(self.ledger))
        found = balance(entries, dead)
        refused = refused_returns(entries)
        wrong = contradictions(
            found, arrived=arrived, left=left, safe=self.safe, is_over=is_over, refused=() if is_over else refused
        )
        self.wrong += [f"{when}: {line}" for line in wrong]
        return found
