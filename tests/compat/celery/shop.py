"""A small Celery application. Its tasks write what they did to a file, which no part of Twinbus reads or writes.

A line of the record has the task, its number, what happened (`begun` or `done`) and Celery's id of the task.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery

import twinbus.kombu  # noqa: F401 - for the scheme twinbus://

RECORD = Path(os.environ["SHOP_RECORD"])
WORK = float(os.environ.get("SHOP_WORK", "0"))
"""Seconds that a task takes: a worker that is killed is then at a task."""

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
app.conf.update(
    broker_transport_options={
        # The transport waits so long at an empty queue before it looks at the next one, and for a link to open.
        "wait_time_seconds": 3,
        "polling_interval": 0.1,
        "peek_lock_seconds": int(os.environ.get("SHOP_LOCK", "60")),
    },
    task_ignore_result=True,
    # A worker that is killed must not lose the task that it works on.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_routes={"shop.brew": {"queue": "brewing"}, "shop.serve": {"queue": "serving"}},
    worker_prefetch_multiplier=1,
)


def record(task: Any, number: int, event: str) -> None:
    """Append a line in one write: several processes write to this file."""
    with RECORD.open("ab", buffering=0) as file:
        file.write(f"{task.__name__} {number} {event} {task.request.id}\n".encode())


@app.task(bind=True)
def brew(self: Any, number: int) -> None:
    """Brew, and let another task serve: the worker itself publishes."""
    record(self, number, "begun")
    time.sleep(WORK)
    serve.delay(number)
    record(self, number, "done")


@app.task(bind=True)
def serve(self: Any, number: int) -> None:
    record(self, number, "begun")
    time.sleep(WORK)
    record(self, number, "done")


def publish() -> None:
    """Publish the tasks that each line of the input names, first and last. Print the line when all are published."""
    for line in sys.stdin:
        first, last = map(int, line.split())
        for number in range(first, last):
            brew.delay(number)
        print(line, end="", flush=True)


if __name__ == "__main__":
    publish()
