"""Mutations of recorded HTTP requests against the front: every one ends in answers and a closed connection.

    python -m tests.fuzz.http --inputs 20000 --seed 1

Nothing may raise, no answer may be a 500, and what is written must be HTTP. A failure names the seed that repeats it.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass

from tests.namespace.front.at_work import at_work
from tests.namespace.front.recorded import traffic
from tests.namespace.front.serving import TOKEN, Recorder, converse, handler
from twinbus.namespace.driver import Driver
from twinbus.namespace.engine.descriptions import QueueDescription, SubscriptionDescription, TopicDescription
from twinbus.namespace.front.http import HttpHandler

RECORDED = traffic(TOKEN)
INTERESTING = (
    b"\x00",
    b"\r\n",
    b"\r\n\r\n",
    b"%",
    b"%2F",
    b"%00",
    b"%FF",
    b"/",
    b"$",
    b"&",
    b"]]>",
    b"<!DOCTYPE x [<!ENTITY e 'x'>]>",
    b"<![CDATA[",
    b"&#0;",
    b"-1",
    b"99999999999999999999",
    b"P99999999D",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 7\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
    b"Expect: 100-continue\r\n",
    b"\xf0\x9f\x90\x87",
)


@dataclass
class Tally:
    inputs: int = 0
    answered: int = 0
    silent: int = 0


class FuzzError(AssertionError):
    """An input that was not answered as it should be."""


def mutate(chance: random.Random) -> list[bytes]:
    """One to three requests, damaged, and cut into pieces as a network might."""
    data = bytearray(b"".join(chance.choices(RECORDED, k=chance.randint(1, 3))))
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place = chance.randrange(len(data) + 1)
        length = min(chance.choice((1, 2, 8, 64, 512)), len(data) - place)
        match chance.randrange(7):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length] * chance.choice((1, 2, 50))
            case 3:
                data[place:place] = chance.choice(INTERESTING)
            case 4:
                data[place : place + length] = chance.choice(INTERESTING)
            case 5:
                other = chance.choice(RECORDED)
                start = chance.randrange(len(other))
                data[place : place + length] = other[start : start + length]
            case _:
                del data[place:]
    if not data:
        return [b"\x00"]
    cuts = sorted(chance.choices(range(len(data)), k=chance.choice((0, 1, 5))))
    return [bytes(data[start:end]) for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < end]


async def world() -> HttpHandler:
    return handler(
        await at_work(
            Driver,
            QueueDescription(path="a/b"),
            TopicDescription(path="t"),
            SubscriptionDescription(topic="t", name="s"),
        )
    )


def judge(stream: Recorder, tally: Tally) -> None:
    written = bytes(stream.written)
    if not stream.closed:
        raise FuzzError("the connection was not closed")
    if written and not written.startswith(b"HTTP/1.1 "):
        raise FuzzError(f"what was written is not HTTP: {written[:60]!r}")
    if b"HTTP/1.1 500" in written:
        raise FuzzError("an input made the front fail")
    tally.inputs += 1
    tally.answered += bool(written)
    tally.silent += not written


async def run(inputs: int, seed: int) -> Tally:
    tally = Tally()
    http = await world()
    for number in range(inputs):
        chance = random.Random(f"{seed}/{number}")
        chunks = mutate(chance)
        try:
            judge(await converse(http, *chunks), tally)
        except Exception as wrong:
            raise FuzzError(f"input {number} of seed {seed}: {wrong!r} for {b''.join(chunks)!r}") from wrong
        if number % 500 == 499:
            http = await world()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the HTTP front.")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"http: {options.inputs} inputs, seed {options.seed}")
    tally = asyncio.run(run(options.inputs, options.seed))
    print(f"http: {tally.answered} answered, {tally.silent} closed without a word, none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
