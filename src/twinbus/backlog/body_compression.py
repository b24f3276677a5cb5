"""A body made smaller so that it fits the backlog with its aliases, and back, byte for byte (S9).

It works on the encoded body sections as they stand on the wire, so a body of any AMQP kind comes back as it was.
"""

from __future__ import annotations

import zlib
from typing import Final

from twinbus.backlog.message_format import COMPRESSION_PROPERTY, AliasError

DEFLATE: Final = "deflate"
"""The value of the mark `x-twinbus-packed`."""
_LEVEL: Final = 6


def compress_body(sections: bytes) -> bytes:
    """The content of the one data section that stands for these body sections, marked DEFLATE."""
    return zlib.compress(sections, _LEVEL)


def decompress_body(packed: bytes, mark: str, limit: int) -> bytes:
    """The body sections again. AliasError for a mark or content that is not ours, or one beyond `limit` bytes."""
    if mark != DEFLATE:
        raise AliasError(COMPRESSION_PROPERTY, f"is {mark!r}, not {DEFLATE!r}")
    inflating = zlib.decompressobj()
    try:
        sections = inflating.decompress(packed, limit)
        # With the room used up, only the check sum may be left.
        rest = inflating.decompress(inflating.unconsumed_tail, 1) if not inflating.eof else b""
    except zlib.error as error:
        raise AliasError(COMPRESSION_PROPERTY, f"marks a body that cannot be unpacked ({error})") from error
    if rest or not inflating.eof or inflating.unused_data:
        raise AliasError(COMPRESSION_PROPERTY, f"marks a body that does not end within {limit} bytes")
    return sections
