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
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests import private_machine
from tests.compat.celery.workers import HERE, SECONDS, Shop
from tests.entra import Issuer
from tests.private_machine import PrivateMachine

KEYS = Issuer()
URL = "azureservicebus://RootManageSharedAccessKey:SAS_KEY_VALUE@contoso"

PROGRAM = str(HERE / "kombu_program.py")
SEEN = {
    "size": 3,
    "bodies": [{"drink": "coffee", "cups": 2}, "ünï ✓", {"bytes": "x" * 100_000}],
    "again": ["rejected", "requeued"],
    "no_ack": "not acknowledged",
    "purged": 3,
    "left": 0,
}
SIGNED_IN = """
import os, runpy, sys
from pathlib import Path
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from tests.entra import OWNER, IssuedTokens, Issuer, TokenEndpoint
keys = Issuer()
keys.private_key = load_pem_private_key(Path(sys.argv[1]).read_bytes(), None)
program = sys.argv[2]
del sys.argv[1:3]
with TokenEndpoint(IssuedTokens(keys, OWNER)) as endpoint:
    os.environ.update(endpoint.environment)
    runpy.run_path(program, run_name="__main__")
    assert endpoint.asked
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateMachine]:
    folder = tmp_path_factory.mktemp("machine")
    (folder / "jwks.json").write_text(json.dumps(KEYS.key_set))
    with private_machine.with_contoso(folder, "--jwks", str(folder / "jwks.json")) as (machine, _):
        yield machine


@pytest.mark.thorough
def test_n1_kombu_publishes_consumes_settles_and_manages_queues(machine: PrivateMachine) -> None:
    assert json.loads(machine.run(sys.executable, PROGRAM, URL, "stock.orders/1")) == SEEN


@pytest.mark.thorough
def test_n1_n6_kombu_signs_in_with_the_identity_of_the_machine(machine: PrivateMachine, tmp_path: Path) -> None:
    """The endpoint of the identity runs in the machine too, because nothing outside of it can be reached."""
    (tmp_path / "key.pem").write_bytes(
        KEYS.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    arguments = (
        str(tmp_path / "key.pem"),
        PROGRAM,
        "azureservicebus://ManagedIdentityCredential@contoso",
        "signed.in/1",
    )
    assert json.loads(machine.run(sys.executable, "-c", SIGNED_IN, *arguments)) == SEEN


@pytest.mark.thorough
def test_n1_a_celery_worker_runs_every_task_once(machine: PrivateMachine, tmp_path: Path) -> None:
    shop = Shop(tmp_path, URL, machine.inside([]))
    with shop.worker("-Q", "brewing,serving") as worker, shop.publisher() as publisher:
        publisher.publish(0, 5)
        shop.until(lambda: len(shop.done()) == 10, {"worker": worker}, SECONDS)
    assert shop.done() == {f"{task} {number}": 1 for task in ("brew", "serve") for number in range(5)}
