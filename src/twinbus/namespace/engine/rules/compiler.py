"""The conditions of filters, made into functions once; each message is then only handed to them.

A condition gives True, False, or None for unknown (three-valued logic).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

from lark import Token, Tree

from twinbus.namespace.engine.rules import values
from twinbus.namespace.engine.rules.errors import RuleEvaluationError, RuleSyntaxError
from twinbus.namespace.engine.rules.grammar import SyntaxTree, parse
from twinbus.namespace.engine.rules.message_view import SYSTEM, MessageView

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


Evaluator = Callable[[MessageView], Any]

# Python's own stack is what a deeper one would use up.
_DEEPEST: Final = 150


class CompiledTerm(NamedTuple):
    """A compiled part: what it gives for a message; `value` is that where it is the same for all.

    `key` is the name, in lower case, of the user's property that it is. `hinges` are a property and a text: wherever
    that property is another text, the condition is false.
    """

    run: Evaluator
    is_constant: bool = False
    value: Any = None
    key: str | None = None
    hinges: tuple[str, str] | None = None


class PropertyName(NamedTuple):
    """Which property a text names; `key` is its name in lower case."""

    is_system: bool
    name: str
    key: str
    position: int


_CALCULATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": values.add,
    "-": values.subtract,
    "*": values.multiply,
    "/": values.divide,
    "%": values.remainder,
}


class ExpressionCompiler:
    """One text on its way to a function; what a node is compiled by bears its name."""

    def __init__(self, text: str, parameters: Mapping[str, Any]) -> None:
        self._text = text
        self._parameters = {name.lower().removeprefix("@"): value for name, value in parameters.items()}

    def fault(self, fault: str, position: int) -> RuleSyntaxError:
        return RuleSyntaxError(fault, position + 1, self._text)

    def term(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        if depth > _DEEPEST:
            raise self.fault(f"the expression is nested more than {_DEEPEST} deep.", start_of(node))
        build: Callable[[SyntaxTree, int], CompiledTerm] = getattr(self, "_" + node.data)
        return build(node, depth + 1)

    def property_name(self, node: SyntaxTree) -> PropertyName:
        *scope, last = (token for token in node.children if isinstance(token, Token))
        name, position = _name(last), _position(last)
        if not name:
            raise self.fault("the name of a property cannot be empty.", position)
        if not scope:
            return PropertyName(False, name, name.lower(), position)
        owner = _name(scope[0]).lower()
        if owner not in ("sys", "user"):
            raise self.fault(
                f"'{owner}' is no scope: it is sys or user. Write [{owner}.{name}] for a name with a dot.",
                _position(scope[0]),
            )
        if owner == "sys" and name.lower() not in SYSTEM:
            raise self.fault(f"there is no system property '{name}'.", position)
        return PropertyName(owner == "sys", name, name.lower(), position)

    # --- expressions -----------------------------------------------------------------------------------------------

    def _property(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        name = self.property_name(node)
        if name.is_system:
            return CompiledTerm(SYSTEM[name.key])
        key = name.key

        def read(view: MessageView) -> Any:
            user = view.user
            if user is None:
                user = view.read_user()
            return user.get(key)

        return CompiledTerm(read, key=key)

    def _constant(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        token = node.children[0]
        assert isinstance(token, Token), "a constant is one token"
        match token.type:
            case "INTEGER":
                if len(token) > 19 or int(token) > values.LARGEST_LONG:
                    raise self.fault(f"{token[:30]} does not fit a 64-bit integer.", _position(token))
                return constant_term(int(token))
            case "REAL":
                return constant_term(float(token))
            case "STRING":
                return constant_term(token[1:-1].replace("''", "'"))
            case "NULL":
                return constant_term(None)
            case _:
                return constant_term(token.type == "TRUE")

    def _parameter(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        token = node.children[0]
        assert isinstance(token, Token), "a parameter is one token"
        key = token[1:].lower()
        if key not in self._parameters:
            raise self.fault(f"the parameter {token} has no value.", _position(token))
        return constant_term(values.plain(self._parameters[key]))

    def _call(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        function = node.children[0]
        assert isinstance(function, Token), "a call begins with its name"
        arguments = trees_of(node)
        match function.lower(), len(arguments):
            case ("newid", 0):
                return CompiledTerm(lambda view: UUID(bytes=view.new_token(), version=4))
            case ("property" | "p", 1):
                run = self.term(arguments[0], depth).run
            case (("newid" | "property" | "p") as known, count):
                wanted = "no argument" if known == "newid" else "one argument, the name of a property"
                raise self.fault(f"{known}() takes {wanted}, not {count}.", _position(function))
            case _:
                raise self.fault(f"there is no function '{function}': newid, property and p are.", _position(function))

        def read(view: MessageView) -> Any:
            name = run(view)
            return None if name is None else view.named(values.need_text(name, "property()"))

        return CompiledTerm(read)

    def _calculation(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, right = (self.term(tree, depth) for tree in trees_of(node))
        sign = next(token for token in node.children if isinstance(token, Token))
        calculate = _CALCULATIONS[sign]
        return self._of_two(left, right, lambda a, b: None if a is None or b is None else calculate(a, b), node)

    def _signed(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        operand = self.term(trees_of(node)[0], depth)
        apply = values.negate if node.children[0] == "-" else values.confirm
        run = operand.run
        term = CompiledTerm(lambda view: None if (value := run(view)) is None else apply(value))
        return self._folded(term, node) if operand.is_constant else term

    # --- what they share -------------------------------------------------------------------------------------------

    def _runs(self, node: SyntaxTree, depth: int) -> tuple[Evaluator, ...]:
        return tuple(self.term(tree, depth).run for tree in trees_of(node))

    def _of_two(
        self, left: CompiledTerm, right: CompiledTerm, decide: Callable[[Any, Any], Any], node: SyntaxTree
    ) -> CompiledTerm:
        first, second = left.run, right.run
        if right.is_constant:
            value = right.value
            term = CompiledTerm(lambda view: decide(first(view), value))
            return self._folded(term, node) if left.is_constant else term
        return CompiledTerm(lambda view: decide(first(view), second(view)))

    def _folded(self, term: CompiledTerm, node: SyntaxTree) -> CompiledTerm:
        """The value of what depends on no message. What can never be evaluated is told now."""
        try:
            return constant_term(term.run(_NO_MESSAGE))
        except RuleEvaluationError as error:
            raise self.fault(f"{error}.", start_of(node)) from None


_NO_MESSAGE: Final = MessageView(b"", now=0, seq=0, ttl=None, new_token=bytes)


def constant_term(value: Any) -> CompiledTerm:
    return CompiledTerm(lambda view: value, True, value)


def trees_of(node: SyntaxTree) -> list[SyntaxTree]:
    """The parts that are not mere tokens; lark puts None where an optional one is left out."""
    return [child for child in node.children if isinstance(child, Tree)]


def _name(token: Token) -> str:
    if token.type == "QUOTED":
        return token[1:-1].replace('""', '"')
    return token[1:-1].replace("]]", "]") if token.type == "DELIMITED" else str(token)


def _position(token: Token) -> int:
    return token.start_pos or 0


def start_of(node: SyntaxTree) -> int:
    return int(getattr(node.meta, "start_pos", 0))


_COMPARISONS: Final[dict[str, tuple[Callable[[Any, Any], bool], bool]]] = {
    "=": (operator.eq, False),
    "<>": (operator.ne, False),
    "!=": (operator.ne, False),
    "<": (operator.lt, True),
    "<=": (operator.le, True),
    ">": (operator.gt, True),
    ">=": (operator.ge, True),
}
_ALIKE: Final = frozenset((str, int, float))
"""What compares with its own like in every way."""


def compile_filter(text: str, parameters: Mapping[str, Any]) -> CompiledTerm:
    """Raises RuleSyntaxError."""
    return _compile(text, parameters) if parameters else _compile_once(text)


def _compile(text: str, parameters: Mapping[str, Any]) -> CompiledTerm:
    return ConditionCompiler(text, parameters).term(parse(text, "filter"), 0)


@lru_cache(maxsize=4096)
def _compile_once(text: str) -> CompiledTerm:
    """Subscriptions often have the same rules, and parsing takes a millisecond."""
    return _compile(text, {})


class ConditionCompiler(ExpressionCompiler):
    """The text of a filter on its way to a function."""

    def _disjunction(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        runs = self._runs(node, depth)

        def any_of(view: MessageView) -> bool | None:
            result: bool | None = False
            for run in runs:
                held = run(view)
                if held is True:
                    return True
                if held is None:
                    result = None
            return result

        return CompiledTerm(any_of)

    def _conjunction(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        terms = [self.term(tree, depth) for tree in trees_of(node)]
        runs = tuple(term.run for term in terms)

        def all_of(view: MessageView) -> bool | None:
            result: bool | None = True
            for run in runs:
                held = run(view)
                if held is False:
                    return False
                if held is None:
                    result = None
            return result

        # The first alone: what stands behind it may fail where it is not asked.
        return CompiledTerm(all_of, hinges=terms[0].hinges)

    def _negated(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        run = self.term(trees_of(node)[0], depth).run
        return CompiledTerm(_not(run))

    def _comparison(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, right = (self.term(tree, depth) for tree in trees_of(node))
        sign = next(token for token in node.children if isinstance(token, Token))
        relate, ordered = _COMPARISONS[sign]
        verb = str(sign)

        def compare(a: Any, b: Any) -> bool | None:
            if a is None or b is None:
                return None
            if a.__class__ is not b.__class__ or a.__class__ not in _ALIKE:
                a, b = values.matched(a, b, verb, ordered=ordered)
            return relate(a, b)

        alike = _alike(right.value)
        if left.key is None or alike is None:
            return self._of_two(left, right, compare, node)
        key, constant = left.key, right.value

        def compare_property(view: MessageView) -> bool | None:
            """What most filters consist of, in one call."""
            user = view.user
            if user is None:
                user = view.read_user()
            value = user.get(key)
            return relate(value, constant) if value.__class__ in alike else compare(value, constant)

        is_text = sign == "=" and constant.__class__ is str
        return CompiledTerm(compare_property, hinges=(key, constant) if is_text else None)

    def _is_null(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        run = self.term(trees_of(node)[0], depth).run
        return CompiledTerm(lambda view: run(view) is None)

    def _is_not_null(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        run = self.term(trees_of(node)[0], depth).run
        return CompiledTerm(lambda view: run(view) is not None)

    def _is_in(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, choices = trees_of(node)
        subject, runs = self.term(left, depth).run, self._runs(choices, depth)

        def is_in(view: MessageView) -> bool | None:
            value = subject(view)
            if value is None:
                return None
            result: bool | None = False
            for run in runs:
                choice = run(view)
                if choice is None:
                    result = None
                    continue
                if value.__class__ is not choice.__class__:
                    mine, other = values.matched(value, choice, "IN", ordered=False)
                    if mine == other:
                        return True
                elif value == choice:
                    return True
            return result

        return CompiledTerm(is_in)

    def _is_not_in(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        return CompiledTerm(_not(self._is_in(node, depth).run))

    def _is_like(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, like, *rest = trees_of(node)
        subject, wanted = self.term(left, depth), self.term(like, depth)
        escape = self.term(rest[0], depth) if rest else None
        if wanted.is_constant and (escape is None or escape.is_constant):
            return self._is_like_constant(subject, wanted.value, escape, like)

        def is_like(view: MessageView) -> bool | None:
            value, text = subject.run(view), wanted.run(view)
            mark = escape.run(view) if escape is not None else ""
            if value is None or text is None or mark is None:
                return None
            matches = pattern(
                values.need_text(text, "LIKE"), values.need_text(mark, "ESCAPE") if escape is not None else None
            )
            return matches(values.need_text(value, "LIKE"))

        return CompiledTerm(is_like)

    def _is_like_constant(
        self, subject: CompiledTerm, text: Any, escape: CompiledTerm | None, node: SyntaxTree
    ) -> CompiledTerm:
        if text is None or (escape is not None and escape.value is None):
            return constant_term(None)
        try:
            mark = None if escape is None else values.need_text(escape.value, "ESCAPE")
            matches = pattern(values.need_text(text, "LIKE"), mark)
        except RuleEvaluationError as error:
            raise self.fault(f"{error}.", start_of(node)) from None
        run = subject.run

        def is_like(view: MessageView) -> bool | None:
            value = run(view)
            if value.__class__ is str:
                return matches(value)
            return None if value is None else matches(values.need_text(value, "LIKE"))

        return CompiledTerm(is_like)

    def _is_not_like(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        return CompiledTerm(_not(self._is_like(node, depth).run))

    def _exists(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        name = self.property_name(trees_of(node)[0])
        if name.is_system:
            run = SYSTEM[name.key]
            return CompiledTerm(lambda view: run(view) is not None)
        key = name.key
        return CompiledTerm(lambda view: key in (view.user if view.user is not None else view.read_user()))


def _alike(constant: Any) -> frozenset[type] | None:
    """The types whose values compare with the constant as they are; None where each is to be looked at."""
    if constant.__class__ is str:
        return values.TEXTS
    return values.INTEGERS if constant.__class__ in values.INTEGERS else None


def _not(run: Evaluator) -> Evaluator:
    def opposite(view: MessageView) -> bool | None:
        held = run(view)
        return None if held is None else not held

    return opposite
