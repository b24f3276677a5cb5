"""Bytes against CPU time for the worst frames found: is decoding a straight line, and how steep?

    python bench/decode_worst.py [--sizes 1,4,16,64,256,1024] [--repeats 3] [--kinds uuid,ulong]

Each row is one family of `open` frames, decoded as the server decodes them before it knows the peer. The peer in the
same run is an `open` of the same size whose properties have text keys. "line" is the CPU time per byte at the largest
size over the median of those up to 64 KiB: 1 is a straight line, a quadratic family has 16 or more.
Sizes are skipped once a family has taken more than --patience seconds for one frame.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz.hostile_maps import KEYS, PERFORMATIVES, map_of_size, maps_of_64
from twinbus.amqp import AmqpError, encode_list_of
from twinbus.amqp.described_types import decode_described

KIB: Final = 1024
SMALL: Final = 64  # KiB
LEAST_SECONDS: Final = 0.02  # small frames are decoded repeatedly for at least this long


def _deep_lists(size: int) -> bytes:
    inner = b"\x45"
    for _ in range(55):
        inner = encode_list_of([inner])
    return encode_list_of([inner] * max(1, size // len(inner)))


def _repeated(one: bytes) -> Callable[[int], bytes]:
    return lambda size: encode_list_of([one] * max(1, size // len(one)))


OTHERS: Final[dict[str, Callable[[int], bytes]]] = {
    "dicts of 64 uuids": lambda size: maps_of_64("uuid", size),
    "dicts of 64 doubles": lambda size: maps_of_64("double", size),
    "lists 55 deep": _deep_lists,
    "empty lists": _repeated(b"\x45"),
    "empty maps": _repeated(b"\xc1\x01\x00"),
    "arrays of 16 nulls": _repeated(b"\xe0\x02\x10\x40"),  # elements that take no bytes
    "described nulls": _repeated(b"\x00\x40\x40"),
    "small numbers": _repeated(b"\x52\x01"),
}
FAMILIES: Final[dict[str, Callable[[int], bytes]]] = {
    **{kind: lambda size, kind=kind: map_of_size(kind, size) for kind in ("text", *KEYS)},  # type: ignore[misc]  # bound
    **OTHERS,
}


def seconds(body: bytes, repeats: int) -> float:
    """CPU time to decode the frame once: the least of several measurements."""
    found = []
    for _ in range(repeats):
        rounds, start = 0, time.process_time()
        while rounds == 0 or time.process_time() - start < LEAST_SECONDS:
            with suppress(AmqpError):  # some keys are not allowed in an open; they are decoded all the same
                decode_described(body, 0)
            rounds += 1
        found.append((time.process_time() - start) / rounds)
    return min(found)


def measured(family: str, sizes: list[int], repeats: int, patience: float) -> dict[int, float]:
    """Microseconds of CPU per byte, by size in KiB."""
    found: dict[int, float] = {}
    for size in sizes:
        body = PERFORMATIVES["open properties, nested"](FAMILIES[family](size * KIB))
        taken = seconds(body, repeats)
        found[size] = taken / len(body) * 1e6
        if taken > patience:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4,16,64,256,1024", help="KiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(FAMILIES))
    parser.add_argument("--patience", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    table = Table(title="CPU per byte of an `open` frame, µs; in brackets beside text keys of the same size and run")
    table.add_column("family")
    for size in sizes:
        table.add_column(f"{size} KiB", justify="right")
    table.add_column("line", justify="right")
    peer = measured("text", sizes, options.repeats, options.patience)
    steepest = 0.0
    for family in options.kinds.split(","):
        found = peer if family == "text" else measured(family, sizes, options.repeats, options.patience)
        line = found[max(found)] / median(cost for size, cost in found.items() if size <= SMALL)
        steepest = max(steepest, line)
        cells = [f"{found[size]:.3f} ({found[size] / peer[size]:.1f} ×)" if size in found else "…" for size in sizes]
        table.add_row(family, *cells, f"{line:.2f}")
    Console(width=170, highlight=False).print(table)
    print(f"steepest: {steepest:.2f}")


if __name__ == "__main__":
    main()
