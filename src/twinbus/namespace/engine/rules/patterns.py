"""LIKE: patterns with % and _, and an escape character. Matched part by part, so that no pattern takes long."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from twinbus.namespace.engine.rules.errors import RuleEvaluationError

Matches = Callable[[str], bool]

MAX_CHARACTERS: Final = 1024
"""As long as the text of a rule: what a message brings as a pattern has the time of every message after it."""

_ANY: Final = "%"
_ONE: Final = "_"


@lru_cache(maxsize=256)
def pattern(text: str, escape: str | None = None) -> Matches:
    """What tells whether a whole text is like the pattern. Letters count by case."""
    if len(text) > MAX_CHARACTERS:
        raise RuleEvaluationError(f"the pattern of LIKE is longer than {MAX_CHARACTERS} characters")
    if escape is not None and len(escape) != 1:
        raise RuleEvaluationError("the escape character of LIKE is one character")
    parts = _parts(text, escape)
    if len(parts) == 1:
        whole = re.compile(parts[0], re.DOTALL).fullmatch
        return lambda value: whole(value) is not None
    first, *middle, last = (re.compile(part, re.DOTALL) for part in parts)
    ending = re.compile(last.pattern + r"\Z", re.DOTALL)
    longest = _width(parts[-1])

    def matches(value: str) -> bool:
        found = first.match(value)
        for part in middle:
            if found is None:
                return False
            # The leftmost place leaves the most for what follows.
            found = part.search(value, found.end())
        if found is None:
            return False
        start = len(value) - longest
        return start >= found.end() and ending.match(value, start) is not None

    return matches


def _parts(text: str, escape: str | None) -> list[str]:
    """The regular expressions between the %s: of fixed length each."""
    parts, current, escaped = [], "", False
    for character in text:
        if escaped:
            current += re.escape(character)
            escaped = False
        elif character == escape:
            escaped = True
        elif character == _ANY:
            parts.append(current)
            current = ""
        else:
            current += "." if character == _ONE else re.escape(character)
    if escaped:
        raise RuleEvaluationError("the pattern of LIKE ends with its escape character")
    return [*parts, current]


def _width(part: str) -> int:
    """How many characters a part takes."""
    return len(re.sub(r"\\(.)", "x", part, flags=re.DOTALL))
