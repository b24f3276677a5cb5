"""Y2, Y9: showing how many messages remain costs no request while a syphon is idle."""

from collections.abc import Sequence

from twinbus.syphon.discovery import RemainingMessages
from twinbus.syphon.progress import MessageCounts


class Asked:
    """A discovery that counts its requests."""

    def __init__(self) -> None:
        self.times = 0

    async def queues(self) -> Sequence[str]:
        return ()

    def lock_seconds(self, queue: str) -> float | None:
        return None

    async def remaining(self) -> int | None:
        self.times += 1
        return 100 - self.times

    async def close(self) -> None:
        pass


async def test_y2_y9_what_is_left_is_asked_for_again_only_after_something_was_moved_and_after_a_while() -> None:
    asked = Asked()
    remainder = RemainingMessages(asked)
    assert await remainder.count(MessageCounts(), 0.0) == 99
    assert [await remainder.count(MessageCounts(), now) for now in (1.0, 60.0, 3600.0)] == [99, 99, 99], (
        "nothing was moved"
    )
    assert await remainder.count(MessageCounts(returned=1), 3601.0) == 98
    assert await remainder.count(MessageCounts(returned=2), 3602.0) == 98, "a moment ago"
    assert await remainder.count(MessageCounts(returned=2, dead_lettered=1), 3612.0) == 97
    assert remainder.last == 97
    assert asked.times == 3


class Away(Asked):
    """A discovery whose requests fail."""

    async def remaining(self) -> int | None:
        raise ConnectionError("away")


async def test_y1_y9_a_syphon_goes_on_if_nobody_tells_how_many_messages_remain() -> None:
    assert await RemainingMessages(Away()).count(MessageCounts(), 0.0) is None
