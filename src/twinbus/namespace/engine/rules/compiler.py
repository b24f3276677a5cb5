"""Compiles SQL filters and expressions: makes one Python function from a syntax tree, to be called for each message.

`ExpressionCompiler` compiles expressions, which have values (None for null). `ConditionCompiler` adds conditions, which
are True, False, or None for unknown (three-valued logic). Each part becomes a `CompiledTerm`. Parts that depend on no
message are evaluated once, at compile time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

from lark import Token, Tree

from twinbus.namespace.engine.rules import values
from twinbus.namespace.engine.rules.errors import RuleEvaluationError, RuleSyntaxError
from twinbus.namespace.engine.rules.grammar import SyntaxTree, parse
from twinbus.namespace.engine.rules.like import MAX_LIKE_CHARACTERS, compile_like
from twinbus.namespace.engine.rules.message_view import SYSTEM_PROPERTIES, MessageView

Evaluator = Callable[[MessageView], Any]

# A deeper expression would exceed Python's recursion limit when it is evaluated.
_MAX_DEPTH: Final = 150


class CompiledTerm(NamedTuple):
    """A part of a condition or expression, compiled to a function that evaluates the part on a message."""

    evaluate: Evaluator
    is_constant: bool = False
    value: Any = None
    """The value, if the part is constant."""
    key: str | None = None
    """If the part is an application property: its name in lower case."""
    required_text: tuple[str, str] | None = None
    """The name of a property, and a text: the condition is false for every message whose property has another text."""


class PropertyName(NamedTuple):
    """The name of a property in the text of a rule. `key` is the name in lower case."""

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
    """Compiles the expressions of one text. The method `_x` compiles the tree `x` of the grammar."""

    def __init__(self, text: str, parameters: Mapping[str, Any]) -> None:
        self._text = text
        self._parameters = {name.lower().removeprefix("@"): value for name, value in parameters.items()}

    def error(self, fault: str, position: int) -> RuleSyntaxError:
        return RuleSyntaxError(fault, position + 1, self._text)

    def term(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        if depth > _MAX_DEPTH:
            raise self.error(f"the expression is nested more than {_MAX_DEPTH} deep.", position_of(node))
        build: Callable[[SyntaxTree, int], CompiledTerm] = getattr(self, "_" + node.data)
        return build(node, depth + 1)

    def property_name(self, node: SyntaxTree) -> PropertyName:
        *scope, last = (token for token in node.children if isinstance(token, Token))
        name, position = _name(last), _position(last)
        if not name:
            raise self.error("the name of a property cannot be empty.", position)
        if not scope:
            return PropertyName(False, name, name.lower(), position)
        owner = _name(scope[0]).lower()
        if owner not in ("sys", "user"):
            raise self.error(
                f"'{owner}' is no scope: it is sys or user. Write [{owner}.{name}] for a name with a dot.",
                _position(scope[0]),
            )
        return PropertyName(owner == "sys", name, name.lower(), position)

    # --- expressions -----------------------------------------------------------------------------------------------

    def _property(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        name = self.property_name(node)
        if name.is_system:
            return _system_property(name)
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
                    raise self.error(f"{token[:30]} does not fit a 64-bit integer.", _position(token))
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
            return failing_term(f"the parameter {token} has no value")
        return constant_term(values.from_amqp(self._parameters[key]))

    def _call(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        function = node.children[0]
        assert isinstance(function, Token), "a call begins with its name"
        arguments = subtrees(node)
        match function.lower(), len(arguments):
            case ("newid", 0):
                return CompiledTerm(lambda view: UUID(bytes=view.new_token(), version=4))
            case ("property" | "p", 1):
                evaluate = self.term(arguments[0], depth).evaluate
            case (("newid" | "property" | "p") as known, count):
                wanted = "no argument" if known == "newid" else "one argument, the name of a property"
                raise self.error(f"{known}() takes {wanted}, not {count}.", _position(function))
            case _:
                raise self.error(f"there is no function '{function}': newid, property and p are.", _position(function))

        def read(view: MessageView) -> Any:
            name = evaluate(view)
            if name is None:
                return None
            text = values.require_text(name, "property()")
            view.spend(8 * len(text))  # a change of case takes longer than a copy
            return view.named(text)

        return CompiledTerm(read)

    def _calculation(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, right = (self.term(tree, depth) for tree in subtrees(node))
        sign = next(token for token in node.children if isinstance(token, Token))
        calculate = _CALCULATIONS[sign]
        term = self._binary(left, right, lambda a, b: None if a is None or b is None else calculate(a, b))
        return term if term.is_constant or sign != "+" else CompiledTerm(_spend_for_text(term.evaluate))

    def _signed(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        operand = self.term(subtrees(node)[0], depth)
        apply = values.negate if node.children[0] == "-" else values.unary_plus
        evaluate = operand.evaluate
        term = CompiledTerm(lambda view: None if (value := evaluate(view)) is None else apply(value))
        return _folded(term) if operand.is_constant else term

    # --- common helpers --------------------------------------------------------------------------------------------

    def _evaluators(self, node: SyntaxTree, depth: int) -> tuple[Evaluator, ...]:
        return tuple(self.term(tree, depth).evaluate for tree in subtrees(node))

    def _binary(self, left: CompiledTerm, right: CompiledTerm, decide: Callable[[Any, Any], Any]) -> CompiledTerm:
        first, second = left.evaluate, right.evaluate
        if right.is_constant:
            value = right.value
            term = CompiledTerm(lambda view: decide(first(view), value))
            return _folded(term) if left.is_constant else term
        return CompiledTerm(lambda view: decide(first(view), second(view)))


_NO_MESSAGE: Final = MessageView(b"", now=0, seq=0, ttl=None, new_token=bytes)


def constant_term(value: Any) -> CompiledTerm:
    return CompiledTerm(lambda view: value, True, value)


def _folded(term: CompiledTerm) -> CompiledTerm:
    """Return the constant value of an expression that depends on no message."""
    try:
        return constant_term(term.evaluate(_NO_MESSAGE))
    except RuleEvaluationError as error:
        return failing_term(str(error))


def failing_term(fault: str) -> CompiledTerm:
    """Return a term that no message can be evaluated with. The service accepts such a rule, and so does Twinbus."""

    def fail(view: MessageView) -> Any:
        raise RuleEvaluationError(fault)

    return CompiledTerm(fail)


def _system_property(name: PropertyName) -> CompiledTerm:
    reader = SYSTEM_PROPERTIES.get(name.key)
    return failing_term(f"there is no system property '{name.name}'") if reader is None else CompiledTerm(reader)


def subtrees(node: SyntaxTree) -> list[SyntaxTree]:
    """Return the subtrees of a tree, without the None that Lark puts in place of a missing optional subtree."""
    return [child for child in node.children if isinstance(child, Tree)]


def _name(token: Token) -> str:
    if token.type == "QUOTED":
        return token[1:-1].replace('""', '"')
    return token[1:-1].replace("]]", "]") if token.type == "DELIMITED" else str(token)


def _position(token: Token) -> int:
    return token.start_pos or 0


def position_of(node: SyntaxTree) -> int:
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
_COMPARABLE: Final = frozenset((str, int, float))
"""Two values of the same type, if it is one of these types, can be compared with every operator."""


def compile_filter(text: str, parameters: Mapping[str, Any]) -> CompiledTerm:
    """Compile the text of a SQL filter. Raises RuleSyntaxError."""
    return _compile(text, parameters) if parameters else _compile_once(text)


def _compile(text: str, parameters: Mapping[str, Any]) -> CompiledTerm:
    return ConditionCompiler(text, parameters).term(parse(text, "filter"), 0)


@lru_cache(maxsize=4096)
def _compile_once(text: str) -> CompiledTerm:
    """Compile a filter without parameters. Cached: many subscriptions have the same rules, and parsing takes 1 ms."""
    return _compile(text, {})


class ConditionCompiler(ExpressionCompiler):
    """Compiles the conditions of one filter. A condition is True, False, or None for unknown."""

    def _disjunction(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        evaluators = self._evaluators(node, depth)

        def any_of(view: MessageView) -> bool | None:
            result: bool | None = False
            for evaluate in evaluators:
                held = evaluate(view)
                if held is True:
                    return True
                if held is None:
                    result = None
            return result

        return CompiledTerm(any_of)

    def _conjunction(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        terms = [self.term(tree, depth) for tree in subtrees(node)]
        evaluators = tuple(term.evaluate for term in terms)

        def all_of(view: MessageView) -> bool | None:
            result: bool | None = True
            for evaluate in evaluators:
                held = evaluate(view)
                if held is False:
                    return False
                if held is None:
                    result = None
            return result

        # Not the required text of a later condition: a condition before that one may raise an error, which would be
        # missed if the rule were not evaluated.
        return CompiledTerm(all_of, required_text=terms[0].required_text)

    def _negated(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        evaluate = self.term(subtrees(node)[0], depth).evaluate
        return CompiledTerm(_not(evaluate))

    def _comparison(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, right = (self.term(tree, depth) for tree in subtrees(node))
        sign = next(token for token in node.children if isinstance(token, Token))
        relate, ordered = _COMPARISONS[sign]
        operator_text = str(sign)

        def compare(a: Any, b: Any) -> bool | None:
            if a is None or b is None:
                return None
            if a.__class__ is not b.__class__ or a.__class__ not in _COMPARABLE:
                a, b = values.comparable(a, b, operator_text, ordered=ordered)
            return relate(a, b)

        alike = _directly_comparable(right.value)
        if not right.is_constant:
            # Only two properties can be texts that are both long.
            return self._binary(left._replace(evaluate=_spend_for_text(left.evaluate)), right, compare)
        if left.key is None or alike is None:
            return self._binary(left, right, compare)
        key, constant = left.key, right.value

        def compare_property(view: MessageView) -> bool | None:
            """Compare a property with a constant, the most frequent condition, in one call."""
            user = view.user
            if user is None:
                user = view.read_user()
            value = user.get(key)
            return relate(value, constant) if value.__class__ in alike else compare(value, constant)

        is_text = sign == "=" and constant.__class__ is str
        return CompiledTerm(compare_property, required_text=(key, constant) if is_text else None)

    def _is_null(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        evaluate = self.term(subtrees(node)[0], depth).evaluate
        return CompiledTerm(lambda view: evaluate(view) is None)

    def _is_not_null(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        evaluate = self.term(subtrees(node)[0], depth).evaluate
        return CompiledTerm(lambda view: evaluate(view) is not None)

    def _is_in(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, choices = subtrees(node)
        subject, evaluators = self.term(left, depth).evaluate, self._evaluators(choices, depth)
        most_texts = len(evaluators)

        def is_in(view: MessageView) -> bool | None:
            value = subject(view)
            if value is None:
                return None
            if value.__class__ is str:
                view.spend(most_texts * len(value))
            result: bool | None = False
            for evaluate in evaluators:
                choice = evaluate(view)
                if choice is None:
                    result = None
                    continue
                if value.__class__ is not choice.__class__:
                    mine, other = values.comparable(value, choice, "IN", ordered=False)
                    if mine == other:
                        return True
                elif value == choice:
                    return True
            return result

        return CompiledTerm(is_in)

    def _is_not_in(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        return CompiledTerm(_not(self._is_in(node, depth).evaluate))

    def _is_like(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        left, like, *rest = subtrees(node)
        subject, wanted = self.term(left, depth), self.term(like, depth)
        escape = self.term(rest[0], depth) if rest else None
        if wanted.is_constant and (escape is None or escape.is_constant):
            return self._is_like_constant(subject, wanted.value, escape)

        def is_like(view: MessageView) -> bool | None:
            value, text = subject.evaluate(view), wanted.evaluate(view)
            mark = escape.evaluate(view) if escape is not None else ""
            if value is None or text is None or mark is None:
                return None
            value, text = values.require_text(value, "LIKE"), values.require_text(text, "LIKE")
            view.spend_steps(8 * min(len(text), MAX_LIKE_CHARACTERS))  # to compile the pattern
            pattern = compile_like(text, values.require_text(mark, "ESCAPE") if escape is not None else None)
            view.spend_steps(pattern.steps(len(value)))
            return pattern.matches(value)

        return CompiledTerm(is_like)

    def _is_like_constant(self, subject: CompiledTerm, text: Any, escape: CompiledTerm | None) -> CompiledTerm:
        if text is None or (escape is not None and escape.value is None):
            return constant_term(None)
        try:
            mark = None if escape is None else values.require_text(escape.value, "ESCAPE")
            pattern = compile_like(values.require_text(text, "LIKE"), mark)
        except RuleEvaluationError as error:
            return failing_term(str(error))
        evaluate = subject.evaluate

        def is_like(view: MessageView) -> bool | None:
            value = evaluate(view)
            if value is None:
                return None
            if value.__class__ is not str:
                value = values.require_text(value, "LIKE")
            view.spend_steps(pattern.steps(len(value)))
            return pattern.matches(value)

        return CompiledTerm(is_like)

    def _is_not_like(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        return CompiledTerm(_not(self._is_like(node, depth).evaluate))

    def _exists(self, node: SyntaxTree, depth: int) -> CompiledTerm:
        name = self.property_name(subtrees(node)[0])
        if name.is_system:
            evaluate = _system_property(name).evaluate
            return CompiledTerm(lambda view: evaluate(view) is not None)
        key = name.key
        return CompiledTerm(lambda view: key in (view.user if view.user is not None else view.read_user()))


def _directly_comparable(constant: Any) -> frozenset[type] | None:
    """Return the types whose values can be compared with this constant without conversion; None for no such types."""
    if constant.__class__ is str:
        return values.TEXTS
    return values.INTEGERS if constant.__class__ in values.INTEGERS else None


def _spend_for_text(evaluate: Evaluator) -> Evaluator:
    def spending(view: MessageView) -> Any:
        value = evaluate(view)
        if value.__class__ is str:
            view.spend(len(value))
        return value

    return spending


def _not(evaluate: Evaluator) -> Evaluator:
    def opposite(view: MessageView) -> bool | None:
        held = evaluate(view)
        return None if held is None else not held

    return opposite
