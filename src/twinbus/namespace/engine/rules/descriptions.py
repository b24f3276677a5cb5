"""What an operator says about a rule: a name, a filter, perhaps an action. Plain data; nothing here is compiled.

The values of parameters and properties keep their AMQP type, so that they are told again as they were given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

DEFAULT_RULE: Final = "$Default"
TRUE_EXPRESSION: Final = "1=1"
FALSE_EXPRESSION: Final = "1=0"


@dataclass(frozen=True, slots=True)
class TrueFilter:
    """Takes every message."""


@dataclass(frozen=True, slots=True)
class FalseFilter:
    """Takes none."""


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Takes what the expression is true of. Parameters by name, with or without the @."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrelationFilter:
    """Takes what is equal in everything that is named here; None names nothing."""

    correlation_id: str | None = None
    message_id: str | None = None
    to: str | None = None
    reply_to: str | None = None
    label: str | None = None
    session_id: str | None = None
    reply_to_session_id: str | None = None
    content_type: str | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)


Filter = TrueFilter | FalseFilter | SqlFilter | CorrelationFilter


@dataclass(frozen=True, slots=True)
class SqlAction:
    """Changes the subscription's copy of a message."""

    expression: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RuleDescription:
    """One rule. `created` is in milliseconds since the epoch; 0 until its subscription has it."""

    name: str
    filter: Filter = field(default_factory=TrueFilter)
    action: SqlAction | None = None
    created: int = 0
