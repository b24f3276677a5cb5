"""Link addresses: which entity, sub-queue or node of the namespace an address means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote

_DEAD_LETTER = "/$deadletterqueue"
_TRANSFER_DEAD_LETTER = "/$transfer/$deadletterqueue"
_MANAGEMENT = "/$management"


class NodeKind(Enum):
    """The kinds of nodes to which a link can be attached."""

    CBS = "$cbs"
    ENTITY = "entity"
    MANAGEMENT = "$management"


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """A parsed address. `entity` is '' for `$cbs` and for the `$management` of the namespace itself."""

    node: NodeKind
    path: str
    """The address without scheme and host, in lower case. Claims are checked for this path."""
    entity: str = ""
    dead_letter: bool = False
    transfer: bool = False


def parse_address(text: str) -> LinkAddress:
    """Parse `entity`, `entity/$DeadLetterQueue`, `…/$management` or `$cbs`, with or without `amqps://host:port/`."""
    _, scheme, rest = text.partition("://")
    path = unquote(rest.partition("/")[2] if scheme else text).strip("/")
    remaining = lower = path.lower()
    if lower == "$cbs":
        return LinkAddress(NodeKind.CBS, lower)
    if lower == _MANAGEMENT[1:]:
        return LinkAddress(NodeKind.MANAGEMENT, lower)
    node = NodeKind.ENTITY
    if remaining.endswith(_MANAGEMENT):
        node, remaining = NodeKind.MANAGEMENT, remaining.removesuffix(_MANAGEMENT)
    transfer = remaining.endswith(_TRANSFER_DEAD_LETTER)
    remaining = remaining.removesuffix(_TRANSFER_DEAD_LETTER)
    dead_letter = remaining.endswith(_DEAD_LETTER)
    remaining = remaining.removesuffix(_DEAD_LETTER)
    return LinkAddress(node, lower, path[: len(remaining)], dead_letter, transfer)
