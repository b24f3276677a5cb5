"""A paired sender compared with the bare SDK sender of the same kind, and the times of an outage.

Run: python bench/pairing.py [--pairs 40] [--messages 200] [--senders 1000] [--skip-outages]
"""

import argparse
import asyncio
import os
import random
import resource
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.testing import LocalNamespace

QUEUES = [f"orders-{number}" for number in range(40)]
CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": queue} for queue in QUEUES]}]}
BODY = b"x" * 1024


# --- the healthy path (S1) -------------------------------------------------------------------------------------------


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the median ratio, and its 95 % confidence interval by resampling."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def told(kind: str, runs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> None:
    for name, index in (("cpu", 0), ("wall", 1)):
        bare = statistics.median(run[0][index] for run in runs)
        paired = statistics.median(run[1][index] for run in runs)
        ratio, low, high = interval([run[1][index] / run[0][index] for run in runs])
        print(f"{kind:5} {name:4}  bare {bare:5.0f} µs  paired {paired:5.0f} µs a message  "
              f"ratio {ratio:.3f} (95 %: {low:.3f} to {high:.3f}, {len(runs)} pairs of runs)")  # fmt: skip


def sync_cost(send: Callable[[ServiceBusMessage], None], messages: int) -> tuple[float, float]:
    batch = [ServiceBusMessage(BODY) for _ in range(messages)]
    cpu, wall = time.process_time(), time.perf_counter()
    for message in batch:
        send(message)
    return (time.process_time() - cpu) / messages * 1e6, (time.perf_counter() - wall) / messages * 1e6


async def aio_cost(send: Callable[[ServiceBusMessage], Awaitable[None]], messages: int) -> tuple[float, float]:
    batch = [ServiceBusMessage(BODY) for _ in range(messages)]
    cpu, wall = time.process_time(), time.perf_counter()
    for message in batch:
        await send(message)
    return (time.process_time() - cpu) / messages * 1e6, (time.perf_counter() - wall) / messages * 1e6


def healthy_sync(primary: str, secondary: str, pairs: int, messages: int) -> None:
    runs = []
    with (
        ServiceBusClient.from_connection_string(primary) as client,
        client.get_queue_sender(QUEUES[0]) as bare,
        pair_connection_strings(primary, secondary) as pair,
        pair.get_queue_sender(QUEUES[1]) as paired,
    ):
        for number in range(pairs + 2):
            # In turn, so that neither always comes first.
            if number % 2:
                one, other = sync_cost(bare.send_messages, messages), sync_cost(paired.send_messages, messages)
            else:
                other, one = sync_cost(paired.send_messages, messages), sync_cost(bare.send_messages, messages)
            runs.append((one, other))
    told("sync", runs[2:])


async def healthy_aio(primary: str, secondary: str, pairs: int, messages: int) -> None:
    runs = []
    async with (
        AioServiceBusClient.from_connection_string(primary) as client,
        client.get_queue_sender(QUEUES[0]) as bare,
        aio.pair_connection_strings(primary, secondary) as pair,
        pair.get_queue_sender(QUEUES[1]) as paired,
    ):
        for number in range(pairs + 2):
            if number % 2:
                one = await aio_cost(bare.send_messages, messages)
                other = await aio_cost(paired.send_messages, messages)
            else:
                other = await aio_cost(paired.send_messages, messages)
                one = await aio_cost(bare.send_messages, messages)
            runs.append((one, other))
    told("aio", runs[2:])


# --- outages ---------------------------------------------------------------------------------------------------------


def kill(primary: LocalNamespace, _: str) -> None:
    primary.kill()


def black_hole(primary: LocalNamespace, _: str) -> None:
    primary.faults.set("black-hole")


def freeze(primary: LocalNamespace, _: str) -> None:
    os.kill(primary.pid, signal.SIGSTOP)


def detach(primary: LocalNamespace, queue: str) -> None:
    primary.faults.set("detach", entity=queue)


def heal(primary: LocalNamespace) -> None:
    if not primary.running:
        primary.start()
    os.kill(primary.pid, signal.SIGCONT)
    primary.faults.clear()


async def outage(
    driver: str, servers: tuple[LocalNamespace, LocalNamespace], cause: Callable[..., None], queue: str, options: Any
) -> None:
    primary, secondary = servers

    async def do(call: Callable[..., Any], *arguments: Any) -> Any:
        if driver == "aio":
            return await call(*arguments)
        return await asyncio.to_thread(call, *arguments)

    strings = primary.connection_string, secondary.connection_string
    pair: Any
    if driver == "aio":
        pair = await aio.pair_connection_strings(*strings, options=options)
    else:
        pair = await asyncio.to_thread(pair_connection_strings, *strings, options=options)
    sender = pair.get_queue_sender(queue)
    await do(sender.send_messages, ServiceBusMessage(BODY))
    await asyncio.to_thread(cause, primary, queue)
    died = time.perf_counter()
    calls = 0
    while True:
        calls += 1
        try:
            await do(sender.send_messages, ServiceBusMessage(BODY))
            break
        except Exception:
            await asyncio.sleep(0.05)
    safe = time.perf_counter() - died
    await asyncio.to_thread(heal, primary)
    back = time.perf_counter()
    # A restored entity is on trial until a message arrives (S14): the message below.
    while pair.entities()[0].state not in ("on_trial", "healthy"):  # noqa: ASYNC110 - threads of the pair change it
        await asyncio.sleep(0.005)
    await do(sender.send_messages, ServiceBusMessage(BODY))
    direct = time.perf_counter() - back
    await do(pair.close)
    interval_seconds = options.failover_interval.total_seconds()
    aim = interval_seconds + options.try_timeout.total_seconds() + (1.0 if interval_seconds else 0.2)
    ping = options.ping_interval.total_seconds()
    print(f"{driver:5} {cause.__name__:10} interval {interval_seconds:4.0f} s: safe in the backlog after {safe:6.2f} s "
          f"(aim ≤ {aim:.1f}, {calls} calls); back on the primary {direct:5.2f} s after its return "
          f"(aim ≤ {ping + 0.2:.1f})", flush=True)  # fmt: skip


async def thousand(strings: tuple[str, str], senders: int) -> None:
    """One pair with many senders in a process: memory, connections, time to divert them all."""
    async with aio.pair_connection_strings(*strings) as pair:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        made = [pair.get_queue_sender(QUEUES[2]) for _ in range(senders)]
        pair.force_failover(QUEUES[2])
        sockets = _sockets()
        begun = time.perf_counter()
        await asyncio.gather(*(sender.send_messages(ServiceBusMessage(BODY)) for sender in made))
        seconds = time.perf_counter() - begun
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
        print(f"{senders} senders of one pair: all diverted in {seconds:.2f} s over "
              f"{_sockets() - sockets} connections, {grown:.0f} MB more at the peak")  # fmt: skip


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += str(link.readlink()).startswith("socket:")
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--senders", type=int, default=1000)
    parser.add_argument("--skip-outages", action="store_true")
    given = parser.parse_args()
    with LocalNamespace("primary", memory=True, config=CONFIG) as primary, LocalNamespace("secondary") as secondary:
        strings = primary.connection_string, secondary.connection_string
        healthy_sync(*strings, given.pairs, given.messages)
        asyncio.run(healthy_aio(*strings, given.pairs, given.messages))
        asyncio.run(thousand(strings, given.senders))
        if given.skip_outages:
            return
        queues = iter(QUEUES[3:])
        at_once = SendAvailabilityOptions(
            failover_interval=timedelta(0), ping_interval=timedelta(seconds=2), ping_jitter=0.0
        )
        default = SendAvailabilityOptions(ping_interval=timedelta(seconds=2), ping_jitter=0.0)
        for driver in ("sync", "aio"):
            for cause in (kill, black_hole, freeze, detach):
                asyncio.run(outage(driver, (primary, secondary), cause, next(queues), at_once))
        for cause in (kill, black_hole, freeze, detach):
            asyncio.run(outage("sync", (primary, secondary), cause, next(queues), default))


if __name__ == "__main__":
    main()
