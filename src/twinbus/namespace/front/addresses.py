"""What a link address means: which entity, which sub-queue, or which of the namespace's own nodes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from urllib.parse import unquote

_DEAD_LETTER = "/$deadletterqueue"
_TRANSFER_DEAD_LETTER = "/$transfer/$deadletterqueue"
_MANAGEMENT = "/$management"


class NodeKind(Enum):
    """The kinds of things a link can be attached to."""

    CBS = "$cbs"
    ENTITY = "entity"
    MANAGEMENT = "$management"


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """A parsed address. `entity` is '' for `$cbs` and for the namespace's own `$management`."""

    node: NodeKind
    path: str
    """The address without scheme and host, in lower case: what tokens are for."""
    entity: str = ""
    dead_letter: bool = False
    transfer: bool = False


def parse_address(text: str) -> LinkAddress:
    """Understand `entity`, `entity/$DeadLetterQueue`, `…/$management`, `$cbs`, with or without `amqps://host:port/`."""
    _, scheme, rest = text.partition("://")
    path = unquote(rest.partition("/")[2] if scheme else text).strip("/")
    lower = whole = path.lower()
    if lower == "$cbs":
        return LinkAddress(NodeKind.CBS, whole)
    node = NodeKind.ENTITY
    if lower == _MANAGEMENT[1:]:
        return LinkAddress(NodeKind.MANAGEMENT, whole)
    if lower.endswith(_MANAGEMENT):
        node, lower = NodeKind.MANAGEMENT, lower.removesuffix(_MANAGEMENT)
    transfer = lower.endswith(_TRANSFER_DEAD_LETTER)
    lower = lower.removesuffix(_TRANSFER_DEAD_LETTER)
    dead_letter = lower.endswith(_DEAD_LETTER)
    lower = lower.removesuffix(_DEAD_LETTER)
    return LinkAddress(node, whole, path[: len(lower)], dead_letter, transfer)
