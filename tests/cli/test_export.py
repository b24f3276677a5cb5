"""`twinbus export`: a namespace can be served from the exported file, and its export is the same file again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .running import Serving, run, serving, serving_config

CONFIG = """
[[namespaces]]
name = "one"
port = 0
[[namespaces.queues]]
name = "first"
forward_to = "last"
max_delivery_count = 3
[[namespaces.queues]]
name = "last"
requires_duplicate_detection = true
status = "SendDisabled"
[[namespaces.queues.authorization_rules]]
name = "sends"
claims = ["Send"]
primary_key = "secret-of-its-own"
[[namespaces.topics]]
name = "news"
[[namespaces.topics.subscriptions]]
name = "all"
forward_dead_lettered_messages_to = "last"
[[namespaces.topics.subscriptions]]
name = "some"
lock_duration = "PT30S"
[[namespaces.topics.subscriptions.rules]]
name = "by text"
sql = "colour = @wanted"
action = "SET seen = 1"
[namespaces.topics.subscriptions.rules.parameters]
"@wanted" = "red"
[[namespaces.topics.subscriptions.rules]]
name = "by label"
[namespaces.topics.subscriptions.rules.correlation]
label = "x"
[namespaces.topics.subscriptions.rules.correlation.properties]
size = 5
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_config(tmp_path_factory.mktemp("export"), CONFIG) as server:
        yield server


def connection(server: Serving) -> str:
    return str(server.namespaces["one"]["connection_string"])


@pytest.mark.thorough
def test_what_is_exported_is_told_and_what_is_not_is_named(server: Serving) -> None:
    done = run("export", "-c", connection(server))
    assert done.returncode == 0, done.stderr
    assert "secret-of-its-own" not in done.stdout + done.stderr
    (namespace,) = json.loads(done.stdout)["UserConfig"]["Namespaces"]
    first, last = namespace["Queues"]
    assert first == {
        "Name": "first",
        "Properties": {
            "DeadLetteringOnMessageExpiration": False,
            "DefaultMessageTimeToLive": "P10675199DT2H48M5.4775807S",
            "DuplicateDetectionHistoryTimeWindow": "PT1M",
            "ForwardDeadLetteredMessagesTo": "",
            "ForwardTo": "last",
            "LockDuration": "PT1M",
            "MaxDeliveryCount": 3,
            "RequiresDuplicateDetection": False,
            "RequiresSession": False,
        },
    }
    assert last["Properties"]["Status"] == "SendDisabled"
    (news,) = namespace["Topics"]
    every, some = news["Subscriptions"]
    assert every["Rules"] == [
        {"Name": "$Default", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": "1=1"}}}
    ]
    assert some["Rules"][1]["Properties"]["CorrelationFilter"] == {"Label": "x", "Properties": {"size": 5}}
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["left out"] * 3
    assert "authorization rules" in done.stderr
    assert "parameters of its filter" in done.stderr


def test_an_export_is_served_again_and_exports_the_same(server: Serving, tmp_path: Path) -> None:
    file = tmp_path / "Config.json"
    assert run("export", "-c", connection(server), "--output", str(file)).returncode == 0
    # The format has no parameters of a rule, so the rule has a constant here.
    file.write_text(file.read_text().replace("@wanted", "'red'"))
    with serving("--json", "--memory", "--config", str(file), "--namespace", "one=0") as again:
        done = run("export", "-c", connection(again))
    assert json.loads(done.stdout) == json.loads(file.read_text())
    assert done.stderr == ""


def test_a_wrong_key_and_a_wrong_place_are_told(server: Serving, tmp_path: Path) -> None:
    wrong = connection(server).replace("SharedAccessKey=", "SharedAccessKey=x")
    refused = run("export", "-c", wrong)
    assert refused.returncode == 1
    assert "Manage claim" in refused.stderr
    missing = run("export", "-c", connection(server), "-o", str(tmp_path / "no" / "file"))
    assert missing.returncode == 1
    assert "cannot be written" in missing.stderr
