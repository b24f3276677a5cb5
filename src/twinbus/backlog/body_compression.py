"""Compress a message body that would not fit into the backlog together with its aliases (S9).

The encoded body sections are compressed, so a body of any AMQP type is restored byte for byte. The compressed body is
one data section; the property `x-twinbus-packed` names the algorithm.
"""

from __future__ import annotations

import zlib
from typing import Final

from twinbus.backlog.message_format import COMPRESSION_PROPERTY, AliasError

DEFLATE: Final = "deflate"
"""The name of the only algorithm. This is the value of the property `x-twinbus-packed`."""
_LEVEL: Final = 6


def compress_body(sections: bytes) -> bytes:
    """Return the body sections, compressed with DEFLATE: the content of the data section that replaces them."""
    return zlib.compress(sections, _LEVEL)


def decompress_body(content: bytes, algorithm: str, limit: int) -> bytes:
    """Return the original body sections.

    Raises AliasError for an unknown algorithm, damaged content, or body sections of more than `limit` bytes.
    """
    if algorithm != DEFLATE:
        raise AliasError(COMPRESSION_PROPERTY, f"is {algorithm!r}, not {DEFLATE!r}")
    stream = zlib.decompressobj()
    try:
        sections = stream.decompress(content, limit)
        # If the body has exactly `limit` bytes, the checksum is still unread. This call reads the checksum, and returns
        # a byte if the body is longer.
        rest = stream.decompress(stream.unconsumed_tail, 1) if not stream.eof else b""
    except zlib.error as error:
        raise AliasError(COMPRESSION_PROPERTY, f"marks a body that cannot be unpacked ({error})") from error
    if rest or not stream.eof or stream.unused_data:
        raise AliasError(COMPRESSION_PROPERTY, f"marks a body that does not end within {limit} bytes")
    return sections
