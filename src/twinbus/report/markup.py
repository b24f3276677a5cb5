"""HTML and SVG that cannot be broken out of: whatever is not markup already is escaped, attributes too.

What nobody can see is shown as a mark: control characters, characters that change the writing direction, halves of
pairs.
"""

from __future__ import annotations

from html import escape
from typing import Final

_UNSEEN: Final = "\N{REPLACEMENT CHARACTER}"
# Names and ids have limits of their own on a service; a ledger may hold anything.
_LONGEST: Final = 300


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def plain(value: object) -> str:
    """As a person may see it: cut where it is too long, and with a mark for what cannot be seen."""
    said = str(value)
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"
    return said if said.isprintable() else "".join(one if one.isprintable() else _UNSEEN for one in said)


def text(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(plain(value)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """`class_` and `aria_label` are `class` and `aria-label`; None is left out, True has no value."""
    said = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{said}>{joined(*children)}</{tag}>")


def joined(*children: object) -> Markup:
    return Markup("".join(text(child) for child in children))
