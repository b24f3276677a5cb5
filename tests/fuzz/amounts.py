"""How many inputs each fuzzer gets, in each tier. All together, `make soak` runs 1,000,000 (X1)."""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.tiers import budget


class Amount(NamedTuple):
    quick: int
    full: int
    soak: int


AMOUNTS: Final = {
    "codec": Amount(3_000, 3_000, 300_000),
    "colliding_keys": Amount(0, 100, 4_000),  # some of the codec's inputs are of this kind, too
    "front": Amount(500, 500, 20_000),
    "limits": Amount(50, 400, 20_000),
    "http": Amount(1_000, 2_000, 200_000),
    "rules": Amount(200, 3_000, 200_000),
    "ledger_lines": Amount(2_000, 20_000, 256_000),
}
"""By the name of the fuzzer, which is a module of this folder."""

ALL: Final = sum(amount.soak for amount in AMOUNTS.values())


def inputs_of(part: str) -> int:
    """Return the number of inputs of a fuzzer in the current tier."""
    return budget(*AMOUNTS[part])


def shares(inputs: int) -> dict[str, int]:
    """Divide a number of inputs among the fuzzers, in the proportions of `make soak`."""
    return {part: max(1, inputs * amount.soak // ALL) for part, amount in AMOUNTS.items()}
