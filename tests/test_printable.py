"""X3: text from outside holds nothing that controls a terminal or hides itself, and ordinary text stays as it is."""

import json
import unicodedata
from pathlib import PurePosixPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from twinbus.printable import printable

C0, C1, DEL = map(chr, range(0x20)), map(chr, range(0x80, 0xA0)), "\x7f"
BIDI = [*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A)), "\u061c", "\u200e", "\u200f"]
INVISIBLE = ["\u00ad", "\u200b", "\u2060", "\ufeff", "\u2028", "\u2029", "\U000e0001", "\U000e0041"]
# Default_Ignorable_Code_Point of Unicode, without what ordinary text needs: ZWJ, ZWNJ and variation selectors.
IGNORABLE = [
    *map(chr, (0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180E, 0x200B, 0x200E, 0x200F, 0x3164, 0xFEFF)),
    *map(chr, (*range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFFA0, *range(0xFFF0, 0xFFF9))),
    *map(chr, (*range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B))),
    *map(chr, (*range(0xE0000, 0xE0100), *range(0xE01F0, 0xE1000))),
]
UNSAFE = frozenset([*C0, *C1, DEL, *BIDI, *INVISIBLE, *IGNORABLE])
# Characters of attacks, more often than random text has them.
texts = st.text(st.one_of(st.characters(), st.sampled_from(sorted(UNSAFE)), st.sampled_from("\ud800\udfff\\[]0;mJ")))


@given(texts)
@example("\x1b]0;title\x07\x1b[2J\x9b31m")
@example("\\\x1b")
def test_x3_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    for newlines in (False, True):
        left, kept = set(printable(text, newlines=newlines)), set("\n\t") if newlines else set()
        assert not left & (UNSAFE - kept)
        assert not any(unicodedata.category(one) in ("Cs", "Zl", "Zp") for one in left)
        assert not any(unicodedata.category(one) == "Cc" for one in left - kept)
        printable(text, newlines=newlines).encode("utf-8")


@given(texts)
def test_x3_what_is_printable_stays_as_it_is(text: str) -> None:
    for newlines in (False, True):
        once = printable(text, newlines=newlines)
        assert printable(once, newlines=newlines) == once


@given(st.text(st.characters(categories=["L", "M", "N", "P", "S", "Zs", "Co"], exclude_characters=IGNORABLE)))
@example("naïve café, straße, Ελληνικά, עברית, العربية, 日本語, 👩‍👩‍👧, nbsp\u00a0here, می‌خواهم, ❤️, 葛󠄀, ᠠ᠋")
def test_x3_ordinary_text_is_not_changed(text: str) -> None:
    assert printable(text) == text


@given(st.recursive(texts, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)))
def test_x3_json_stays_json_with_the_same_values(value: object) -> None:
    for escapes in (False, True):
        assert json.loads(printable(json.dumps(value, ensure_ascii=escapes, indent=1), newlines=True)) == json.loads(
            json.dumps(value)
        )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\u001b[31m"),
        ("a\tb\r\n", "a\\tb\\r\\n"),
        ("\x00\x7f\x9b", "\\u0000\\u007f\\u009b"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\udb40\\udc41"),
        (str(PurePosixPath("C:\\new")), "C:\\new"),
    ],
)
def test_x3_what_cannot_be_shown_is_named(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_x3_text_of_several_lines_keeps_line_breaks_and_tabs() -> None:
    assert printable("one\n\ttwo\r\n", newlines=True) == "one\n\ttwo\\r\n"


def test_x3_every_invisible_character_is_shown() -> None:
    assert [one for one in IGNORABLE if printable(one) == one] == []
