"""Serial numbers of 32 bits (RFC 1982; amqp-core-transport §2.8.10): delivery ids, transfer ids, delivery counts."""

from collections.abc import Iterable

MASK = 0xFFFFFFFF


def distance(start: int, end: int) -> int:
    """Return the number of steps from `start` to `end`; negative if `end` comes before `start`."""
    steps = (end - start) & MASK
    return steps if steps < 0x80000000 else steps - 0x100000000


def consecutive_runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return a pair (first, last) for each run of consecutive ids. `ids` are read in the order given."""
    found: list[tuple[int, int]] = []
    for number in ids:
        if found and number == (found[-1][1] + 1) & MASK:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
