"""SQL actions: SET and REMOVE statements that change a subscription's copy of a message. The body never changes.

Statements run in order. Each statement sees the changes that the statements before it made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from twinbus.amqp import EncodeError, with_sections
from twinbus.namespace.engine.rules.compiler import Evaluator, ExpressionCompiler, PropertyName
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.grammar import SyntaxTree, parse
from twinbus.namespace.engine.rules.message_view import SYSTEM_PROPERTIES, MessageView, by_lower_name
from twinbus.namespace.engine.rules.values import Duration, as_text, from_amqp, kind_of, to_amqp, with_type_of
from twinbus.values import Symbol, Timestamp

MAX_STATEMENTS: Final = 32
_STEPS_PER_COPY: Final = 100
_STEPS_PER_PROPERTY: Final = 10

_FIELDS: Final = {
    "messageid": "message_id",
    "correlationid": "correlation_id",
    "sessionid": "group_id",
    "replyto": "reply_to",
    "replytosessionid": "reply_to_group_id",
    "to": "to",
    "label": "subject",
    "subject": "subject",
    "contenttype": "content_type",
}
_ANNOTATIONS: Final = {
    "partitionkey": ("x-opt-partition-key", str),
    "scheduledenqueuetimeutc": ("x-opt-scheduled-enqueue-time", Timestamp),
}
_SETTABLE: Final = frozenset((*_FIELDS, *_ANNOTATIONS, "timetolive"))
_REQUIRED: Final = frozenset(("messageid", "timetolive"))
"""System properties that every message must have."""


class MessageDraft(MessageView):
    """A copy of a message that the statements of an action change."""

    __slots__ = (
        "_annotations",
        "_application",
        "_changed_properties",
        "_changed_ttl",
        "_has_twins",
        "_message",
        "_names",
    )

    def __init__(self, message: MessageView) -> None:
        super().__init__(message.raw, now=message.now, seq=message.seq, ttl=message.ttl, new_token=message.new_token)
        # The properties are encoded again at the end. The rest of the message is copied.
        message.spend_steps(_STEPS_PER_COPY + _STEPS_PER_PROPERTY * len(message.application))
        message.spend_copy(len(message.raw))
        self.most_steps, self.steps_left = message.most_steps, message.steps_left
        self._message = message
        self._sections = message.sections
        self._properties = replace(message.properties)
        self._application: dict[str, Any] = dict(message.application)
        self._names = {name.lower(): name for name in self._application}
        # Whether names differ only in case. Then `user` is made anew after each change: it has one of them at a time.
        self._has_twins = len(self._names) < len(self._application)
        self._annotations: dict[Any, Any] | None = None
        self._changed_properties = False
        self._changed_ttl = False

    @property
    def session(self) -> str | None:
        return self.properties.group_id

    def annotation(self, name: str) -> Any:
        return (self._message.annotations if self._annotations is None else self._annotations).get(name)

    def set_user(self, name: str, value: Any) -> None:
        spelled = self._names.setdefault(name.lower(), name)
        existing = self._application.get(spelled)
        stored = value if value is None or existing is None else with_type_of(existing, value)
        self._application[spelled] = stored
        if self._has_twins:
            self.user = None
        elif self.user is not None:
            self.user[name.lower()] = from_amqp(stored)

    def remove_user(self, name: str) -> None:
        self._application.pop(self._names.pop(name.lower(), name), None)
        if self._has_twins:
            self.user = None
        elif self.user is not None:
            self.user.pop(name.lower(), None)

    def read_user(self) -> dict[str, Any]:
        self.spend_steps(len(self._application))
        self.user = by_lower_name(self._application)
        return self.user

    def set_system(self, key: str, value: Any) -> None:
        if value is None and key in _REQUIRED:
            raise RuleEvaluationError(f"the system property {key} cannot be null")
        if key in _FIELDS:
            setattr(self.properties, _FIELDS[key], None if value is None else as_text(value))
            self._changed_properties = True
        elif key == "timetolive":
            if not isinstance(value, Duration) or value < 0:
                raise RuleEvaluationError(f"a time to live is a duration, not {kind_of(value).value}")
            self.ttl = int(value)
            self._changed_ttl = True
        else:
            self._set_annotation(*_ANNOTATIONS[key], value)

    def _set_annotation(self, name: str, kind: type, value: Any) -> None:
        if value is not None and not isinstance(value, kind):
            raise RuleEvaluationError(f"{name} cannot be {kind_of(value).value}")
        if self._annotations is None:
            self.spend_steps(_STEPS_PER_PROPERTY * len(self._message.annotations))
            self._annotations = dict(self._message.annotations)
        self._annotations.pop(name, None)
        if value is not None:
            self._annotations[Symbol(name)] = value

    def encoded(self) -> bytes:
        """Return the changed message. Raises RuleEvaluationError for a value that no message can carry."""
        header = None
        if self._changed_ttl and self.ttl is not None:
            header = replace(self._decoded("header"), ttl=min(self.ttl, 0xFFFF_FFFF))
            self.properties.absolute_expiry_time = None
            self._changed_properties = True
        try:
            return with_sections(
                self.sections,
                header=header,
                message_annotations=self._annotations,
                properties=self.properties if self._changed_properties else None,
                application_properties={name: to_amqp(value) for name, value in self._application.items()},
            )
        except EncodeError as error:  # for example a computed time that does not fit 64 bits
            raise RuleEvaluationError(f"its action makes a value that no message can carry: {error}") from error


Statement = Callable[[MessageDraft], None]
ApplyAction = Callable[[MessageView], MessageDraft]


def compile_action(text: str, parameters: Mapping[str, Any]) -> ApplyAction:
    """Return the function that makes the changed copy of a message. Raises RuleSyntaxError."""
    compiler = ExpressionCompiler(text, parameters)
    trees = [node for node in parse(text, "action").children if not isinstance(node, str)]
    if len(trees) > MAX_STATEMENTS:
        position = trees[MAX_STATEMENTS].meta.start_pos
        raise compiler.error(f"an action has at most {MAX_STATEMENTS} statements.", position)
    statements = tuple(_statement(compiler, node) for node in trees)

    def apply(message: MessageView) -> MessageDraft:
        draft = MessageDraft(message)
        try:
            for statement in statements:
                statement(draft)
        finally:
            message.steps_left = draft.steps_left
        return draft

    return apply


def _statement(compiler: ExpressionCompiler, node: SyntaxTree) -> Statement:
    trees = [child for child in node.children if not isinstance(child, str)]
    name = compiler.property_name(trees[0])
    if name.is_system and name.key not in SYSTEM_PROPERTIES:
        raise compiler.error(f"there is no system property '{name.name}'.", name.position)
    if name.is_system and name.key not in _SETTABLE:
        raise compiler.error(f"the system property '{name.name}' cannot be changed.", name.position)
    if node.data == "remove":
        if name.is_system and name.key in _REQUIRED:
            raise compiler.error(f"the system property '{name.name}' cannot be removed.", name.position)
        return _remove(name)
    return _set(name, compiler.term(trees[1], 0).evaluate)


def _set(name: PropertyName, evaluate: Evaluator) -> Statement:
    if name.is_system:
        return lambda draft: draft.set_system(name.key, evaluate(draft))
    return lambda draft: draft.set_user(name.name, evaluate(draft))


def _remove(name: PropertyName) -> Statement:
    if name.is_system:
        return lambda draft: draft.set_system(name.key, None)
    return lambda draft: draft.remove_user(name.name)
