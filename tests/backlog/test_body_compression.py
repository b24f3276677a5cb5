"""Bodies that are compressed to fit, and decompressed again (S9)."""

from __future__ import annotations

import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twinbus.backlog.body_compression import DEFLATE, compress_body, decompress_body
from twinbus.backlog.message_format import AliasError


@given(st.binary(max_size=4000), st.integers(0, 10))
def test_s9_a_compressed_body_is_restored_byte_for_byte(sections: bytes, spare: int) -> None:
    assert decompress_body(compress_body(sections), DEFLATE, len(sections) + spare) == sections


def test_s9_a_compressed_body_is_smaller() -> None:
    assert len(compress_body(b"the same again " * 1000)) < 200


@given(st.binary(min_size=1, max_size=4000), st.data())
def test_s9_a_body_beyond_the_limit_is_an_error(sections: bytes, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, len(sections)))
    if limit < len(sections):
        with pytest.raises(AliasError, match="does not end within"):
            decompress_body(compress_body(sections), DEFLATE, limit)


def test_s9_a_decompression_bomb_is_refused() -> None:
    with pytest.raises(AliasError, match=r"^x-twinbus-packed marks a body that does not end within 1000 bytes\. Mend"):
        decompress_body(zlib.compress(bytes(10_000_000)), DEFLATE, 1000)


@pytest.mark.parametrize(
    "packed", [b"", b"nonsense", compress_body(b"x" * 100)[:-1], compress_body(b"x" * 100) + b"more"]
)
def test_y6_damaged_content_is_an_error(packed: bytes) -> None:
    with pytest.raises(AliasError, match="x-twinbus-packed"):
        decompress_body(packed, DEFLATE, 1000)


def test_y6_an_unknown_algorithm_is_an_error() -> None:
    with pytest.raises(AliasError, match=r"^x-twinbus-packed is 'zstd', not 'deflate'\. Mend"):
        decompress_body(compress_body(b"x"), "zstd", 10)


def test_y6_the_error_says_how_the_content_is_damaged() -> None:
    with pytest.raises(
        AliasError, match=r"^x-twinbus-packed marks a body that cannot be unpacked \(Error -3 .*\)\. Mend"
    ):
        decompress_body(b"nonsense", DEFLATE, 1000)
