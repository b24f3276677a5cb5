"""A small Celery application. Its tasks write what they did to a file, which no part of Twinbus reads or writes."""

import os
from pathlib import Path

from celery import Celery

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
app.conf.update(
    broker_transport_options={"wait_time_seconds": 1, "peek_lock_seconds": int(os.environ.get("SHOP_LOCK", "60"))},
    task_ignore_result=True,
    # A worker that is killed must not lose the task that it works on.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)
RECORD = Path(os.environ["SHOP_RECORD"])


def record(line: str) -> None:
    """Append a line in one write: several processes write to this file."""
    with RECORD.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


@app.task
def brew(number: int) -> None:
    """Note the order, and let another task serve it: the worker itself publishes."""
    serve.delay(number)
    record(f"brew {number}")


@app.task
def serve(number: int) -> None:
    record(f"serve {number}")
