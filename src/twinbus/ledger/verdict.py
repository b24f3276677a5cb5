"""The one verdict on a ledger (L6): four words, one sentence, one exit code. Every command and page uses this module.

The verdict is about the messages that applications reported safe (`accepted`). It follows only from the sums of the
balance and from the reasons why entries are missing. The worst word that applies wins:

1. `lost`: a message was accepted, and is certainly in neither namespace.
2. `not proven`: the ledger cannot tell. Entries are known to be missing, or messages are `unknown`.
3. `proven with possible duplicates`: every message is accounted for. The primary accepted some of them more than once,
   or possibly did. Duplicate detection may have dropped the second copy; the ledger does not know.
4. `proven`: every message is accounted for: delivered, in the backlog, or dead-lettered.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """The four words. No other words are used for the verdict."""

    PROVEN = "proven"
    POSSIBLE_DUPLICATES = "proven with possible duplicates"
    NOT_PROVEN = "not proven"
    LOST = "lost"


EXIT_CODES: Final[Mapping[Verdict, int]] = {
    Verdict.PROVEN: 0,
    Verdict.POSSIBLE_DUPLICATES: 0,
    Verdict.LOST: 1,
    Verdict.NOT_PROVEN: 3,
}
"""Exit code of a command for each verdict. Commands use 2 for wrong usage and 3 for findings that need attention."""

# The sentence names this number of reasons. The commands list all reasons below the sums.
_NAMED_REASONS: Final = 2
# A reason may contain the text of any error. Longer reasons are cut in the sentence.
_REASON_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a ledger, and the sentence that says why. The sentence has no line break."""

    verdict: Verdict
    sentence: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.sentence}"


def judge_ledger(sums: Mapping[str, int], missing: Iterable[str] = (), more_missing: int = 0) -> Judgement:
    """Returns the verdict for the sums of a balance.

    `sums` has a number of messages for the names of `Balance`: accepted, delivered, in_backlog, dead_lettered, unknown,
    lost, duplicated, possibly_duplicated, unconfirmed. A name that is absent counts as 0. `missing` has the reasons
    why entries are missing from the ledger (`Balance.incomplete`, and lines that cannot be read), in any order.
    `more_missing` is the number of further reasons that the caller left out: the last ones in alphabetical order.
    """
    reasons = sorted(missing)
    count = {name: sums.get(name, 0) for name in ("lost", "unknown", "duplicated", "possibly_duplicated")}
    if count["lost"]:
        verdict = Verdict.LOST
    elif count["unknown"] or reasons or more_missing:
        verdict = Verdict.NOT_PROVEN
    elif count["duplicated"] or count["possibly_duplicated"]:
        verdict = Verdict.POSSIBLE_DUPLICATES
    else:
        verdict = Verdict.PROVEN
    parts = [*_about_safety(sums), *_about_copies(sums), *_about_missing(reasons, more_missing)]
    return Judgement(verdict, " ".join(parts))


def _about_safety(sums: Mapping[str, int]) -> list[str]:
    accepted, lost, unknown = (sums.get(name, 0) for name in ("accepted", "lost", "unknown"))
    if not accepted:
        return ["No message was accepted.", *_about_unconfirmed(sums.get("unconfirmed", 0))]
    if not lost and not unknown:
        places = {
            "delivered": "delivered",
            "in_backlog": "in the backlog",
            "dead_lettered": "dead-lettered",
        }
        where = ", ".join(f"{sums[name]:,} {place}" for name, place in places.items() if sums.get(name))
        subject = "The accepted message is" if accepted == 1 else f"All {accepted:,} accepted messages are"
        return [f"{subject} accounted for: {where}."]
    parts = []
    if lost:
        parts.append(f"{lost:,} of {_messages(accepted)} {_be(lost)} in neither namespace.")
    if unknown:
        parts.append(
            f"{unknown:,} of {_messages(accepted)} {_be(unknown)} unknown: safe or lost, depending on operations "
            "whose outcome is not in the ledger."
        )
    return parts


def _about_unconfirmed(unconfirmed: int) -> list[str]:
    """Returns the sentence for a ledger in which no application recorded its sends: it proves nothing about them."""
    if not unconfirmed:
        return []
    messages = "1 unconfirmed message" if unconfirmed == 1 else f"{unconfirmed:,} unconfirmed messages"
    return [f"The ledger has {messages}: the applications that send must record in it, too (option `ledger`)."]


def _about_copies(sums: Mapping[str, int]) -> list[str]:
    twice, perhaps = sums.get("duplicated", 0), sums.get("possibly_duplicated", 0)
    parts = []
    if twice:
        parts.append(f"{twice:,} {_was(twice)} delivered more than once.")
    if perhaps:
        parts.append(f"{perhaps:,} may have been delivered more than once.")
    return parts


def _about_missing(reasons: Sequence[str], more: int) -> list[str]:
    if not reasons:
        return []
    named = "; ".join(_shortened(reason) for reason in reasons[:_NAMED_REASONS])
    more += len(reasons) - _NAMED_REASONS
    rest = f"; and {more:,} more reason{'' if more == 1 else 's'}" if more > 0 else ""
    return [f"Entries are missing from the ledger: {named}{rest}."]


def _shortened(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[: _REASON_CHARACTERS - 1]}…"


def _messages(accepted: int) -> str:
    return f"{accepted:,} accepted message{'' if accepted == 1 else 's'}"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"
