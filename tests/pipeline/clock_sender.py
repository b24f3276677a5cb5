"""A program that diverts messages: `python -m tests.pipeline.clock_sender`, with its arguments as JSON on stdin.

It prints, for each message id, the time of the monotonic clock at which the message was safe. All processes of a
machine share this clock, and a wrong wall clock does not change it.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Final

from azure.servicebus import ServiceBusMessage

import twinbus

ENTITY: Final = "orders"
SHORT, LONG, NONE = "short", "long", "none"
TIMES_TO_LIVE: Final = {SHORT: timedelta(seconds=1), LONG: timedelta(minutes=5), NONE: None}
COUNT: Final = 5


def main() -> None:
    given = json.load(sys.stdin)
    options = twinbus.SendAvailabilityOptions(
        backlog_queue_count=1, primary_name=given["name"], ledger=given["ledger"], ping_interval=timedelta(minutes=30)
    )
    safe: dict[str, float] = {}
    with twinbus.pair_connection_strings(given["primary"], given["secondary"], options=options) as pair:
        pair.force_failover(ENTITY)
        with pair.get_queue_sender(ENTITY) as sender:
            for kind, ttl in TIMES_TO_LIVE.items():
                for number in range(COUNT):
                    name = f"{given['name']}/{kind}-{number}"
                    sender.send_messages(ServiceBusMessage(name, message_id=name, time_to_live=ttl))
                    safe[name] = time.monotonic()
        pair.force_restore(ENTITY)
    json.dump(safe, sys.stdout)


if __name__ == "__main__":
    main()
