"""The rules of one subscription at work: which copies of a message it takes, one for all the rules without action.

Each rule with an action makes a copy of its own. The language is loaded with the first rule that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from twinbus.amqp import read_routing_fields
from twinbus.namespace.engine.descriptions import (
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.message_view import SYSTEM, MessageView
from twinbus.namespace.engine.rules.values import matched, plain
from twinbus.namespace.engine.send_checks import limit_refusal

if TYPE_CHECKING:
    from twinbus.namespace.engine.rules.actions import ApplyAction


Matches = Callable[[MessageView], bool | None]

RULE_NAME: Final = "RuleName"
"""The property that tells which rule made a copy."""


class ChangedCopy(NamedTuple):
    """A copy of a message that a rule changed."""

    raw: bytes
    ttl: int | None
    session: str | None


class Selection(NamedTuple):
    """What a subscription takes of one message. `fault` tells of the first rule that could not be evaluated."""

    unchanged: bool
    copies: tuple[ChangedCopy, ...] = ()
    error: str | None = None


class CompiledRule(NamedTuple):
    """A compiled rule; `matches` None takes everything. `hinges` as in a Term."""

    name: str
    matches: Matches | None
    act: ApplyAction | None
    hinges: tuple[str, str] | None = None


_EVERYTHING: Final = Selection(True)
_NOTHING: Final = Selection(False)


class RuleSet:
    """The compiled rules of one subscription. Raises RuleSyntaxError for what cannot be."""

    __slots__ = ("_by_text", "_changing", "_known", "_others", "takes_everything")

    def __init__(self, rules: Iterable[RuleDescription], before: RuleSet | None = None) -> None:
        """Rules that were there `before` are not compiled again."""
        self._known: dict[int, tuple[RuleDescription, CompiledRule]] = {}
        """By the ids of their descriptions, with these, lest an id is given to another."""
        known = {} if before is None else before._known
        for described in rules:
            self._known[id(described)] = known.get(id(described)) or (described, compile_rule(described))
        compiled = [rule for told, rule in self._known.values() if not isinstance(told.filter, FalseFilter)]
        self._changing = tuple(rule for rule in compiled if rule.act is not None)
        plain = [rule for rule in compiled if rule.act is None]
        # One that takes everything makes all others without action idle.
        always = [rule for rule in plain if rule.matches is None][:1]
        self._others = tuple(always or [rule for rule in plain if rule.hinges is None])
        # Rules that differ in the text of one property are found by it, however many they are.
        self._by_text: dict[str, dict[str, list[CompiledRule]]] = {}
        for rule in () if always else plain:
            if rule.hinges is not None:
                key, text = rule.hinges
                self._by_text.setdefault(key, {}).setdefault(text, []).append(rule)
        self.takes_everything = not self._changing and bool(always)
        """Without a look at the message."""

    def select(self, view: MessageView) -> Selection:
        # Rules without action are one condition: where one of them matches, it is no matter that another fails.
        taken, fault = self._matches(self._others, view)
        for key, by_text in self._by_text.items():
            if taken:
                break
            taken, another = self._matches(_asked(by_text, key, view), view)
            fault = fault or another
        if not self._changing and (taken or fault is None):
            return _EVERYTHING if taken else _NOTHING
        fault = None if taken else fault
        copies = []
        for rule in self._changing:
            try:
                if rule.matches is None or rule.matches(view) is True:
                    copies.append(_changed(rule, view))
            except RuleEvaluationError as error:
                fault = fault or _told(rule, error)
        return Selection(taken, tuple(copies), fault)

    @staticmethod
    def _matches(rules: Iterable[CompiledRule], view: MessageView) -> tuple[bool, str | None]:
        """Whether one of them takes the message; what was wrong with the first that could not be evaluated."""
        fault = None
        for rule in rules:
            try:
                if rule.matches is None or rule.matches(view) is True:
                    return True, fault
            except RuleEvaluationError as error:
                fault = fault or _told(rule, error)
        return False, fault


def _asked(by_text: dict[str, list[CompiledRule]], key: str, view: MessageView) -> Iterable[CompiledRule]:
    """Those of the rules that hinge on a property whose text does not answer them already."""
    try:
        value = (view.user if view.user is not None else view.read_user()).get(key)
    except RuleEvaluationError:
        value = None  # each of them fails by itself
    if value.__class__ is str:
        return by_text.get(value, ())
    return [rule for group in by_text.values() for rule in group]


def compile_rule(rule: RuleDescription) -> CompiledRule:
    act = None
    if rule.action is not None:
        from twinbus.namespace.engine.rules.actions import compile_action  # noqa: PLC0415  # see the module's docstring

        act = compile_action(rule.action.expression, rule.action.parameters)
    matches, hinges = _matcher(rule.filter)
    return CompiledRule(rule.name, matches, act, hinges)


def _matcher(description: RuleFilter) -> tuple[Matches | None, tuple[str, str] | None]:
    match description:
        case TrueFilter():
            return None, None
        case FalseFilter():
            return lambda view: False, None
        case CorrelationFilter():
            return compile_correlation(description), None
        case SqlFilter():
            from twinbus.namespace.engine.rules.compiler import compile_filter  # noqa: PLC0415  # likewise

            compiled = compile_filter(description.expression, description.parameters)
            is_true = compiled.is_constant and compiled.value is True
            return None if is_true else compiled.run, compiled.hinges


def _told(rule: CompiledRule, error: RuleEvaluationError) -> str:
    return f"Rule '{rule.name}' could not be evaluated: {error}."


def _changed(rule: CompiledRule, view: MessageView) -> ChangedCopy:
    assert rule.act is not None, "a rule without action changes nothing"
    draft = rule.act(view)
    draft.set_user(RULE_NAME, rule.name)
    raw = draft.written()
    if (refusal := limit_refusal(read_routing_fields(raw))) is not None:
        raise RuleEvaluationError(f"its action makes a message beyond the limits: {refusal.description.rstrip('.')}")
    return ChangedCopy(raw, draft.ttl, draft.session)


_SYSTEM: Final = {
    "correlation_id": "correlationid",
    "message_id": "messageid",
    "to": "to",
    "reply_to": "replyto",
    "label": "label",
    "session_id": "sessionid",
    "reply_to_session_id": "replytosessionid",
    "content_type": "contenttype",
}


def compile_correlation(description: CorrelationFilter) -> Callable[[MessageView], bool]:
    wanted = {key: getattr(description, field) for field, key in _SYSTEM.items()}
    system = tuple((SYSTEM[key], value) for key, value in wanted.items() if value is not None)
    user = tuple((name.lower(), plain(value)) for name, value in description.properties.items())

    def matches(view: MessageView) -> bool:
        for read, value in system:
            if read(view) != value:
                return False
        if user:
            found = view.user if view.user is not None else view.read_user()
            for key, value in user:
                if not _is_equal(found.get(key), value):
                    return False
        return True

    return matches


def _is_equal(found: Any, wanted: Any) -> bool:
    if found is None or wanted is None:
        return False
    if found.__class__ is wanted.__class__:
        return bool(found == wanted)
    try:
        left, right = matched(found, wanted, "=", ordered=False)
    except RuleEvaluationError:
        return False
    return bool(left == right)
