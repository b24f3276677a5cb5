"""N2 over several entities: after a kill at any instant, no forward is lost or doubled, no transaction applied in part.

Messages go `entry` → `hall` → topic `fan`, of which one subscription keeps them and the other forwards to `end`.
What is sent twice to `twice` is forwarded to `once`, what is dead-lettered in `broken` to `graves`; these detect
duplicates.
Transactions complete a message of `in` and send its successor to `left` and `right`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.amqp.transaction_requests import discharge
from tests.crash.inspection import check_file
from tests.namespace.front.amqp_peer import Peer
from tests.namespace.front.transaction_peer import TransactionPeer
from twinbus.amqp import Connection, build_message, split_sections
from twinbus.connect import RECEIVE_AND_DELETE, ServiceBusConnection, connect
from twinbus.message import Message
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.usefixtures("compiled")

LIVES = 6
SEED = 7
LONGEST_DELAY = 0.4
TIMEOUT = 30.0
MOST_LOOKS = 1000
DETECTS = {"requires_duplicate_detection": True, "duplicate_detection_history_time_window": "P1D"}
KEPT, ON = "fan/Subscriptions/kept", "fan/Subscriptions/on"
ENDS = ("in", "left", "right", "end", KEPT, "once", "broken", "graves")
CONFIG = {
    "namespaces": [
        {
            "name": "primary",
            "queues": [
                {"name": "entry", "forward_to": "hall"},
                {"name": "hall", "forward_to": "fan"},
                {"name": "end"},
                {"name": "once", **DETECTS},
                {"name": "twice", "forward_to": "once"},
                {"name": "graves", **DETECTS},
                {
                    "name": "broken",
                    "forward_dead_lettered_messages_to": "graves",
                    "lock_duration": "PT5M",
                    "max_delivery_count": 1000,
                },
                {"name": "in", "lock_duration": "PT5M", "max_delivery_count": 1000},
                {"name": "left"},
                {"name": "right"},
            ],
            "topics": [{"name": "fan", "subscriptions": [{"name": "kept"}, {"name": "on", "forward_to": "end"}]}],
        }
    ]
}


class Together:
    """The requests and answers of all lives."""

    def __init__(self) -> None:
        self.forwarded: dict[str, bool] = {}
        self.moved: dict[str, bool | None] = {}
        """By message id of the input: True if the transaction was committed, False if rolled back, None if unknown."""
        self.put_in: dict[str, bool] = {}
        self.doubled: dict[str, bool] = {}
        self.broken: dict[str, bool] = {}
        """By message id: whether the send was acknowledged."""
        self.buried: set[str] = set()
        self.figures: Counter[str] = Counter()

    async def send_forever(self, connection_string: str, life: int, rng: Random) -> None:
        async with connect(connection_string, timeout=TIMEOUT) as bus:
            oracle = {"entry": self.forwarded, "in": self.put_in, "twice": self.doubled, "broken": self.broken}
            senders = [(await bus.sender(name), book, 2 if name == "twice" else 1) for name, book in oracle.items()]
            for number in range(100_000):
                names = [f"{life}-{number}-{index}" for index in range(rng.choice((1, 1, 7)))]
                for sender, book, times in senders:
                    book.update(dict.fromkeys(names, False))
                    for _ in range(times):
                        await sender.send([Message(b"." * rng.choice((10, 20_000)), message_id=name) for name in names])
                    book.update(dict.fromkeys(names, True))
                    self.figures["acknowledged"] += times * len(names)
                await asyncio.sleep(rng.random() * 0.005)

    async def bury_forever(self, connection_string: str) -> None:
        async with connect(connection_string, timeout=TIMEOUT) as bus, await bus.receiver("broken") as receiver:
            while True:
                found = await receiver.receive(10, TIMEOUT)
                await receiver.dead_letter(found, "broken")
                self.buried.update(str(message.message_id) for message in found)
                self.figures["buried"] += len(found)

    async def transact_forever(self, port: int, rng: Random) -> None:
        loop = asyncio.get_running_loop()
        core = Connection.client("raw", "localhost")
        _, peer = await loop.create_connection(lambda: Peer(core, port), "127.0.0.1", port)
        try:
            assert await peer.put_token() == 202
            acting = await TransactionPeer.on(peer)
            left, right = await peer.sender("left"), await peer.sender("right")
            receiver = await peer.receiver("in")
            while True:
                peer.grant(receiver, 1)
                (found,) = await peer.received(receiver, 1)
                name = str(split_sections(found.payload).properties.message_id)
                transaction = await acting.begin()
                await acting.settle(found, transaction)
                await acting.send(left, transaction, name)
                await acting.send(right, transaction, name)
                if rng.random() < 0.2:
                    self.moved[name] = False
                    await acting.roll_back(transaction)
                    self.figures["rolled back"] += 1
                    continue
                self.moved[name] = None
                acting.link.send(name.encode(), build_message(value=discharge(transaction, fail=False)))
                peer.flush()
                await peer.answers(2)  # of the coordinator, and of the settlement
                self.moved[name] = True
                self.figures["committed"] += 1
        finally:
            peer.close()

    async def check(self, bus: ServiceBusConnection) -> list[str]:
        """Return what is wrong, after a restart and when everything was forwarded."""
        for name in ("entry", "hall", ON, "twice", "broken/$DeadLetterQueue"):
            await until_empty(bus, name)
        there = {name: await ids(bus, name) for name in ENDS}
        wrong = [f"{name}: {id} is there {n} times" for name in there for id, n in there[name].items() if n > 1]
        for id, acknowledged in self.forwarded.items():
            places = (id in there["end"], id in there[KEPT])
            self.forwarded[id] = any(places)
            if places[0] != places[1] or (acknowledged and not places[0]):
                wrong.append(f"forwarded {id}: acknowledged {acknowledged}, at the ends {places}")
        for id, acknowledged in self.put_in.items():
            is_in, is_left, is_right = (id in there[name] for name in ("in", "left", "right"))
            committed = self.moved.get(id, False)
            if is_left != is_right or (is_in and is_left) or (acknowledged and not (is_in or is_left)):
                wrong.append(f"half a transaction: {id} in {is_in}, left {is_left}, right {is_right}")
            if committed is not None and committed != is_left:
                wrong.append(f"{id}: committed {committed}, left {is_left}")
            self.put_in[id], self.moved[id] = is_in or is_left, is_left
        return wrong + self._check_detecting(there)

    def _check_detecting(self, there: dict[str, Counter[str]]) -> list[str]:
        wrong = [f"{id} never came to once" for id, sent in self.doubled.items() if sent and id not in there["once"]]
        for id, acknowledged in self.broken.items():
            places = (id in there["broken"], id in there["graves"])
            if all(places) or (acknowledged and not any(places)) or (id in self.buried and not places[1]):
                wrong.append(f"broken {id}: acknowledged {acknowledged}, buried {id in self.buried}, there {places}")
            self.broken[id] = any(places)
        self.doubled = {id: id in there["once"] for id in self.doubled}
        return wrong


async def ids(bus: ServiceBusConnection, name: str) -> Counter[str]:
    """Peek through the management node: a forwarding entity has no receivers."""
    found: Counter[str] = Counter()
    node = bus.management(name.partition("/$")[0], address=name)
    start = 1
    while page := await node.peek(start, 500):
        found.update(str(message.message_id) for message in page)
        start = (page[-1].sequence_number or 0) + 1
    await node.close()
    return found


async def until_empty(bus: ServiceBusConnection, name: str) -> None:
    for _ in range(MOST_LOOKS):
        if not await ids(bus, name):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} does not forward what it has")


async def live(together: Together, namespace: LocalNamespace, life: int) -> None:
    """Load the server until it is killed."""
    rng = Random(f"{SEED}-{life}")
    before = Counter(together.figures)
    tasks = [
        asyncio.create_task(together.send_forever(namespace.connection_string, life, rng)),
        asyncio.create_task(together.bury_forever(namespace.connection_string)),
        asyncio.create_task(together.transact_forever(namespace.port, rng)),
    ]
    async with asyncio.timeout(TIMEOUT):
        while any(together.figures[what] < before[what] + 3 for what in ("committed", "buried")):
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)
    await asyncio.sleep(rng.random() * LONGEST_DELAY)
    await asyncio.to_thread(namespace.kill)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_no_forward_is_lost_or_doubled_and_no_transaction_is_applied_in_part(tmp_path: Path) -> None:
    together = Together()
    namespace = LocalNamespace(data=tmp_path / "data", config=CONFIG, log_level="warning")
    await asyncio.to_thread(namespace.start)
    try:
        for life in range(LIVES):
            await live(together, namespace, life)
            check_file(tmp_path / "data", tmp_path / "copy")
            await asyncio.to_thread(namespace.start)
            async with connect(namespace.connection_string, timeout=TIMEOUT) as bus:
                wrong = await together.check(bus)
            assert not wrong, f"life {life}: {len(wrong)} wrong\n" + "\n".join(wrong[:20])
        print(dict(together.figures))
        assert together.figures["rolled back"] > 0
        async with connect(namespace.connection_string, timeout=TIMEOUT) as bus:
            for name in ENDS:
                async with await bus.receiver(name, mode=RECEIVE_AND_DELETE) as receiver:
                    while await receiver.receive(500, 0.2):
                        pass
        assert await asyncio.to_thread(namespace.stop) == 0
        # Nothing is left: no body remains after its last message.
        assert check_file(tmp_path / "data", tmp_path / "copy") == (0, 0, 0)
        assert "Traceback" not in namespace.log.read_text()
    finally:
        await asyncio.to_thread(namespace.close)
