"""The destinations of the chaos suite, where their messages are received, and the backlog queues."""

from __future__ import annotations

from typing import Any, Final

PRIMARY: Final = "chaos"
"""The pair's name for its primary: the first part of the backlog queues' paths."""
SECONDARY: Final = "harbour"
PLAIN, WATCHFUL, SESSIONS, NEWS = "plain", "watchful", "sessions", "news"
DESTINATIONS: Final = (PLAIN, WATCHFUL, SESSIONS, NEWS)
SUBSCRIPTIONS: Final = ("early", "late")
PLACES: Final[dict[str, tuple[str, ...]]] = {
    PLAIN: (PLAIN,),
    WATCHFUL: (WATCHFUL,),
    SESSIONS: (SESSIONS,),
    NEWS: tuple(f"{NEWS}/Subscriptions/{name}" for name in SUBSCRIPTIONS),
}
"""Where the messages of a destination are received."""
SESSION_IDS: Final = tuple(f"session-{number}" for number in range(4))
QUEUES: Final = tuple(f"{PRIMARY}/x-servicebus-transfer/{index}" for index in range(2))
LOCK_SECONDS: Final = 5.0
"""Lock duration of the backlog queues: the shortest that Service Bus allows."""
LONG: Final = "PT5M"

_PRIMARY_ENTITIES: Final[dict[str, Any]] = {
    "queues": [
        {"name": PLAIN, "lock_duration": LONG},
        {
            "name": WATCHFUL,
            "lock_duration": LONG,
            "requires_duplicate_detection": True,
            "duplicate_detection_history_time_window": "PT1H",
        },
        {"name": SESSIONS, "lock_duration": LONG, "requires_session": True},
    ],
    "topics": [{"name": NEWS, "subscriptions": [{"name": name, "lock_duration": LONG} for name in SUBSCRIPTIONS]}],
}
PRIMARY_CONFIG: Final = {"namespaces": [{"name": "primary", **_PRIMARY_ENTITIES}]}
SECONDARY_CONFIG: Final = {
    "namespaces": [
        {
            "name": "secondary",
            "queues": [
                {"name": name, "lock_duration": f"PT{LOCK_SECONDS:g}S", "max_delivery_count": 2**31 - 1}
                for name in QUEUES
            ],
        }
    ]
}


def session_of(message_id: str) -> str:
    return SESSION_IDS[int(message_id.rsplit("-", 1)[1]) % len(SESSION_IDS)]


def body_of(message_id: str) -> bytes:
    return f"{message_id} was here. ".encode() * 8
