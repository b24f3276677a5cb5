"""The settings an entity can have in a configuration file: their names, what they mean, and their ranges.

One table serves both dialects: our own names are the SDK's, the emulator's are the same words in capitals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import EntityStatus
from twinbus.namespace.iso8601 import parse_duration, render_duration

_LONGEST_SECONDS: Final = 10_675_199 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the file with its place, and the list that problems go to."""

    value: Any
    path: str
    problems: list[str]

    def bad(self, text: str) -> None:
        self.problems.append(f"{self.path}: {text}" if self.path else text)

    def has(self, name: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def get(self, name: str) -> Node:
        value = self.value.get(name) if isinstance(self.value, dict) else None
        return Node(value, f"{self.path}.{name}" if self.path else name, self.problems)

    def object(self, name: str) -> Node:
        """A member that is an object; an empty one where it is missing."""
        node = self.get(name)
        if node.value is not None and not isinstance(node.value, dict):
            node.bad("is not an object")
        return node if isinstance(node.value, dict) else Node({}, node.path, self.problems)

    def objects(self, name: str) -> list[Node]:
        """The members of a list of objects; none where the list is missing."""
        node = self.get(name)
        if node.value is None:
            return []
        if not isinstance(node.value, list):
            node.bad("is not a list")
            return []
        members = [Node(value, f"{node.path}[{index}]", self.problems) for index, value in enumerate(node.value)]
        for member in members:
            if not isinstance(member.value, dict):
                member.bad("is not an object")
        return [member for member in members if isinstance(member.value, dict)]

    def text(self, name: str) -> str:
        node = self.get(name)
        if not isinstance(node.value, str) or not node.value.strip():
            node.bad("a name is needed")
            return "?"
        return node.value

    def takes(self, *names: str) -> None:
        """Any other member is a problem, by name."""
        if not isinstance(self.value, dict):
            self.bad("is not an object")
            return
        for name in self.value:
            if name not in names:
                self.get(name).bad(f"is not known here; known are {', '.join(names)}")


Read = Callable[[Node], Any]
# SDK name → (field of the description, how its value is read)
Properties = Mapping[str, tuple[str, Read]]


def own_name(name: str) -> str:
    return name


def emulator_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def read_properties(node: Node, properties: Properties, spell: Callable[[str], str], *others: str) -> dict[str, Any]:
    """The fields that the file sets. `others` are members that are read elsewhere."""
    node.takes(*others, *map(spell, properties))
    found: dict[str, Any] = {}
    for name, (field, read) in properties.items():
        if not node.has(spell(name)):
            continue
        value = read(node.get(spell(name)))
        if value is not _WRONG:
            found[field] = value
    return found


_WRONG: Final = object()


def _span(value: Any) -> int | None:
    """Milliseconds of an ISO 8601 duration or of a number of seconds; None for never. Raises ValueError."""
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LONGEST_SECONDS:
        raise ValueError(f"{value!r} is neither a duration such as 'PT1M' nor a number of seconds")
    return round(value * 1000)


def _duration(least: int, most: int | None = None) -> Read:
    """With no upper bound, it may be never."""

    def read(node: Node) -> Any:
        try:
            span = _span(node.value)
        except ValueError as error:
            node.bad(str(error))
            return _WRONG
        if (span is None and most is None) or (span is not None and least <= span <= (most or span)):
            return span
        upper = "" if most is None else f" and at most {render_duration(most)}"
        node.bad(f"{node.value!r} is out of range: at least {render_duration(least)}{upper}")
        return _WRONG

    return read


def _flag(node: Node) -> Any:
    if isinstance(node.value, bool):
        return node.value
    node.bad(f"{node.value!r} is neither true nor false")
    return _WRONG


def _delivery_count(node: Node) -> Any:
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31:
        return value
    node.bad(f"{value!r} is not a whole number from 1 to {2**31 - 1}")
    return _WRONG


def _megabytes(node: Node) -> Any:
    if not isinstance(node.value, bool) and node.value in limits.QUEUE_MEGABYTES:
        return node.value
    node.bad(f"{node.value!r} is none of {', '.join(map(str, limits.QUEUE_MEGABYTES))}")
    return _WRONG


def _status(node: Node) -> Any:
    try:
        return EntityStatus(node.value)
    except ValueError:
        node.bad(f"{node.value!r} is none of {', '.join(EntityStatus)}")
        return _WRONG


def _metadata(node: Node) -> Any:
    if isinstance(node.value, str):
        return node.value
    node.bad(f"{node.value!r} is not a text")
    return _WRONG


def _target(node: Node) -> Any:
    if isinstance(node.value, str):
        return node.value or None  # the emulator writes an empty text for "nowhere"
    node.bad(f"{node.value!r} is not the name of a queue or topic")
    return _WRONG


_TTL: Final = ("default_time_to_live", _duration(limits.MIN_TTL))
_IDLE: Final = ("auto_delete_on_idle", _duration(limits.MIN_IDLE_DELETE))
_LOCK: Final = ("lock_duration", _duration(limits.MIN_LOCK, limits.MAX_LOCK))
_WINDOW: Final = ("duplicate_window", _duration(limits.MIN_DUPLICATE_WINDOW, limits.MAX_DUPLICATE_WINDOW))

_EVERYWHERE: Final[Properties] = {
    "default_message_time_to_live": _TTL,
    "auto_delete_on_idle": _IDLE,
    "enable_batched_operations": ("batched_operations", _flag),
    "status": ("status", _status),
    "user_metadata": ("user_metadata", _metadata),
}
_STORING: Final[Properties] = {
    "max_size_in_megabytes": ("max_size_megabytes", _megabytes),
    "requires_duplicate_detection": ("requires_duplicate_detection", _flag),
    "duplicate_detection_history_time_window": _WINDOW,
    "enable_partitioning": ("enable_partitioning", _flag),
    "enable_express": ("enable_express", _flag),
}
_DELIVERING: Final[Properties] = {
    "lock_duration": _LOCK,
    "requires_session": ("requires_session", _flag),
    "max_delivery_count": ("max_delivery_count", _delivery_count),
    "dead_lettering_on_message_expiration": ("dead_lettering_on_expiration", _flag),
    "forward_to": ("forward_to", _target),
    "forward_dead_lettered_messages_to": ("forward_dead_letters_to", _target),
}
QUEUE: Final[Properties] = {**_EVERYWHERE, **_STORING, **_DELIVERING}
TOPIC: Final[Properties] = {**_EVERYWHERE, **_STORING, "support_ordering": ("support_ordering", _flag)}
SUBSCRIPTION: Final[Properties] = {
    **_EVERYWHERE,
    **_DELIVERING,
    "dead_lettering_on_filter_evaluation_exceptions": ("dead_lettering_on_filter_errors", _flag),
}
