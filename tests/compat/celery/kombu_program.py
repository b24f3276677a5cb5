"""A program of a kombu user. Prints what it saw as JSON. It knows nothing of Twinbus but the URL of its broker."""

import json
import sys
from typing import Any

from kombu import Connection, Consumer, Exchange, Producer, Queue

SECONDS = 20.0


def main(url: str, queue_name: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    queue = Queue(queue_name, Exchange("orders"), routing_key="order")
    with Connection(url, transport_options={"wait_time_seconds": 1, "peek_lock_seconds": 5}) as connection:
        channel = connection.channel()
        producer = Producer(channel)

        def publish(*bodies: Any) -> None:
            for body in bodies:
                producer.publish(body, exchange=queue.exchange, routing_key="order", declare=[queue])

        def one() -> Any:
            found: list[Any] = []
            with Consumer(channel, [queue], callbacks=[lambda body, message: found.append((body, message))]):
                connection.drain_events(timeout=SECONDS)
            return found[0]

        publish({"drink": "coffee", "cups": 2}, "ünï ✓", {"bytes": "x" * 100_000})
        seen["size"] = queue(channel).queue_declare(passive=True).message_count
        seen["bodies"] = []
        for _ in range(3):
            body, message = one()
            seen["bodies"].append(body)
            message.ack()
        publish("rejected", "requeued")
        for put_back in ("reject", "requeue"):
            getattr(one()[1], put_back)()
        # Both come back when their locks of 5 seconds have expired: this transport leaves them locked.
        seen["again"] = []
        for _ in range(2):
            body, message = one()
            message.ack()
            seen["again"] = sorted([*seen["again"], body])
        with Consumer(channel, [queue], no_ack=True, callbacks=[lambda body, _: seen.update(no_ack=body)]):
            publish("not acknowledged")
            connection.drain_events(timeout=SECONDS)
        publish("one", "two", "three")
        seen["purged"] = queue(channel).purge()
        seen["left"] = queue(channel).queue_declare(passive=True).message_count
        queue(channel).delete()
    return seen


print(json.dumps(main(sys.argv[1], sys.argv[2])))
