"""Application properties that settlement sets on a stored message: kept beside it as an encoded map, never in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twinbus.amqp.types import decode_all, encode

REASON: Final = "DeadLetterReason"
DESCRIPTION: Final = "DeadLetterErrorDescription"


def merged(overlay: bytes | None, properties: Mapping[str, Any] | None) -> bytes | None:
    """The overlay with these properties set; a later one wins."""
    if not properties:
        return overlay
    return encode({**(decode_all(overlay) if overlay else {}), **properties})


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
