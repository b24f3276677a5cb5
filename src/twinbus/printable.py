r"""Makes text from outside safe for a terminal and for a log (X3).

Others write message ids, reasons, entity paths and error texts. A terminal obeys escape sequences in them: they can
move the cursor, change the window's title, hide lines or answer on behalf of the keyboard. Characters that change the
writing direction, and invisible characters, make one text look like another. `printable` replaces all of these by
escapes such as `\u001b`. The escapes are those of JSON, so JSON stays valid and keeps its values.
"""

from __future__ import annotations

import re
from typing import Final

_UNSAFE: Final = (
    "\x00-\x08\x0b-\x1f"  # C0 without tab and newline
    "\x7f-\x9f"  # DEL and C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # characters that change the writing direction
    # Invisible: Default_Ignorable_Code_Point of Unicode, and the marks of annotations. ZWJ, ZWNJ and variation
    # selectors stay: ordinary text needs them.
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u3164\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
    "\u2028\u2029"  # line and paragraph separator
    "\ud800-\udfff"  # halves of surrogate pairs: they cannot be encoded
)
_LINES: Final = re.compile(f"[{_UNSAFE}]")
_LINE: Final = re.compile(f"[\t\n{_UNSAFE}]")
_SHORT: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


def printable(text: str, *, newlines: bool = False) -> str:
    r"""Return the text with every control, invisible and direction character replaced by an escape such as `\u001b`.

    `newlines` keeps line breaks and tabs, for text of several lines. Ordinary text is returned unchanged. A second
    call changes nothing more.
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
    # JSON writes such a character as a surrogate pair.
    code -= 0x10000
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
