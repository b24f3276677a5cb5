"""Run the samples of azure-servicebus with a client and with a pair, and compare.

`python -m tests.sdk.samples [--sdist FILE] [--workers 2] [NAME …]`

The samples are in the source archive of the SDK; without `--sdist` pip downloads it. The only change to their text: the
call that makes a client is `new_client(…)`, which makes a client or a pair. Each run has namespaces of its own. A run
passes if it ends with 0 and prints no error. Prints a table. Ends with 1 if a sample that is not in DIFFERENT passes
with the client only, and if a sample in DIFFERENT passes with both.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import azure.servicebus
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from twinbus.testing import LocalNamespaces

SECONDS = 400
ENTITIES = {
    "name": "primary",
    "queues": [{"name": "orders"}, {"name": "grouped", "requires_session": True}],
    "topics": [{"name": "prices", "subscriptions": [{"name": "all"}, {"name": "sessions", "requires_session": True}]}],
}
ENVIRONMENT = {
    "SERVICEBUS_QUEUE_NAME": "orders",
    "SERVICEBUS_SESSION_QUEUE_NAME": "grouped",
    "SERVICEBUS_SESSION_ID": "table-7",
    "SERVICEBUS_TOPIC_NAME": "prices",
    "SERVICEBUS_SUBSCRIPTION_NAME": "all",
    "SERVICEBUS_FULLY_QUALIFIED_NAMESPACE": "localhost",
    "SERVICEBUS_ENDPOINT": "localhost",
    "SERVICEBUS_SAS_POLICY": "RootManageSharedAccessKey",
    "SERVICEBUS_SAS_KEY": "SAS_KEY_VALUE",
}
# What a sample shows instead of sending and receiving.
NOT_RUN = {
    "mgmt_": "uses no client",
    "client_identity_authentication": "needs Entra",
    "connection_to_custom_endpoint_address": "needs an endpoint of its own",
    "proxy": "needs a proxy",
}
# Samples that pass with the client only, by intention.
DIFFERENT = {"sample_code_servicebus": "opens senders after their client was closed"}
PREAMBLE = """
import os

def new_client(*_, conn_str=None, fully_qualified_namespace=None, credential=None, **keywords):
    primary, secondary = os.environ["SERVICEBUS_CONNECTION_STR"], os.environ["SECONDARY"]
    if os.environ["USER_OF"] == "client":
        return ServiceBusClient.from_connection_string(primary, **keywords)
    import twinbus{aio}
    options = twinbus.SendAvailabilityOptions(backlog_queue_count=2)
    return twinbus{aio}.pair_connection_strings(primary, secondary, options=options, **keywords)

def new_admin(*_, **keywords):
    return ServiceBusAdministrationClient.from_connection_string(
        os.environ["SERVICEBUS_CONNECTION_STR"], connection_verify=os.environ["AUTHORITY"], **keywords
    )

"""


class Outcome(NamedTuple):
    passed: bool
    last_line: str


def migrated(text: str, *, aio: bool) -> str:
    """Return a sample whose clients are made by `new_client`."""
    text = re.sub(r"\bServiceBusClient(\.from_connection_string)?\(", "new_client(", text)
    text = re.sub(r"\bServiceBusAdministrationClient(\.from_connection_string)?\(", "new_admin(", text)
    return PREAMBLE.replace("{aio}", ".aio" if aio else "") + text


def run(sample: Path, user: str) -> Outcome:
    with LocalNamespaces("primary", "secondary", memory=True, config={"namespaces": [ENTITIES]}) as local:
        primary = local["primary"]
        fill(primary.connection_string)
        environment = ENVIRONMENT | {
            "SERVICEBUS_CONNECTION_STR": primary.connection_string,
            "SECONDARY": local["secondary"].connection_string,
            "AUTHORITY": str(primary.ca),
            "USER_OF": user,
        }
        if sample.stem.startswith("list_sessions"):
            environment["SERVICEBUS_SUBSCRIPTION_NAME"] = "sessions"
        text = migrated(sample.read_text(encoding="utf-8"), aio=sample.stem.endswith("_async"))
        try:
            done = subprocess.run(
                [sys.executable, "-c", text],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(False, f"not over in {SECONDS} s")
    said = (done.stdout + done.stderr).strip()
    wrong = done.returncode or re.search(r"Traceback|\bfailed:|Exception", said)
    return Outcome(not wrong, said.splitlines()[-1][:100] if said else "")


def fill(text: str) -> None:
    """Put a few messages into every entity: many samples only receive."""
    with ServiceBusClient.from_connection_string(text) as client:
        for made, session in (("orders", None), ("grouped", "table-7")):
            with client.get_queue_sender(made) as sender:
                sender.send_messages([ServiceBusMessage(f"order {n}", session_id=session) for n in range(12)])
        with client.get_topic_sender("prices") as sender:
            sender.send_messages([ServiceBusMessage(f"price {n}", session_id="table-7") for n in range(12)])


def extract(sdist: Path | None, folder: Path) -> list[Path]:
    """Return the samples of the source archive, which pip downloads if none is given."""
    if sdist is None:
        wanted = f"azure-servicebus=={azure.servicebus.__version__}"
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
        subprocess.run([*pip, wanted], check=True)
        sdist = next(folder.glob("azure_servicebus-*.tar.gz"))
    shutil.unpack_archive(sdist, folder)
    return sorted(folder.glob("*/samples/*/*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sdk.samples", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--sdist", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        samples = [one for one in extract(arguments.sdist, Path(folder)) if arguments.names in ([], [one.stem])]
        skipped = {one: why for one in samples for begin, why in NOT_RUN.items() if one.stem.startswith(begin)}
        running = {
            (one, user): pool.submit(run, one, user)
            for one in samples
            if one not in skipped
            for user in ("client", "pair")
        }
        unexpected = 0
        for one in samples:
            if one in skipped:
                print(f"{one.stem:55} not run: {skipped[one]}", flush=True)
                continue
            client, pair = (running[one, user].result() for user in ("client", "pair"))
            words = [("passes" if found.passed else f"FAILS ({found.last_line})") for found in (client, pair)]
            why = DIFFERENT.get(one.stem.removesuffix("_async"))
            unexpected += (client.passed and not pair.passed) != (why is not None)
            note = "" if why is None else f" (expected to differ: {why})"
            print(f"{one.stem:55} client {words[0]}, pair {words[1]}{note}", flush=True)
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
