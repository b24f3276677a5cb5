"""CPU time of one message and the rules of one subscription, both made to be slow (X1).

python bench/hostile_rules.py [--json]

The peer, in the same run, is a message of the same size whose properties are ordinary, with as many ordinary rules.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from twinbus.amqp import build_message
from twinbus.namespace.engine.descriptions import RuleDescription, SqlAction, SqlFilter
from twinbus.namespace.engine.rules.message_view import MessageView
from twinbus.namespace.engine.rules.ruleset import RuleSet

RULES: Final = 20
_LONGEST: Final = 1024  # characters of an expression
_REPEATS: Final = 3
_A: Final = "a" * 32_000


class Case(NamedTuple):
    expressions: Sequence[str]
    properties: dict[str, Any]
    action: str | None = None
    annotations: dict[str, Any] | None = None
    body: bytes = b"x"


def _repeated(term: str) -> str:
    """Return the term as often as an expression has room for it."""
    return " OR ".join([term] * (_LONGEST // (len(term) + 4)))


def _each(*texts: str) -> list[str]:
    return [texts[number % len(texts)] for number in range(RULES)]


_UNREADABLE: Final = {f"k{number}": number for number in range(4000)}
CASES: Final = {
    "LIKE, one constant pattern": Case(_each("t LIKE '%" + "a" * 500 + "_" + "a" * 499 + "b%'"), {"t": _A}),
    "LIKE, many constant patterns": Case(_each(_repeated("t LIKE '%a_ab%'")), {"t": _A}),
    "LIKE, patterns from the message": Case(
        [_repeated(f"t LIKE p{number}") for number in range(RULES)],
        {"t": "a" * 20_000, **{f"p{number}": "%" + "a_" * 500 + f"b{number}" for number in range(RULES)}},
    ),
    "LIKE, patterns made by the rule": Case(
        [_repeated(f"t LIKE p + '{number}%'") for number in range(RULES)],
        {"t": _A, "p": "%" + "a_" * 500 + "b"},
    ),
    "strings joined": Case(_each("+".join(["t"] * 100) + " = 'a'", _repeated("t + t = 'b'")), {"t": "a" * 30_000}),
    "computed names": Case(_each(_repeated("p(t) = 1")), {"t": _A}),
    "annotations": Case(
        _each(_repeated("sys.PartitionKey = 'x'")),
        {},
        annotations={f"x-opt-{number}": number for number in range(3000)},
    ),
    "actions": Case(
        _each("1 = 1"),
        {f"k{number}": number for number in range(4000)},
        "; ".join(f"SET a{n} = k{n}" for n in range(32)),
    ),
    "actions on 250 KB": Case(["1 = 1"] * 200, {}, "SET a = 1", body=b"x" * 250_000),
    "annotations in actions": Case(
        _each("1 = 1"),
        {},
        "SET sys.PartitionKey = sys.ViaPartitionKey",
        {f"x-opt-{number}": number for number in range(3000)},
    ),
    "properties that cannot be read": Case(_each("k1 = 'x'", "EXISTS(k2)"), {**_UNREADABLE, "last": "unreadable"}),
    "ordinary": Case(
        _each("color = 'red' AND size > 3", "region LIKE 'eu%'", "size + 1 = 50 OR size IS NULL", "label LIKE '%x_z%'"),
        {"color": "blue", "size": 7, "region": "us-west", "label": "a label of usual length", "rest": "a" * 30_000},
    ),
}


def _message(case: Case) -> bytes:
    raw = build_message(
        data=case.body, application_properties=case.properties or None, message_annotations=case.annotations or None
    )
    return raw.replace(b"unreadable", b"\xffnreadable")


def _seconds(rules: RuleSet, raw: bytes) -> float:
    least = float("inf")
    for _ in range(_REPEATS):
        view = MessageView(raw, now=0, seq=1, ttl=None, new_token=lambda: bytes(16))
        began = time.process_time()
        rules.select(view)
        least = min(least, time.process_time() - began)
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, float] = {}
    for name, case in CASES.items():
        action = None if case.action is None else SqlAction(case.action)
        described = [
            RuleDescription(f"rule-{number}", SqlFilter(text), action) for number, text in enumerate(case.expressions)
        ]
        found[name] = _seconds(RuleSet(described), _message(case))
    if options.json:
        print(json.dumps({name: seconds * 1000 for name, seconds in found.items()}, indent=2))
        return 0
    for name, seconds in found.items():
        print(f"{name:32} {seconds * 1000:10.2f} ms   {seconds / found['ordinary']:10.0f} x ordinary")
    return 0


if __name__ == "__main__":
    sys.exit(main())
