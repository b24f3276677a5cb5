"""How often an entity fails over whose primary answers pings and refuses messages (S14), and what its callers notice.

Six threads or tasks send to one queue for a minute, with `ping_interval` 10 s and `failover_interval` 0:

    full    the queue is full: it accepts the small pings, and no message of 4 KB (`ping="message"`)
    link    links open, and every send fails (`ping="link"`)

Run: python bench/pairing_trials.py [--seconds 60] [--driver sync] [--driver aio]
"""

import argparse
import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusMessage

from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.namespace.store import SqliteStore
from twinbus.testing import LocalNamespace

QUEUE = "orders"
CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": QUEUE}]}]}
QUEUE_BYTES = 1024 * 1024 * 1024
"""The default size of a queue."""
ROOM = 1000
"""Bytes that the full queue has left: enough for pings."""
BODY = b"x" * 4000
SENDERS = 6
PAUSE = 0.05


class Load:
    """What became of the messages, and the events of the pair."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.sent = 0
        self.errors: list[Exception] = []
        self.events: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, error: Exception | None) -> None:
        with self._lock:
            if error is None:
                self.sent += 1
            else:
                self.errors.append(error)

    def hear(self, event: Any) -> None:
        with self._lock:
            self.events[event.name] += 1

    def result(self) -> str:
        events = ", ".join(f"{self.events[name]} {name}" for name in ("failover_engaged", "restored", "trial_failed"))
        return f"{self.sent} messages accepted, {len(self.errors)} errors to callers, {events}"


def options(ping: Any) -> SendAvailabilityOptions:
    return SendAvailabilityOptions(
        backlog_queue_count=2,
        failover_interval=timedelta(0),
        ping_interval=timedelta(seconds=10),
        ping_jitter=0.0,
        ping=ping,
    )


def sync_load(strings: tuple[str, str], ping: str, seconds: float) -> Load:
    with pair_connection_strings(*strings, options=options(ping)) as pair:
        load = Load(seconds)
        pair.on("*", load.hear)

        def run() -> None:
            with pair.get_queue_sender(QUEUE) as sender:
                while time.monotonic() < load.until:
                    try:
                        sender.send_messages(ServiceBusMessage(BODY))
                    except Exception as error:
                        load.note(error)
                    else:
                        load.note(None)
                    time.sleep(PAUSE)

        threads = [threading.Thread(target=run) for _ in range(SENDERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return load


async def aio_load(strings: tuple[str, str], ping: str, seconds: float) -> Load:
    async with aio.pair_connection_strings(*strings, options=options(ping)) as pair:
        load = Load(seconds)
        pair.on("*", load.hear)

        async def run() -> None:
            async with pair.get_queue_sender(QUEUE) as sender:
                while time.monotonic() < load.until:
                    try:
                        await sender.send_messages(ServiceBusMessage(BODY))
                    except Exception as error:
                        load.note(error)
                    else:
                        load.note(None)
                    await asyncio.sleep(PAUSE)

        await asyncio.gather(*(run() for _ in range(SENDERS)))
    return load


@contextmanager
def refusing_primary(ping: str) -> Iterator[LocalNamespace]:
    """A primary that answers pings of this kind, and takes no message."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalNamespace("primary", data=Path(folder), config=CONFIG) as primary,
    ):
        if ping == "link":
            primary.faults.set("internal-error", entity=QUEUE, points=["send"])
        else:
            primary.kill()
            store = SqliteStore(Path(folder) / "primary.sqlite")
            try:
                (stored,) = [found for found in store.open().entities if found.entity.path == QUEUE]
                store.commit([stored.queue._replace(size=QUEUE_BYTES - ROOM)])
            finally:
                store.close()
            primary.start()
        yield primary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--driver", action="append", choices=["sync", "aio"])
    given = parser.parse_args()
    with LocalNamespace("secondary", memory=True) as secondary:
        for ping in ("message", "link"):
            for driver in given.driver or ("sync", "aio"):
                with refusing_primary(ping) as primary:
                    strings = (primary.connection_string, secondary.connection_string)
                    if driver == "sync":
                        load = sync_load(strings, ping, given.seconds)
                    else:
                        load = asyncio.run(aio_load(strings, ping, given.seconds))
                print(f"{driver:4} ping={ping:7} {given.seconds:g} s: {load.result()}", flush=True)
                for kind, times in Counter(repr(error)[:160] for error in load.errors).items():
                    print(f"     {times} × {kind}", flush=True)


if __name__ == "__main__":
    main()
