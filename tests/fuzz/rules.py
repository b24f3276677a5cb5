"""Random rules on random messages: filters and actions, valid and damaged.

    python -m tests.fuzz.rules --inputs 20000 --seed 1

An input is one message on one set of rules. It passes if a wrong text is refused with RuleSyntaxError, the selection of
copies raises nothing and is the same a second time, every copy can be read, and the counted work stays within its bound
(X1). A finding names the seed and the number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from tests.fuzz.harness import FindingError, inputs_and_seed, named_input
from tests.fuzz.memory import BoundedMemory, peak_mib
from twinbus.amqp import Properties, build_message, read_routing_fields, split_sections
from twinbus.namespace.engine.descriptions import CorrelationFilter, RuleDescription, SqlAction, SqlFilter
from twinbus.namespace.engine.rules.errors import RuleSyntaxError
from twinbus.namespace.engine.rules.message_view import MAX_STEPS, MessageView
from twinbus.namespace.engine.rules.ruleset import RuleSet
from twinbus.values import Described, Float32, Int, Symbol, Timestamp, ULong

_MOST_GROWTH: Final = 200  # MiB
_MESSAGES_PER_SET: Final = 10
_NAMES: Final = (
    "a",
    "b",
    "T",
    "[odd name]",
    '"q"',
    "missing",
    "sys.Label",
    "sys.MessageId",
    "user.a",
    "sys.PartitionKey",
)
_SETTABLE: Final = ("a", "b", "new", "[odd name]", "sys.Label", "sys.SessionId", "sys.PartitionKey", "sys.TimeToLive")
_CONSTANTS: Final = ("1", "0", "-3", "2.5", "'a'", "'%a_b%'", "'it''s'", "TRUE", "NULL", "@p", "9223372036854775807")
_SLOW: Final = ("'%a_b%'", "'%' + a + '_b%'", "b + '%'", "'%" + "a_" * 60 + "b%'")
_SIGNS: Final = ("=", "<>", "<", "<=", ">", ">=", "!=")
_SQL: Final = " '\"[]%_@.,();=<>!+-*/\0é" + "aANDORLIKEinullset0123456789"


@dataclass
class RuleFuzzCounts:
    inputs: int = 0
    refused: int = 0  # texts
    errors: int = 0  # of evaluation
    exhausted: int = 0  # rule sets that reached the bound of work
    copies: int = 0


def _value(chance: Random, depth: int) -> str:
    if depth <= 0 or chance.random() < 0.4:
        return chance.choice(chance.choice((_NAMES, _CONSTANTS)))
    inner = _value(chance, depth - 1)
    match chance.randrange(4):
        case 0:
            return f"({inner} {chance.choice('+-*/%')} {_value(chance, depth - 1)})"
        case 1:
            return f"{chance.choice('+-')}{inner}"
        case 2:
            return f"{chance.choice(('p', 'property'))}({inner})"
        case _:
            return chance.choice(("newid()", inner))


def _condition(chance: Random, depth: int) -> str:
    if depth > 0 and chance.random() < 0.5:
        inner = [_condition(chance, depth - 1) for _ in range(chance.choice((1, 2, 2, 5)))]
        joined = chance.choice((" AND ", " OR ")).join(inner)
        return f"{chance.choice(('', '', 'NOT '))}({joined})"
    left, right = _value(chance, depth), _value(chance, depth)
    match chance.randrange(6):
        case 0:
            return f"{left} {chance.choice(('LIKE', 'NOT LIKE'))} {right}{chance.choice(('', '', ' ESCAPE b'))}"
        case 1:
            return f"{left} {chance.choice(('IN', 'NOT IN'))} ({right}, {_value(chance, 0)})"
        case 2:
            return f"{chance.choice(_NAMES)} IS {chance.choice(('', 'NOT '))}NULL"
        case 3:
            return f"EXISTS({chance.choice(_NAMES)})"
        case _:
            return f"{left} {chance.choice(_SIGNS)} {right}"


def _action(chance: Random) -> str:
    statements = [
        f"REMOVE {chance.choice(_SETTABLE)}"
        if chance.random() < 0.2
        else f"SET {chance.choice(_SETTABLE)} = {_value(chance, 2)}"
        for _ in range(chance.choice((1, 2, 5, 33)))
    ]
    return "; ".join(statements)


def _damaged(chance: Random, text: str) -> str:
    for _ in range(chance.choice((1, 1, 3))):
        place = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text = text[:place] + text[place + chance.randrange(1, 5) :]
            case 1:
                text = text[:place] + chance.choice(_SQL) + text[place:]
            case 2:
                text = text[:place] + text[place : place + 20] * 2 + text[place:]
            case _:
                text = text[:place] + chance.choice(("(" * 200, "NOT " * 160, "'" * 7, " OR " * 3)) + text[place:]
    return text[:1024]


def random_rule(chance: Random, number: int) -> RuleDescription:
    if chance.random() < 0.1:
        return RuleDescription(
            f"r{number}", CorrelationFilter(label="x", properties={"a": chance.choice((1, "x", None))})
        )
    condition = _condition(chance, chance.choice((0, 1, 2, 3)))[:1024]
    if chance.random() < 0.05:
        condition = " OR ".join([f"T LIKE {chance.choice(_SLOW)}"] * 50)[:1000]
        condition = condition.rpartition(" OR ")[0]
    action = _action(chance)[:1024] if chance.random() < 0.3 else None
    if chance.random() < 0.3:
        condition = _damaged(chance, condition)
    if action is not None and chance.random() < 0.3:
        action = _damaged(chance, action)
    given = {"@p": chance.choice((1, "text", None, 2.5))}
    return RuleDescription(
        f"r{number}", SqlFilter(condition, given), None if action is None else SqlAction(action, given)
    )


def random_message(chance: Random) -> bytes:
    """A message as a sender may make it, sometimes with bytes changed. A broker accepts it, or it is made anew."""
    many = chance.choice((0, 0, 0, 50, 3000))
    values: list[Callable[[], Any]] = [
        lambda: chance.choice((0, 1, -1, 2**62, True, None, 1.5, Float32(0.5), Int(7), ULong(2**63))),
        lambda: chance.choice(("a", "%", "_", "a%b_c", "", "é\0")) * chance.choice((1, 1, 10, 300)),
        lambda: "a" * chance.choice((3, 1000, 30_000)),
        lambda: chance.choice((Timestamp(5), b"bytes", Described(Symbol("com.microsoft:timespan"), 10**9))),
    ]
    names = ("a", "A", "b", "T", "t", "odd name", "q", "p")
    properties = {name: chance.choice(values)() for name in names if chance.random() < 0.6}
    properties |= {f"k{number}": number for number in range(many)}
    raw = build_message(
        properties=Properties(message_id="id", subject=chance.choice((None, "x", "a" * 100)), group_id=None),
        message_annotations={"x-opt-partition-key": "k"} if chance.random() < 0.5 else None,
        application_properties=properties,
        data=b"body",
    )
    if chance.random() < 0.2:
        damaged = bytearray(raw)
        for _ in range(chance.choice((1, 2, 6))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            return read_routing_fields(bytes(damaged)).raw
        except Exception:  # not accepted: the codec's fuzzer has such messages
            return raw
    return raw


def _compile(chance: Random, tally: RuleFuzzCounts) -> RuleSet:
    rules = []
    for number in range(chance.choice((1, 1, 3, 8))):
        rule = random_rule(chance, number)
        try:
            RuleSet([rule])
        except RuleSyntaxError:
            tally.refused += 1
        else:
            rules.append(rule)
    return RuleSet(rules)


def _try_message(rules: RuleSet, raw: bytes, tally: RuleFuzzCounts) -> None:
    def selected() -> tuple[MessageView, Any]:
        view = MessageView(raw, now=1_700_000_000_000, seq=5, ttl=60_000, new_token=lambda: bytes(16))
        return view, rules.select(view)

    (view, found), (_, again) = selected(), selected()
    if found != again:
        raise FindingError("a second selection differs from the first one")
    if not -1 <= view.steps_left <= MAX_STEPS:
        raise FindingError(f"{view.steps_left} steps are left")
    for copy in found.copies:
        split_sections(copy.raw)
        read_routing_fields(copy.raw)
    tally.copies += len(found.copies)
    tally.errors += found.error is not None
    tally.exhausted += view.steps_left < 0


def run(inputs: int, seed: int) -> RuleFuzzCounts:
    tally, memory = RuleFuzzCounts(), BoundedMemory(_MOST_GROWTH)
    rules = RuleSet([])
    for number in range(inputs):
        chance = Random(f"{seed}/{number - number % _MESSAGES_PER_SET}/rules")
        with named_input(seed, number):
            if number % _MESSAGES_PER_SET == 0:
                rules = _compile(chance, tally)
            _try_message(rules, random_message(Random(f"{seed}/{number}/message")), tally)
        tally.inputs += 1
    memory.check()
    return tally


def main() -> int:
    inputs, seed = inputs_and_seed("Fuzz the rules of subscriptions.", 20_000)
    tally = run(inputs, seed)
    print(
        f"rules: {tally.inputs} inputs, {tally.refused} texts refused, {tally.errors} errors of evaluation, "
        f"{tally.exhausted} at the bound of work, {tally.copies} changed copies; peak {peak_mib()} MiB; nothing found"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
