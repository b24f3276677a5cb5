"""Application properties that settlement sets on a stored message: kept beside it as an encoded map, never in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twinbus.amqp.decoding import decode_all
from twinbus.amqp.encoding import encode

REASON: Final = "DeadLetterReason"
DESCRIPTION: Final = "DeadLetterErrorDescription"
_HOPS: Final = 0
"""The key under which an overlay tells how often its message was forwarded. No application property has such a key."""


def merged(overlay: bytes | None, properties: Mapping[str, Any] | None) -> bytes | None:
    """The overlay with these properties set; a later one wins."""
    if not properties:
        return overlay
    return encode({**(decode_all(overlay) if overlay else {}), **properties})


def properties_of(overlay: bytes | None) -> dict[str, Any] | None:
    """The application properties in it."""
    if overlay is None:
        return None
    return {key: value for key, value in decode_all(overlay).items() if key != _HOPS} or None


def hops_of(overlay: bytes | None) -> int:
    """How often the message was forwarded."""
    return 0 if overlay is None else int(decode_all(overlay).get(_HOPS, 0))


def of_hops(hops: int) -> bytes:
    """The overlay of a message that was forwarded so often."""
    return encode({_HOPS: hops})


def dead_letter_properties(
    reason: str | None, description: str | None, properties: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a dead-lettered message tells about why it is there."""
    told: dict[str, Any] = dict(properties or {})
    if reason is not None:
        told[REASON] = reason
    if description is not None:
        told[DESCRIPTION] = description
    return told
