"""kombu and Celery with kombu's own transport `azureservicebus://`, unchanged, against `twinbus serve --azure-names`.

kombu takes no address, port or certificate: it connects to `NAME.servicebus.windows.net` on 5671 and 443. So server and
clients run in a private machine, with the real ports, lines in /etc/hosts and the CA among those that Python trusts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import private_machine
from tests.compat.celery.workers import HERE, SECONDS, Shop
from tests.private_machine import PrivateMachine

URL = "azureservicebus://RootManageSharedAccessKey:SAS_KEY_VALUE@contoso"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateMachine]:
    with private_machine.with_contoso(tmp_path_factory.mktemp("machine")) as (machine, _):
        yield machine


@pytest.mark.thorough
def test_n1_kombu_publishes_consumes_settles_and_manages_queues(machine: PrivateMachine) -> None:
    seen = json.loads(machine.run(sys.executable, str(HERE / "kombu_program.py"), URL, "stock.orders/1"))
    assert seen == {
        "size": 3,
        "bodies": [{"drink": "coffee", "cups": 2}, "ünï ✓", {"bytes": "x" * 100_000}],
        "again": ["rejected", "requeued"],
        "no_ack": "not acknowledged",
        "purged": 3,
        "left": 0,
    }


@pytest.mark.thorough
def test_n1_a_celery_worker_runs_every_task_once(machine: PrivateMachine, tmp_path: Path) -> None:
    shop = Shop(tmp_path, URL, machine.inside([]))
    with shop.worker("-Q", "brewing,serving") as worker, shop.publisher() as publisher:
        publisher.publish(0, 5)
        shop.until(lambda: len(shop.done()) == 10, {"worker": worker}, SECONDS)
    assert shop.done() == {f"{task} {number}": 1 for task in ("brew", "serve") for number in range(5)}
