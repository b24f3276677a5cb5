"""Limits and defaults of the standard tier: the figures the service enforces, in one place.

Durations are milliseconds. `None` stands for "never" (the service's P10675199DT2H48M5.4775807S).
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
SECOND: Final = 1000
MINUTE: Final = 60 * SECOND
DAY: Final = 24 * 60 * MINUTE

MAX_MESSAGE_BYTES: Final = 256 * KIB
MAX_PROPERTY_BYTES: Final = 32 * KIB
MAX_PROPERTIES_BYTES: Final = 64 * KIB
MAX_PATH_CHARACTERS: Final = 260
MAX_SUBSCRIPTION_NAME_CHARACTERS: Final = 50
MAX_MESSAGE_ID_CHARACTERS: Final = 128
MAX_SESSION_ID_CHARACTERS: Final = 128

DEFAULT_QUEUE_MEGABYTES: Final = 1024
QUEUE_MEGABYTES: Final = (1024, 2048, 3072, 4096, 5120)

DEFAULT_LOCK: Final = 60 * SECOND
MIN_LOCK: Final = 5 * SECOND
MAX_LOCK: Final = 5 * MINUTE

DEFAULT_MAX_DELIVERY_COUNT: Final = 10
MAX_DELIVERY_COUNT: Final = 2**31 - 1
MAX_HOPS: Final = 4
MAX_TRANSACTION_MESSAGES: Final = 100
TRANSACTION_TIMEOUT: Final = 2 * MINUTE
MIN_IDLE_DELETE: Final = 5 * MINUTE
MIN_TTL: Final = 1 * SECOND

DEFAULT_DUPLICATE_WINDOW: Final = 1 * MINUTE
MIN_DUPLICATE_WINDOW: Final = 20 * SECOND
MAX_DUPLICATE_WINDOW: Final = 7 * DAY

MAX_SESSION_STATE_BYTES: Final = 256 * KIB
