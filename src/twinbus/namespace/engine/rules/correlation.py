"""Correlation filters: equality with everything that is named, and nothing else. Types that differ are not equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from twinbus.namespace.engine.rules.descriptions import CorrelationFilter
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.values import matched, plain
from twinbus.namespace.engine.rules.view import SYSTEM, MessageView

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
