"""How long a pair with many open senders takes to close, compared with the SDK's client that closes as many senders.

Run: python bench/pairing_closing.py [--senders 2000] [--bare 200] [--retrying 0]

`--bare` is the number of senders of the SDK's own client: it closes them one after the other. `--retrying` is the
number of threads, or tasks with asyncio, that send while the pair closes: again and again, also after each error.
"""

import argparse
import asyncio
import contextlib
import resource
import threading
import time
from datetime import timedelta
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.testing import LocalNamespace

QUEUES = [f"orders-{number}" for number in range(40)]
# Opening many links takes a while on a busy machine.
OPTIONS = SendAvailabilityOptions(backlog_queue_count=1, try_timeout=timedelta(minutes=1))
AT_ONCE = 20


def told(kind: str, senders: int, wall: float, cpu: float) -> None:
    print(
        f"{kind:5} {senders:5} senders closed in {wall:.3f} s ({cpu:.3f} s of CPU), {wall / senders * 1e3:.2f} ms each"
    )


def bare(primary: str, senders: int) -> None:
    client = ServiceBusClient.from_connection_string(primary)
    made = [client.get_queue_sender(QUEUES[number % 40]) for number in range(senders)]
    for sender in made:
        sender.send_messages(ServiceBusMessage("x"))
    cpu, wall = time.process_time(), time.perf_counter()
    client.close()
    told("bare", senders, time.perf_counter() - wall, time.process_time() - cpu)


class RetryingThreads:
    """Threads that send until `stop`, each with one sender. They ignore errors."""

    def __init__(self, senders: list[Any]) -> None:
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(sender,)) for sender in senders]
        for thread in self._threads:
            thread.start()

    def _send(self, sender: Any) -> None:
        while not self._stopped.wait(0.001):
            with contextlib.suppress(Exception):
                sender.send_messages(ServiceBusMessage("x"))

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()


async def send_again_and_again(sender: Any) -> None:
    while True:
        with contextlib.suppress(Exception):
            await sender.send_messages(ServiceBusMessage("x"))
        await asyncio.sleep(0.001)


def sync(strings: tuple[str, str], senders: int, retrying: int) -> None:
    pair = pair_connection_strings(*strings, options=OPTIONS)
    made = [pair.get_queue_sender(QUEUES[number % 40]) for number in range(senders)]
    for sender in made:
        sender.send_messages(ServiceBusMessage("x"))
    threads = RetryingThreads(made[:retrying])
    cpu, wall = time.process_time(), time.perf_counter()
    pair.close()
    told("sync", senders, time.perf_counter() - wall, time.process_time() - cpu)
    threads.stop()


async def asyncio_pair(strings: tuple[str, str], senders: int, retrying: int) -> None:
    pair = await aio.pair_connection_strings(*strings, options=OPTIONS)
    made = [pair.get_queue_sender(QUEUES[number % 40]) for number in range(senders)]
    for first in range(0, senders, AT_ONCE):
        await asyncio.gather(
            *(sender.send_messages(ServiceBusMessage("x")) for sender in made[first : first + AT_ONCE])
        )
    tasks = [asyncio.create_task(send_again_and_again(sender)) for sender in made[:retrying]]
    await asyncio.sleep(0)
    cpu, wall = time.process_time(), time.perf_counter()
    await pair.close()
    told("aio", senders, time.perf_counter() - wall, time.process_time() - cpu)
    for task in tasks:
        task.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--senders", type=int, default=2000)
    parser.add_argument("--bare", type=int, default=200)
    parser.add_argument("--retrying", type=int, default=0)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = {"namespaces": [{"name": "primary", "queues": [{"name": queue} for queue in QUEUES]}]}
    with (
        LocalNamespace("primary", memory=True, config=config) as primary,
        LocalNamespace("s", memory=True) as secondary,
    ):
        strings = (primary.connection_string, secondary.connection_string)
        if given.bare:
            bare(strings[0], given.bare)
        sync(strings, given.senders, given.retrying)
        asyncio.run(asyncio_pair(strings, given.senders, given.retrying))


if __name__ == "__main__":
    main()
