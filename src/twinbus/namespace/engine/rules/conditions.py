"""The conditions of filters, made into functions once; each message is then only handed to them.

A condition gives True, False, or None for unknown (three-valued logic).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from lark import Token

from twinbus.namespace.engine.rules import values
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.expressions import ExpressionCompiler, Run, Term, constant_term, start_of, trees_of
from twinbus.namespace.engine.rules.grammar import Node, parse
from twinbus.namespace.engine.rules.patterns import pattern
from twinbus.namespace.engine.rules.view import SYSTEM, MessageView

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


def compile_filter(text: str, parameters: Mapping[str, Any]) -> Term:
    """Raises RuleSyntaxError."""
    return _compile(text, parameters) if parameters else _compile_once(text)


def _compile(text: str, parameters: Mapping[str, Any]) -> Term:
    return ConditionCompiler(text, parameters).term(parse(text, "filter"), 0)


@lru_cache(maxsize=4096)
def _compile_once(text: str) -> Term:
    """Subscriptions often have the same rules, and parsing takes a millisecond."""
    return _compile(text, {})


class ConditionCompiler(ExpressionCompiler):
    """The text of a filter on its way to a function."""

    def _disjunction(self, node: Node, depth: int) -> Term:
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

        return Term(any_of)

    def _conjunction(self, node: Node, depth: int) -> Term:
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
        return Term(all_of, hinges=terms[0].hinges)

    def _negated(self, node: Node, depth: int) -> Term:
        run = self.term(trees_of(node)[0], depth).run
        return Term(_not(run))

    def _comparison(self, node: Node, depth: int) -> Term:
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
        return Term(compare_property, hinges=(key, constant) if is_text else None)

    def _is_null(self, node: Node, depth: int) -> Term:
        run = self.term(trees_of(node)[0], depth).run
        return Term(lambda view: run(view) is None)

    def _is_not_null(self, node: Node, depth: int) -> Term:
        run = self.term(trees_of(node)[0], depth).run
        return Term(lambda view: run(view) is not None)

    def _is_in(self, node: Node, depth: int) -> Term:
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

        return Term(is_in)

    def _is_not_in(self, node: Node, depth: int) -> Term:
        return Term(_not(self._is_in(node, depth).run))

    def _is_like(self, node: Node, depth: int) -> Term:
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

        return Term(is_like)

    def _is_like_constant(self, subject: Term, text: Any, escape: Term | None, node: Node) -> Term:
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

        return Term(is_like)

    def _is_not_like(self, node: Node, depth: int) -> Term:
        return Term(_not(self._is_like(node, depth).run))

    def _exists(self, node: Node, depth: int) -> Term:
        name = self.property_name(trees_of(node)[0])
        if name.is_system:
            run = SYSTEM[name.key]
            return Term(lambda view: run(view) is not None)
        key = name.key
        return Term(lambda view: key in (view.user if view.user is not None else view.read_user()))


def _alike(constant: Any) -> frozenset[type] | None:
    """The types whose values compare with the constant as they are; None where each is to be looked at."""
    if constant.__class__ is str:
        return values.TEXTS
    return values.INTEGERS if constant.__class__ in values.INTEGERS else None


def _not(run: Run) -> Run:
    def opposite(view: MessageView) -> bool | None:
        held = run(view)
        return None if held is None else not held

    return opposite
