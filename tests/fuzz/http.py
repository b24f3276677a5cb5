"""Mutations of recorded HTTP requests against the front: every one ends in answers and a closed connection.

    python -m tests.fuzz.http --inputs 20000 --seed 1

Nothing may raise, no answer may be a 500, and what is written must be HTTP. Requests made to be slow take CPU time in
proportion to their bytes (X1). A failure names the seed that repeats it.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.fuzz import cpu_cost
from tests.fuzz.harness import FindingError
from tests.fuzz.memory import BoundedMemory, peak_mib
from tests.namespace.front.bare_namespace import start_runtime
from tests.namespace.front.http_peer import TOKEN, RecordingStream, converse, handler
from tests.namespace.front.recorded_requests import python, request, traffic
from twinbus.namespace import NamespaceRuntime, QueueDescription, SubscriptionDescription, TopicDescription
from twinbus.namespace.front import HttpHandler

RECORDED = traffic(TOKEN)
_COSTS_EVERY: Final = 500
_HEALTHY_EVERY: Final = 10
_MOST_MEMORY: Final = 200  # MiB that the process may grow
_SMALL: Final = 15_000  # bytes
_LARGE: Final = 4 * _SMALL
_MOST_GROWTH: Final = 10.0  # of CPU time from small to large: 4 is linear, 16 quadratic


def _put(body: bytes) -> list[bytes]:
    return [request("PUT", "/q?api-version=2021-05", body, [("Authorization", TOKEN)])]


def _set_fault(body: bytes) -> list[bytes]:
    return [request("POST", "/$faults", body, [("Authorization", TOKEN)])]


def _get(target: str, *headers: tuple[str, str]) -> list[bytes]:
    return [request("GET", target, None, headers or [("Authorization", TOKEN)])]


def _numbered(pattern: bytes, size: int) -> bytes:
    return b"".join(pattern % number for number in range(size // len(pattern % 0)))


# Requests of about so many bytes, each made to cost more than its size.
SLOW: Final[dict[str, Callable[[int], list[bytes]]]] = {
    "a long namespace": lambda size: _put(
        b'<a xmlns:n="' + b"u" * size + b'">' + _numbered(b"<n:b%d/>", size) + b"</a>"
    ),
    "attributes in a long namespace": lambda size: _put(
        b'<a xmlns:n="' + b"u" * size + b'" ' + _numbered(b'n:b%d="" ', size) + b"/>"
    ),
    "nested namespaces": lambda size: _put(_numbered(b'<a xmlns:n%d="u">', size)),
    "attributes": lambda size: _put(b"<a " + _numbered(b'b%d="" ', size) + b"/>"),
    "siblings": lambda size: _put(b"<a>" + b"<b/>" * (size // 4) + b"</a>"),
    "character references": lambda size: _put(b"<a>" + b"&#65;" * (size // 5) + b"</a>"),
    "JSON members": lambda size: _set_fault(b"{" + _numbered(b'"k%d":1,', size) + b'"k":1}'),
    "JSON digits": lambda size: _set_fault(b'{"count":' + b"9" * size + b"}"),
    "JSON lists": lambda size: _set_fault(b"[" * size),
    "segments": lambda size: _get("/a" * (size // 2)),
    "escapes": lambda size: _get("/" + "%41" * (size // 3)),
    "a query": lambda size: _get("/q?" + "a=1&" * (size // 4)),
    "headers": lambda size: _get("/q", *((f"h{number}", "x") for number in range(size // 10))),
    "a token's fields": lambda size: _get("/q", ("Authorization", "SharedAccessSignature " + "a=1&" * (size // 4))),
    "requests": lambda size: _get("/") * (size // 250),
    "single bytes": lambda size: [bytes((byte,)) for byte in _get("/" + "a" * (size // 4))[0]],
}
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
class HttpFuzzCounts:
    inputs: int = 0
    answered: int = 0
    silent: int = 0
    slow: int = 0
    healthy: int = 0
    """How often a healthy client got what it asked for, after all inputs of a world."""
    steepest: float = 0.0
    """Growth of the CPU time of a request made to be slow when it becomes four times as long."""


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
        await start_runtime(
            NamespaceRuntime,
            QueueDescription(path="a/b"),
            TopicDescription(path="t"),
            SubscriptionDescription(topic="t", name="s"),
        )
    )


def judge(stream: RecordingStream, tally: HttpFuzzCounts) -> None:
    written = bytes(stream.written)
    if not stream.closed:
        raise FindingError("the connection was not closed")
    if written and not written.startswith(b"HTTP/1.1 "):
        raise FindingError(f"what was written is not HTTP: {written[:60]!r}")
    if b"HTTP/1.1 500" in written:
        raise FindingError("an input made the front fail")
    tally.inputs += 1
    tally.answered += bool(written)
    tally.silent += not written


async def compare_costs(http: HttpHandler, name: str, tally: HttpFuzzCounts) -> None:
    small, large = SLOW[name](_SMALL), SLOW[name](_LARGE)
    grown = await cpu_cost.ratio_of(lambda: converse(http, *large), lambda: converse(http, *small), _MOST_GROWTH)
    tally.slow += 1
    tally.steepest = max(tally.steepest, grown)
    if grown > _MOST_GROWTH:
        raise FindingError(f"{name}: four times the bytes take {grown:.0f} times the CPU time")


async def check_healthy(http: HttpHandler, tally: HttpFuzzCounts) -> None:
    """A client creates an entity, reads it and deletes it, while a hostile one has sent half of its input."""
    entity, signed = "/healthy?api-version=2021-05", [("Authorization", TOKEN)]
    body = python("QueueDescription", "<MaxDeliveryCount>7</MaxDeliveryCount>")
    asked = [
        request("PUT", entity, body, signed),
        request("GET", entity, None, signed),
        request("DELETE", entity, None, signed),
    ]
    written = bytes((await converse(http, *asked)).written)
    statuses = [int(part[:3]) for part in written.split(b"HTTP/1.1 ")[1:]]
    if statuses != [201, 200, 200] or b"<MaxDeliveryCount>7</MaxDeliveryCount>" not in written:
        raise FindingError(f"a healthy client got {statuses}")
    tally.healthy += 1


async def run(inputs: int, seed: int) -> HttpFuzzCounts:
    tally, memory = HttpFuzzCounts(), BoundedMemory(_MOST_MEMORY)
    http = await world()
    for number in range(inputs):
        chance = random.Random(f"{seed}/{number}")
        chunks = mutate(chance)
        try:
            beside = partial(check_healthy, http, tally) if number % _HEALTHY_EVERY == 0 else None
            judge(await converse(http, *chunks, meanwhile=beside), tally)
        except Exception as wrong:
            raise FindingError(f"input {number} of seed {seed}: {wrong!r} for {b''.join(chunks)!r}") from wrong
        if number % _COSTS_EVERY == _COSTS_EVERY - 1:
            http = await world()
            await compare_costs(http, random.Random(f"{seed}/{number}/costs").choice(list(SLOW)), tally)
    memory.check()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the HTTP front.")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"http: {options.inputs} inputs, seed {options.seed}")
    tally = asyncio.run(run(options.inputs, options.seed))
    print(
        f"http: {tally.answered} answered, {tally.silent} closed without a word, none failed; a healthy client was "
        f"served {tally.healthy} times beside them; peak {peak_mib()} MiB"
    )
    print(
        f"http: of {tally.slow} requests made to be slow, four times the bytes took {tally.steepest:.1f} times the CPU"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
