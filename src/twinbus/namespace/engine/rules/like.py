"""LIKE: matches a text with a pattern, in time that is linear in the length of the text (X1).

The pattern is cut at each `%` into pieces of fixed width. The first and the last piece have fixed places. Every other
piece is searched from the end of the piece before it: the leftmost match leaves the most text for the pieces after it,
so nothing is ever tried twice. A piece is a list of literal runs with `_` between them. A piece with one run is found
with `str.find`. A piece with several runs is found by trying some places of its first run if text and piece are short,
and otherwise bit by bit (Shift-And): one integer has a bit for each prefix of the piece that ends at this character.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Final

from twinbus.namespace.engine.rules.errors import RuleEvaluationError

MAX_LIKE_CHARACTERS: Final = 1024
"""The greatest length of a LIKE pattern. A property of a message can be the pattern."""

_ANY: Final = "%"
_ONE: Final = None
# Up to this product of text and piece, the first places of the first run are tried one by one. One try of a place takes
# as long as the search by bits takes for some characters.
_SHORT: Final = 4096
_TRIES: Final = 4
# `str.find` takes linear time for a text of at least `_LONG_TEXT` characters. For such a text, a longer piece costs no
# more than a piece of `_LONG_PIECE` characters.
_LONG_TEXT: Final = 2500
_LONG_PIECE: Final = 100

_Token = str | None  # a character, or _ONE for any character


@dataclass(frozen=True)
class _Piece:
    """A part of a pattern without `%`: `lead` times `_`, a core, and `trail` times `_`.

    The core begins and ends with a character. `runs` are its literal runs with their offsets. A piece without a
    character has no core and no trail.
    """

    lead: int
    core: tuple[_Token, ...]
    trail: int
    runs: tuple[tuple[int, str], ...]

    @cached_property
    def width(self) -> int:
        return self.lead + len(self.core) + self.trail

    def matches_at(self, value: str, place: int) -> bool:
        for offset, run in self.runs:  # noqa: SIM110 - most patterns have one run, and all() takes longer than that
            if not value.startswith(run, place + self.lead + offset):
                return False
        return True

    def find(self, value: str, start: int) -> int:
        """Return the end of the leftmost match that begins at `start` or later, or -1."""
        start, end = start + self.lead, len(value) - self.trail
        if not self.runs:
            return start if start <= end else -1
        if len(self.runs) == 1:
            place = value.find(self.runs[0][1], start, end)
        elif (end - start) * len(self.core) <= _SHORT:
            place = self._find_by_first_run(value, start, end)
        else:
            place = self._find_by_bits(value, start, end)
        return -1 if place < 0 else place + len(self.core) + self.trail

    def _find_by_first_run(self, value: str, start: int, end: int) -> int:
        (_, first), *others = self.runs
        last = end - len(self.core) + len(first)
        for _ in range(_TRIES):
            place = value.find(first, start, last)
            if place < 0 or all(value.startswith(run, place + offset) for offset, run in others):
                return place
            start = place + 1
        return self._find_by_bits(value, start, end)

    def _find_by_bits(self, value: str, start: int, end: int) -> int:
        masks, any_character = self._masks
        complete = 1 << (len(self.core) - 1)
        state = 0
        for place, character in enumerate(value[start:end], start):
            state = (state << 1 | 1) & masks.get(character, any_character)
            if state & complete:
                return place - len(self.core) + 1
        return -1

    @cached_property
    def _masks(self) -> tuple[dict[str, int], int]:
        """The tokens of the core that match a character, as bits: by character, and for all other characters."""
        any_character, masks = 0, dict.fromkeys((token for token in self.core if token is not _ONE), 0)
        for index, token in enumerate(self.core):
            if token is _ONE:
                any_character |= 1 << index
            else:
                masks[token] |= 1 << index
        return {character: mask | any_character for character, mask in masks.items()}, any_character


class LikePattern:
    """A compiled pattern. Case matters. Raises RuleEvaluationError."""

    __slots__ = ("_first", "_fixed_steps", "_last", "_longest_mixed", "_longest_run", "_middle", "_width")

    def __init__(self, text: str, escape: str | None = None) -> None:
        if len(text) > MAX_LIKE_CHARACTERS:
            raise RuleEvaluationError(f"the pattern of LIKE is longer than {MAX_LIKE_CHARACTERS} characters")
        if escape is not None and len(escape) != 1:
            raise RuleEvaluationError("the escape character of LIKE is one character")
        first, *others = (_piece(tokens) for tokens in _cut(text, escape))
        self._first = first
        self._last = others.pop() if others else None  # None for a pattern without `%`
        self._middle = tuple(others)
        self._width = first.width + sum(piece.width for piece in others) + (self._last.width if self._last else 0)
        ends = len(first.runs) + (len(self._last.runs) if self._last else 0)
        self._fixed_steps = 1 + (ends + len(self._middle)) // 2
        self._longest_run = max((len(piece.core) for piece in others if len(piece.runs) == 1), default=0)
        self._longest_mixed = max((len(piece.core) for piece in others if len(piece.runs) > 1), default=0)

    def matches(self, value: str) -> bool:
        """Return whether the whole text matches."""
        if self._last is None:
            return len(value) == self._width and self._first.matches_at(value, 0)
        if len(value) < self._width or not self._first.matches_at(value, 0):
            return False
        end = self._first.width
        for piece in self._middle:
            end = piece.find(value, end)
            if end < 0:
                return False
        start = len(value) - self._last.width
        return start >= end and self._last.matches_at(value, start)

    def steps(self, length: int) -> int:
        """Return the most work of `matches` on a text of this length, in steps of about 0.2 µs.

        All pieces together go through the text once.
        """
        steps = self._fixed_steps
        if self._longest_run:
            size = self._longest_run if length < _LONG_TEXT else min(self._longest_run, _LONG_PIECE)
            steps += length * (size + 10) >> 9
        if self._longest_mixed:
            by_place = length * self._longest_mixed <= _SHORT
            # Each search by bits copies the rest of the text.
            steps += length if by_place else length + len(self._middle) * (length >> 11)
        return steps


@lru_cache(maxsize=256)
def compile_like(text: str, escape: str | None = None) -> LikePattern:
    """Return the compiled pattern. Raises RuleEvaluationError."""
    return LikePattern(text, escape)


def _cut(text: str, escape: str | None) -> list[list[_Token]]:
    """Return the tokens of each piece between the `%`s."""
    pieces: list[list[_Token]] = [[]]
    escaped = False
    for character in text:
        if escaped:
            pieces[-1].append(character)
            escaped = False
        elif character == escape:
            escaped = True
        elif character == _ANY:
            pieces.append([])
        else:
            pieces[-1].append(_ONE if character == "_" else character)
    if escaped:
        raise RuleEvaluationError("the pattern of LIKE ends with its escape character")
    return pieces


def _piece(tokens: list[_Token]) -> _Piece:
    lead = next((index for index, token in enumerate(tokens) if token is not _ONE), len(tokens))
    end = next((index for index in range(len(tokens), lead, -1) if tokens[index - 1] is not _ONE), lead)
    core = tuple(tokens[lead:end])
    runs: list[tuple[int, str]] = []
    offset = 0
    for is_one, group in groupby(core, lambda token: token is _ONE):
        found = list(group)
        if not is_one:
            runs.append((offset, "".join(token for token in found if token is not None)))
        offset += len(found)
    return _Piece(lead, core, len(tokens) - end, tuple(runs))
