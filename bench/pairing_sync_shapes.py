"""Two shapes of a sync sender with a deadline, beside the bare SDK sender: cost of a healthy send, and how a call ends
on a namespace that froze (S1, S12). Run: python bench/pairing_sync_shapes.py [rounds] [messages]
"""

import asyncio
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.testing import LocalNamespace

QUEUE = "orders"
CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": QUEUE}]}]}
OPTIONS = SendAvailabilityOptions(
    backlog_queue_count=1, try_timeout=timedelta(seconds=1), failover_interval=timedelta(minutes=10)
)
Send = Callable[[ServiceBusMessage], None]


@contextmanager
def bare(primary: str, _: str) -> Iterator[Send]:
    with ServiceBusClient.from_connection_string(primary) as client, client.get_queue_sender(QUEUE) as sender:
        yield sender.send_messages


@contextmanager
def watched(primary: str, secondary: str) -> Iterator[Send]:
    """(b) the SDK's sync sender in the caller's thread, its socket shut from outside at the deadline."""
    with pair_connection_strings(primary, secondary, options=OPTIONS) as pair, pair.get_queue_sender(QUEUE) as sender:
        yield sender.send_messages


@contextmanager
def faced(primary: str, secondary: str) -> Iterator[Send]:
    """(a) a sync face over the aio driver in one loop thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[aio.Pair, aio.PairedSender]:
        pair = await aio.pair_connection_strings(primary, secondary, options=OPTIONS)
        sender = pair.get_queue_sender(QUEUE)
        await sender.__aenter__()
        return pair, sender

    pair, sender = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    yield lambda message: asyncio.run_coroutine_threadsafe(sender.send_messages(message), loop).result()
    asyncio.run_coroutine_threadsafe(pair.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def cost(send: Send, messages: int) -> tuple[float, float]:
    """CPU and wall time of one send, in microseconds."""
    batch = [ServiceBusMessage(b"x" * 1024) for _ in range(messages)]
    cpu, wall = time.process_time(), time.perf_counter()
    for message in batch:
        send(message)
    return (time.process_time() - cpu) / messages * 1e6, (time.perf_counter() - wall) / messages * 1e6


def frozen(send: Send, process: int) -> float:
    """How long a call takes that meets a frozen server, in seconds."""
    send(ServiceBusMessage(b"awake"))
    os.kill(process, signal.SIGSTOP)
    begun = time.perf_counter()
    try:
        send(ServiceBusMessage(b"asleep"))
    except Exception as error:
        ended = f"{type(error).__name__}"
    else:
        ended = "success"
    finally:
        os.kill(process, signal.SIGCONT)
    seconds = time.perf_counter() - begun
    print(f"    frozen: {ended} after {seconds:.2f} s (try_timeout 1 s)")
    return seconds


def main() -> None:
    rounds, messages = [int(word) for word in (*sys.argv[1:], *("20", "300")[len(sys.argv) - 1 :])]
    shapes = {"bare SDK": bare, "(a) face over aio": faced, "(b) watched": watched}
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in shapes}
    with LocalNamespace("primary", memory=True, config=CONFIG) as primary, LocalNamespace("secondary") as secondary:
        strings = primary.connection_string, secondary.connection_string
        for number in range(rounds + 1):
            for name, shape in shapes.items():
                with shape(*strings) as send:
                    cost(send, 20)
                    figure = cost(send, messages)
                if number:  # the first round warms up
                    figures[name].append(figure)
        for name, found in figures.items():
            print(
                f"{name:20} cpu {statistics.median(f[0] for f in found):6.0f} µs  "
                f"wall {statistics.median(f[1] for f in found):6.0f} µs a message"
            )
            for kind, index in (("cpu", 0), ("wall", 1)):
                ratios = [one[index] / peer[index] for one, peer in zip(found, figures["bare SDK"], strict=True)]
                spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
                print(f"    {kind:4} {statistics.mean(ratios):.3f} ± {spread:.3f} of the bare sender's, pair by pair")
        for name in ("(a) face over aio", "(b) watched"):
            with shapes[name](*strings) as send:
                print(name)
                frozen(send, primary.pid)


if __name__ == "__main__":
    main()
