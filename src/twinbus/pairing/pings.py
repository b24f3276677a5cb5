"""What a ping is (G1). When one is sent is the failover machine's."""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import uuid4

from azure.servicebus import ServiceBusMessage

PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"
PING_TIME_TO_LIVE: Final = timedelta(seconds=1)


def ping_message() -> ServiceBusMessage:
    """Empty, short-lived, and with a session id, so that it works on session entities."""
    return ServiceBusMessage(
        None, content_type=PING_CONTENT_TYPE, time_to_live=PING_TIME_TO_LIVE, session_id=str(uuid4())
    )
