"""Maps whose keys collide, of every kind and in every place where a map can stand.

    python -m tests.fuzz.colliding_keys --inputs 1000 --seed 1

An input passes if it takes CPU time in proportion to its bytes (X1). A finding names the seed and the number.
"""

from __future__ import annotations

import sys
from random import Random

from tests.fuzz.codec import CodecFuzzCounts, try_hostile_map
from tests.fuzz.harness import inputs_and_seed, named_input
from tests.fuzz.memory import BoundedMemory, peak_mib

_MOST_GROWTH = 200  # MiB


def run(inputs: int, seed: int) -> CodecFuzzCounts:
    tally, memory = CodecFuzzCounts(), BoundedMemory(_MOST_GROWTH)
    for number in range(inputs):
        with named_input(seed, number):
            taken = try_hostile_map(Random(f"{seed}/{number}/keys"), tally)
        tally.inputs += 1
        tally.refused += not taken
    memory.check()
    return tally


def main() -> int:
    inputs, seed = inputs_and_seed("Fuzz the AMQP codec with maps whose keys collide.", 1_000)
    tally = run(inputs, seed)
    print(
        f"colliding_keys: {tally.inputs} inputs, {tally.refused} refused, at most {tally.slowest:.1f} times as slow as "
        f"ordinary maps; peak {peak_mib()} MiB; nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
