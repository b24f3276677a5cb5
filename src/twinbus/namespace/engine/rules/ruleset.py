"""The rules of one subscription at work: which copies of a message it takes, one for all the rules without action.

Each rule with an action makes a copy of its own. The language is loaded with the first rule that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from twinbus.namespace.engine.rules.correlation import compile_correlation
from twinbus.namespace.engine.rules.descriptions import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    RuleDescription,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.view import MessageView

if TYPE_CHECKING:
    from twinbus.namespace.engine.rules.actions import Act

Matches = Callable[[MessageView], bool | None]

RULE_NAME: Final = "RuleName"
"""The property that tells which rule made a copy."""


class Copy(NamedTuple):
    """A copy of a message that a rule changed."""

    raw: bytes
    ttl: int | None
    session: str | None


class Selection(NamedTuple):
    """What a subscription takes of one message. `fault` tells of the first rule that could not be evaluated."""

    as_it_is: bool
    copies: tuple[Copy, ...] = ()
    fault: str | None = None


class Rule(NamedTuple):
    """A compiled rule; `matches` None takes everything."""

    name: str
    matches: Matches | None
    act: Act | None


_EVERYTHING: Final = Selection(True)
_NOTHING: Final = Selection(False)


class RuleSet:
    """The compiled rules of one subscription. Raises RuleSyntaxError for what cannot be."""

    __slots__ = ("_changing", "_plain", "takes_everything")

    def __init__(self, rules: Iterable[RuleDescription]) -> None:
        compiled = [compile_rule(rule) for rule in rules if not isinstance(rule.filter, FalseFilter)]
        self._changing = tuple(rule for rule in compiled if rule.act is not None)
        plain = [rule for rule in compiled if rule.act is None]
        # One that takes everything makes all others without action idle.
        self._plain = tuple(rule for rule in plain if rule.matches is None)[:1] or tuple(plain)
        self.takes_everything = not self._changing and bool(self._plain) and self._plain[0].matches is None
        """Without a look at the message."""

    def select(self, view: MessageView) -> Selection:
        taken, fault = False, None
        for rule in self._plain:
            try:
                if rule.matches is None or rule.matches(view) is True:
                    taken = True
                    break
            except RuleEvaluationError as error:
                fault = fault or f"The filter of rule '{rule.name}': {error}."
        if not self._changing:
            if fault is None:
                return _EVERYTHING if taken else _NOTHING
            return Selection(taken, (), fault)
        copies = []
        for rule in self._changing:
            try:
                if rule.matches is None or rule.matches(view) is True:
                    copies.append(_changed(rule, view))
            except RuleEvaluationError as error:
                fault = fault or f"Rule '{rule.name}': {error}."
        return Selection(taken, tuple(copies), fault)


def compile_rule(rule: RuleDescription) -> Rule:
    act = None
    if rule.action is not None:
        from twinbus.namespace.engine.rules.actions import compile_action  # noqa: PLC0415  # see the module's docstring

        act = compile_action(rule.action.expression, rule.action.parameters)
    return Rule(rule.name, _matcher(rule.filter), act)


def _matcher(description: Filter) -> Matches | None:
    match description:
        case TrueFilter():
            return None
        case FalseFilter():
            return lambda view: False
        case CorrelationFilter():
            return compile_correlation(description)
        case SqlFilter():
            from twinbus.namespace.engine.rules.conditions import compile_filter  # noqa: PLC0415  # likewise

            compiled = compile_filter(description.expression, description.parameters)
            return None if compiled.is_constant and compiled.value is True else compiled.run


def _changed(rule: Rule, view: MessageView) -> Copy:
    assert rule.act is not None, "a rule without action changes nothing"
    draft = rule.act(view)
    draft.set_user(RULE_NAME, rule.name)
    return Copy(draft.written(), draft.ttl, draft.session)
