r"""Makes text that other programs wrote safe for a terminal and for a log (X3).

Message ids, reasons, entity paths and error texts come from other programs and may contain escape sequences. A terminal
executes escape sequences: they can move the cursor, change the window's title, hide lines or send input as if typed on
the keyboard. Characters that change the writing direction, and invisible characters, make one text look like another.
`printable` replaces all these characters by escapes such as `\u001b`. JSON uses the same escapes, so a JSON text is
still valid and its values do not change.
"""

from __future__ import annotations

import re
from typing import Final

_UNSAFE: Final = (
    "\x00-\x08\x0b-\x1f"  # C0 without tab and newline
    "\x7f-\x9f"  # DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # characters that change the writing direction
    # Invisible: Default_Ignorable_Code_Point of Unicode, and the marks of annotations. ZWJ, ZWNJ and variation
    # selectors are not replaced: ordinary text needs these characters.
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
    "\u2028\u2029"  # line and paragraph separator
    "\ud800-\udfff"  # single halves of surrogate pairs, which cannot be encoded
)
_LINES: Final = re.compile(f"[{_UNSAFE}]")
_LINE: Final = re.compile(f"[\t\n{_UNSAFE}]")
_SHORT: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def printable(text: str, *, newlines: bool = False) -> str:
    r"""Return the text with every control, invisible and direction character replaced by an escape such as `\u001b`.

    With `newlines=True`, line breaks and tabs are not replaced, for text of several lines. Ordinary text is returned
    unchanged. `printable(printable(text))` equals `printable(text)`.
    """
    if text.isascii() and text.isprintable():
        return text
    return (_LINES if newlines else _LINE).sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if (short := _SHORT.get(character)) is not None:
        return short
    code = ord(character)
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    # JSON writes a character above U+FFFF as a surrogate pair.
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
