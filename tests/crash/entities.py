"""The queues and the topic of the load: the configuration of the server, and the oracle for them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.crash.oracle import Oracle

PLAIN, DELETED, SCHEDULED, SESSIONS, UNIQUE, TOPIC = "plain", "deleted", "scheduled", "sessions", "unique", "topic"
COMPLETING, DELETING, BURYING = (f"{TOPIC}/Subscriptions/{name}" for name in ("completing", "deleting", "burying"))
SESSION_IDS = tuple(f"session {number}" for number in range(5))
LONG = "PT5M"  # no lock ends by itself
# All subscriptions receive every message: one through a filter, one through an action, one by default.
RULES = {
    COMPLETING: [{"name": "by its id", "sql": "sys.MessageId IS NOT NULL AND NOT EXISTS(nothing)"}],
    DELETING: [],
    BURYING: [{"name": "changed", "action": "SET changed = sys.SequenceNumber"}],
}
CONFIG = {
    "namespaces": [
        {
            "name": "primary",
            "queues": [
                {"name": PLAIN, "lock_duration": LONG, "max_delivery_count": 100_000},
                {"name": DELETED},
                {"name": SCHEDULED, "lock_duration": LONG},
                {"name": SESSIONS, "lock_duration": LONG, "requires_session": True, "max_delivery_count": 100_000},
                {
                    "name": UNIQUE,
                    "lock_duration": LONG,
                    "requires_duplicate_detection": True,
                    "duplicate_detection_history_time_window": "P1D",
                },
            ],
            "topics": [
                {
                    "name": TOPIC,
                    "subscriptions": [
                        {"name": path.rsplit("/", 1)[1], "lock_duration": LONG, "rules": rules}
                        for path, rules in RULES.items()
                    ],
                }
            ],
        }
    ]
}


def new_oracle() -> Oracle:
    routes: dict[str, Sequence[str]] = {name: (name,) for name in (PLAIN, DELETED, SCHEDULED, SESSIONS, UNIQUE)}
    routes[TOPIC] = (COMPLETING, DELETING, BURYING)
    return Oracle(routes, deletes=(DELETED, DELETING), detects_duplicates=(UNIQUE,))
