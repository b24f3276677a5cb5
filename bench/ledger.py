"""What the ledger costs a paired sender: CPU per message with it on beside off, message by message in turn.

One thread sends to two equal primaries. The CPU time of messages with the ledger includes the writer's thread and its
syncs. A run ends when its entries are on the disk: a thousand, which is the group of a sender at full speed. Measures
both durabilities, one after the other.

On a busy machine the mean varies, because other processes interrupt some messages. So the CPU time of the median
message in the sending thread is printed too. It does not include the writer's thread.

Run: python bench/ledger.py [--properties] [--stop] [--runs 60] [--messages 1000] [--driver sync|aio|both] [--rate 500]
     [--durability process|lazy|both]
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from azure.servicebus import ServiceBusMessage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.pairing import BODY, CONFIG, QUEUES, interval
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.ledger import Ledger, LedgerOptions
from twinbus.testing import LocalNamespace

AIMS = {"process": 1.06, "lazy": 1.03}
PROPERTIES = {"subject": "order", "session_id": "customer 17", "application_properties": {"kind": "coffee"}}


Send = Callable[[ServiceBusMessage], Awaitable[None]]


class Run(NamedTuple):
    """CPU time of a message in µs, without and with the ledger: the mean with all threads, and the median of one."""

    off: float
    on: float
    median_off: float
    median_on: float


async def cost(sends: Sequence[Send], ledger: Ledger, given: Any) -> Run:
    more: dict[str, Any] = PROPERTIES if given.properties else {}
    batch = [ServiceBusMessage(BODY, **more) for _ in range(2 * given.messages)]
    spent: tuple[list[float], list[float]] = ([], [])
    begun, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for number, message in enumerate(batch):
        if given.rate and (ahead := number / 2 / given.rate - (time.perf_counter() - begun)) > 0:
            await asyncio.sleep(ahead)
        # In turn, so that neither always comes first.
        which = (number + number // 2) % 2
        cpu = time.thread_time()
        await sends[which](message)
        spent[which].append((time.thread_time() - cpu) * 1e6)
    await ledger.flushed()
    others = (time.process_time() - process - (time.thread_time() - thread)) * 1e6 / given.messages
    off, on = map(statistics.mean, spent)
    return Run(off, on + others, *map(statistics.median, spent))


async def compared(driver: str, primaries: Sequence[str], secondary: str, ledger: Ledger, given: Any) -> None:
    sends: list[Send] = []
    async with AsyncExitStack() as stack:
        for primary, used in zip(primaries, (None, ledger), strict=True):
            options = SendAvailabilityOptions(ledger=used)
            if driver == "aio":
                pair = await stack.enter_async_context(aio.pair_connection_strings(primary, secondary, options=options))
                sends.append((await stack.enter_async_context(pair.get_queue_sender(QUEUES[0]))).send_messages)
            else:
                sync = stack.enter_context(pair_connection_strings(primary, secondary, options=options))
                sends.append(_awaited(stack.enter_context(sync.get_queue_sender(QUEUES[0])).send_messages))
        runs = [await cost(sends, ledger, given) for _ in range(given.runs + 2)]
    pace = f"{given.rate:g} a second" if given.rate else "one after the other"
    durability = ledger.options.durability
    told(f"{driver}, {durability}, {pace}", runs[2:], AIMS[durability])


def _awaited(send: Callable[[ServiceBusMessage], None]) -> Send:
    async def sent(message: ServiceBusMessage) -> None:
        send(message)

    return sent


def told(what: str, runs: list[Run], aim: float) -> None:
    off, on = statistics.median(run.off for run in runs), statistics.median(run.on for run in runs)
    ratio, low, high = interval([run.on / run.off for run in runs])
    more, least, most = interval([run.on - run.off for run in runs])
    middle, lower, higher = interval([run.median_on / run.median_off for run in runs])
    extra = statistics.median(run.median_on - run.median_off for run in runs)
    verdict = "met" if ratio <= aim else "missed"
    print(f"{what}: CPU off {off:.0f} µs, on {on:.0f} µs a message; ratio {ratio:.4f} (95 %: {low:.4f} to {high:.4f}, "
          f"{len(runs)} runs), aim ≤ {aim}: {verdict}; {more:+.1f} µs a message "
          f"({least:+.1f} to {most:+.1f}); the median message, sending thread: ratio {middle:.4f} (95 %: {lower:.4f} "
          f"to {higher:.4f}), {extra:+.1f} µs", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--properties", action="store_true", help="messages with a subject, a session and a property")
    parser.add_argument("--stop", action="store_true", help="a ledger that nothing may be sent without")
    parser.add_argument("--driver", choices=["sync", "aio", "both"], default="both")
    parser.add_argument("--durability", choices=["process", "lazy", "both"], default="both")
    parser.add_argument(
        "--rate",
        type=float,
        default=0,
        help="with the ledger, and as many without it",
    )
    given = parser.parse_args()
    drivers = ("sync", "aio") if given.driver == "both" else (given.driver,)
    durabilities = tuple(AIMS) if given.durability == "both" else (given.durability,)
    with (
        LocalNamespace("primary", memory=True, config=CONFIG) as off,
        LocalNamespace("primary", memory=True, config=CONFIG) as on,
        LocalNamespace("secondary", memory=True) as secondary,
    ):
        primaries = off.connection_string, on.connection_string
        for driver, durability in itertools.product(drivers, durabilities):
            options = LedgerOptions(on_error="stop" if given.stop else "go_on", durability=durability)
            with tempfile.TemporaryDirectory() as folder, Ledger(folder, options=options) as ledger:
                asyncio.run(compared(driver, primaries, secondary.connection_string, ledger, given))


if __name__ == "__main__":
    main()
