"""The compiled rules of one subscription: which copies of a message the subscription stores.

All rules without an action together make at most one copy, the unchanged message: they act as one condition. Each rule
with an action makes a changed copy of its own.

Subscriptions may have thousands of rules that differ in the value of one property (`color = 'red'`). A dict holds such
rules by this value, so that a message is tested only with the rules for the value that the message has. A rule can be
in this dict if its condition is false for every other text of the property (`required_text`).
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
from twinbus.namespace.engine.rules.message_view import MAX_STEPS, SYSTEM_PROPERTIES, MessageView
from twinbus.namespace.engine.rules.values import comparable, from_amqp
from twinbus.namespace.engine.send_checks import limit_refusal

if TYPE_CHECKING:
    from twinbus.namespace.engine.rules.actions import ApplyAction

Matches = Callable[[MessageView], bool | None]

RULE_NAME: Final = "RuleName"
"""The application property that holds the name of the rule, in a copy that the action of a rule changed."""


class ChangedCopy(NamedTuple):
    """A copy of a message that the action of a rule changed."""

    raw: bytes
    ttl: int | None
    session: str | None


class Selection(NamedTuple):
    """The copies of one message that a subscription stores."""

    unchanged: bool
    """Whether the subscription stores a copy without changes."""
    copies: tuple[ChangedCopy, ...] = ()
    """One changed copy for each rule with an action that matches the message."""
    error: str | None = None
    """Describes the first rule that could not be evaluated; None if there is none. An error of a rule without an
    action is left out if another rule without an action matches."""


class CompiledRule(NamedTuple):
    """One rule, with its filter and its action compiled to functions."""

    name: str
    matches: Matches | None
    """The function of the filter; None if the filter selects every message."""
    apply_action: ApplyAction | None
    required_text: tuple[str, str] | None = None
    """The name of a property, and a text: the rule matches no message whose property has a different text."""


_UNCHANGED: Final = Selection(True)
_NOTHING: Final = Selection(False)


class RuleSet:
    """The compiled rules of one subscription. The constructor raises RuleSyntaxError for a text that is wrong."""

    __slots__ = ("_by_text", "_compiled", "_with_action", "_without_action", "takes_everything")

    def __init__(self, rules: Iterable[RuleDescription], before: RuleSet | None = None) -> None:
        """Compile the rules. A rule that is also in the older set `before` is taken from there."""
        self._compiled: dict[int, tuple[RuleDescription, CompiledRule]] = {}
        """Each rule by `id()` of its description. The description is stored too: while it exists, no other object can
        get the same id."""
        known = {} if before is None else before._compiled
        for described in rules:
            self._compiled[id(described)] = known.get(id(described)) or (described, compile_rule(described))
        compiled = [
            rule for described, rule in self._compiled.values() if not isinstance(described.filter, FalseFilter)
        ]
        self._with_action = tuple(rule for rule in compiled if rule.apply_action is not None)
        without_action = [rule for rule in compiled if rule.apply_action is None]
        # If a rule without an action selects every message, the other rules without an action change nothing.
        always = [rule for rule in without_action if rule.matches is None][:1]
        self._without_action = tuple(always or [rule for rule in without_action if rule.required_text is None])
        self._by_text: dict[str, dict[str, list[CompiledRule]]] = {}
        """The rules with a required text, by the name of the property and then by the text."""
        for rule in () if always else without_action:
            if rule.required_text is not None:
                name, text = rule.required_text
                self._by_text.setdefault(name, {}).setdefault(text, []).append(rule)
        self.takes_everything = not self._with_action and bool(always)
        """Whether the subscription stores every message unchanged, so that `select` need not be called."""

    def select(self, view: MessageView, most_steps: int = MAX_STEPS) -> Selection:
        """Return the copies of a message that the subscription stores: none, one unchanged, and any number changed.

        The rules may do `most_steps` of work. Afterwards `view.steps_left` is what is left, or negative.
        """
        view.most_steps = view.steps_left = most_steps
        # Rules without an action act as one condition: if one of them matches, an error of another has no effect.
        taken, error = self._any_matches(self._without_action, view)
        for name, by_text in self._by_text.items():
            if taken:
                break
            taken, other_error = self._any_matches(_candidates(by_text, name, view), view)
            error = error or other_error
        if not self._with_action and (taken or error is None):
            return _UNCHANGED if taken else _NOTHING
        error = None if taken else error
        copies = []
        for rule in self._with_action:
            try:
                if rule.matches is None or rule.matches(view) is True:
                    copies.append(_changed_copy(rule, view))
            except RuleEvaluationError as failure:
                error = error or _error_text(rule, failure)
        return Selection(taken, tuple(copies), error)

    @staticmethod
    def _any_matches(rules: Iterable[CompiledRule], view: MessageView) -> tuple[bool, str | None]:
        """Return whether one of the rules matches, and the error of the first rule that could not be evaluated."""
        error = None
        for rule in rules:
            try:
                if rule.matches is None or rule.matches(view) is True:
                    return True, error
            except RuleEvaluationError as failure:
                error = error or _error_text(rule, failure)
        return False, error


def _candidates(by_text: dict[str, list[CompiledRule]], name: str, view: MessageView) -> Iterable[CompiledRule]:
    """Return the rules to evaluate: the rules for the text of the property, or all rules if it has no text."""
    try:
        value = (view.user if view.user is not None else view.read_user()).get(name)
    except RuleEvaluationError:
        value = None  # each of the rules fails when it is evaluated
    if value.__class__ is str:
        return by_text.get(value, ())
    return [rule for group in by_text.values() for rule in group]


def _error_text(rule: CompiledRule, error: RuleEvaluationError) -> str:
    return f"Rule '{rule.name}' could not be evaluated: {error}."


def _changed_copy(rule: CompiledRule, view: MessageView) -> ChangedCopy:
    assert rule.apply_action is not None, "a rule without an action changes nothing"
    draft = rule.apply_action(view)
    draft.set_user(RULE_NAME, rule.name)
    raw = draft.encoded()
    view.spend_copy(max(0, len(raw) - len(view.raw)))
    if (refusal := limit_refusal(read_routing_fields(raw))) is not None:
        raise RuleEvaluationError(f"its action makes a message beyond the limits: {refusal.description.rstrip('.')}")
    return ChangedCopy(raw, draft.ttl, draft.session)


# --- compiling ---------------------------------------------------------------------------------------------------


def compile_rule(rule: RuleDescription) -> CompiledRule:
    """Compile a rule. Raises RuleSyntaxError."""
    apply_action = None
    if rule.action is not None:
        # Imported here and not above, so that a namespace without SQL rules does not load the parser.
        from twinbus.namespace.engine.rules.actions import compile_action  # noqa: PLC0415

        apply_action = compile_action(rule.action.expression, rule.action.parameters)
    matches, required_text = _compile_any_filter(rule.filter)
    return CompiledRule(rule.name, matches, apply_action, required_text)


def _compile_any_filter(description: RuleFilter) -> tuple[Matches | None, tuple[str, str] | None]:
    match description:
        case TrueFilter():
            return None, None
        case FalseFilter():
            return lambda view: False, None
        case CorrelationFilter():
            return compile_correlation(description), None
        case SqlFilter():
            from twinbus.namespace.engine.rules.compiler import compile_filter  # noqa: PLC0415  # see compile_rule

            compiled = compile_filter(description.expression, description.parameters)
            is_true = compiled.is_constant and compiled.value is True
            return None if is_true else compiled.evaluate, compiled.required_text


_SYSTEM_NAMES: Final = {
    "correlation_id": "correlationid",
    "message_id": "messageid",
    "to": "to",
    "reply_to": "replyto",
    "label": "label",
    "session_id": "sessionid",
    "reply_to_session_id": "replytosessionid",
    "content_type": "contenttype",
}


def compile_correlation(description: CorrelationFilter) -> Matches:
    """Compile a correlation filter. A message matches if it has the same value in each property that the filter names.

    Values of different types are not equal, except an integer and an equal floating-point number.
    """
    wanted = {key: getattr(description, field) for field, key in _SYSTEM_NAMES.items()}
    system = tuple((SYSTEM_PROPERTIES[key], value) for key, value in wanted.items() if value is not None)
    user = tuple((name.lower(), from_amqp(value)) for name, value in description.properties.items())
    steps = 1 + (len(system) + len(user)) // 2

    def matches(view: MessageView) -> bool:
        view.steps_left -= steps
        if view.steps_left < 0:
            view.spend_steps(0)
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
        left, right = comparable(found, wanted, "=", ordered=False)
    except RuleEvaluationError:
        return False
    return bool(left == right)
