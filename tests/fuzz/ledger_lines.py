"""Damaged lines of a ledger: decoded one by one, and read as a segment, with its balance and its verdict.

    python -m tests.fuzz.ledger_lines --inputs 20000 --seed 1

An input is one line. It passes if decoding returns an entry or raises EntryError, an entry can be written again, and
the whole ledger is read to its end with each bad line reported as a problem, never as another exception. A finding
names the seed and the number.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Final

from tests.fuzz.harness import FindingError, inputs_and_seed, named_input
from tests.fuzz.memory import BoundedMemory, peak_mib
from twinbus.ledger import (
    SEALED_SUFFIX,
    EntryError,
    Ledger,
    LineProblem,
    Role,
    Stage,
    balance,
    decode_entry,
    encode_entry,
    judge_ledger,
    read_ledger,
)

_MOST_GROWTH: Final = 200  # MiB
_LINES_PER_SEGMENT: Final = 100
_INTERESTING: Final = (
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e999", b"9" * 400, b"\xff",
    b'"\\ud800"', b"\x00", b"NaN", b'{"kind":"intent"}', b'"at":', b'"ids":', b"[" * 5000,
)  # fmt: skip


_VARYING: Final = {
    rb"[0-9a-f]{16}": b"0123456789abcdef",
    rb'"(at|pid|since|until)":[0-9]+': rb'"\1":1700000000000',
    rb'"seconds":[0-9.e-]+': b'"seconds":0.5',
    rb'"host":"[^"]*"': b'"host":"here"',
}
# Ids of entries are our own. They are written without quoting.
_OWN_ID: Final = re.compile(r"[\w-]*")


@dataclass
class LedgerFuzzCounts:
    inputs: int = 0
    entries: int = 0
    refused: int = 0
    segments: int = 0


def recorded(folder: Path) -> list[bytes]:
    """Return the lines of a real ledger: operations of every stage, moves, meters, states and gaps."""
    ledger = Ledger(folder, Role.SYPHON)
    for number, stage in enumerate(Stage):
        running = ledger.begin(stage, "contoso", "orders", ["a", number, b"\x01"], [10, 70_000, 5], "contoso/orders")
        running.end()
        ledger.begin(stage, "contoso", "orders", ["b"], 10)
    ledger.state("failed_over", {"entity": "orders", "count": 3, "ok": True}, pair="contoso/paris")
    ledger.close()
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.jsonl*")))
    # An input is repeated by its seed: the lines may not depend on time and process.
    for varying, fixed in _VARYING.items():
        text = re.sub(varying, fixed, text)
    return text.splitlines()


def damaged(chance: Random, lines: Sequence[bytes]) -> bytes:
    line = bytearray(chance.choice(lines))
    for _ in range(chance.choice((0, 1, 1, 2, 6))):
        place = chance.randrange(len(line) + 1)
        match chance.randrange(6):
            case 0 if place < len(line):
                line[place] ^= 1 << chance.randrange(8)
            case 1:
                del line[place : place + chance.choice((1, 3, 30))]
            case 2:
                line[place:place] = chance.choice(_INTERESTING)
            case 3:
                line[place : place + 4] = chance.choice(_INTERESTING)
            case 4:
                other = chance.choice(lines)
                line[place:] = other[chance.randrange(len(other)) :]
            case _:
                del line[place:]
    return bytes(line).replace(b"\n", b" ")


def _try_line(line: bytes, tally: LedgerFuzzCounts) -> bool:
    try:
        entry = decode_entry(line)
    except EntryError:
        tally.refused += 1
        return False
    tally.entries += 1
    if _OWN_ID.fullmatch(getattr(entry, "id", "")):
        written = encode_entry(entry)
        if encode_entry(decode_entry(written)) != written:
            raise FindingError(f"{line!r} does not survive a round trip")
    return True


def _try_segment(folder: Path, header: bytes, lines: Sequence[bytes], tally: LedgerFuzzCounts, sound: int) -> None:
    segment = folder / f"syphon-here-1-0123456789abcdef-0{SEALED_SUFFIX}"
    segment.write_bytes(b"\n".join([header, *lines, b""]))
    problems: list[LineProblem] = []
    entries = list(read_ledger(folder, problems.append))
    if len(entries) + len(problems) != len(lines) + 1:
        raise FindingError(f"{len(lines)} lines became {len(entries)} entries and {len(problems)} problems")
    if len(entries) > sound + 1:
        raise FindingError(f"{len(entries)} entries were read, {sound} lines are sound")
    found = balance(entries)
    sums = {name: value for name, value in asdict(found).items() if isinstance(value, int)}
    judge_ledger(sums, [str(problem) for problem in problems])
    tally.segments += 1


def run(inputs: int, seed: int) -> LedgerFuzzCounts:
    tally, memory = LedgerFuzzCounts(), BoundedMemory(_MOST_GROWTH)
    with tempfile.TemporaryDirectory() as name:
        lines = recorded(Path(name) / "recorded")
        folder = Path(name) / "fuzzed"
        folder.mkdir()
        for start in range(0, inputs, _LINES_PER_SEGMENT):
            numbers = range(start, min(start + _LINES_PER_SEGMENT, inputs))
            made = [damaged(Random(f"{seed}/{number}/line"), lines[1:]) for number in numbers]
            with named_input(seed, numbers):
                sound = sum(_try_line(line, tally) for line in made)
                _try_segment(folder, lines[0], made, tally, sound)
            tally.inputs += len(made)
    memory.check()
    return tally


def main() -> int:
    inputs, seed = inputs_and_seed("Fuzz the lines of a ledger.", 20_000)
    tally = run(inputs, seed)
    print(
        f"ledger_lines: {tally.inputs} inputs, {tally.entries} entries, {tally.refused} refused, {tally.segments} "
        f"segments read with balance and verdict; peak {peak_mib()} MiB; nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
