"""The deliveries of a session, in one direction, that are not settled yet: delivery id to link."""

from typing import TYPE_CHECKING

from twinbus.amqp.serial import MASK, distance

if TYPE_CHECKING:
    from twinbus.amqp.link import Link


class Unsettled(dict[int, "Link"]):
    def within(self, first: int, last: int) -> list[int]:
        """The ids from first to last that are here; a wide range costs no more than what is unsettled."""
        if first == last:
            return [first] if first in self else []
        width = distance(first, last) + 1
        if width <= len(self):
            return [number for step in range(width) if (number := (first + step) & MASK) in self]
        return [number for number in self if (number - first) & MASK < width]

    def settle(self, first: int, last: int) -> list[int]:
        found = self.within(first, last)
        for number in found:
            del self[number]
        return found

    def forget(self, link: "Link") -> None:
        for number in [number for number, owner in self.items() if owner is link]:
            del self[number]
