"""Serial numbers of 32 bits (RFC 1982; amqp-core-transport §2.8.10): delivery ids, transfer ids, delivery counts."""

MASK = 0xFFFFFFFF


def after(number: int, steps: int = 1) -> int:
    return (number + steps) & MASK


def distance(start: int, end: int) -> int:
    """Steps from `start` to `end`; negative when `end` comes before it."""
    steps = (end - start) & MASK
    return steps if steps < 0x80000000 else steps - 0x100000000


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """Consecutive delivery ids as (first, last)."""
    found: list[tuple[int, int]] = []
    for delivery_id in ids:
        if found and delivery_id == (found[-1][1] + 1) & MASK:
            found[-1] = (found[-1][0], delivery_id)
        else:
            found.append((delivery_id, delivery_id))
    return found
