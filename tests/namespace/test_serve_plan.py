"""The plan of `twinbus serve`, from its options and a configuration file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.entra import Issuer
from twinbus.errors import OperatorError
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.serve_plan import DEFAULT_DATA, ServePlan, make_serve_plan


def plan(
    *namespaces: str,
    data: Path | None = None,
    memory: bool = False,
    host: str = "127.0.0.1",
    config: Path | None = None,
    ledger: Path | None = None,
    host_names: Sequence[str] = (),
    queues: Sequence[str] = (),
    topics: Sequence[str] = (),
) -> ServePlan:
    return make_serve_plan(
        data=data,
        memory=memory,
        namespaces=namespaces,
        host=host,
        config=config,
        ledger=ledger,
        host_names=host_names,
        queues=queues,
        topics=topics,
    )


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (None, {"audiences": ["https://a.example"]}, "--audience and --issuer need --jwks"),
        (None, {"issuers": ["https://a.example"]}, "--audience and --issuer need --jwks"),
        ("", {}, "cannot be used: it is not JSON"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', {}, "cannot be used: key 1 is a shared key"),
        (b"\xff", {}, "cannot be read"),
    ],
)
def test_n6_a_key_set_that_cannot_be_used_is_named(
    tmp_path: Path, content: str | bytes | None, options: dict[str, list[str]], said: str
) -> None:
    file = tmp_path / "jwks.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    jwks = None if content is None else file
    with pytest.raises(OperatorError, match=said) as refused:
        make_serve_plan(
            data=None,
            memory=True,
            namespaces=(),
            host="127.0.0.1",
            config=None,
            jwks=jwks,
            **options,  # type: ignore[arg-type]  # by name
        )
    assert "c2VjcmV0" not in str(refused.value)


def test_n6_the_audience_is_that_of_service_bus_unless_another_is_given(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps(Issuer().key_set))
    own = {"data": None, "memory": True, "namespaces": (), "host": "127.0.0.1", "config": None, "jwks": file}
    for given, audiences in (
        ((), ("https://servicebus.azure.net",)),
        (("https://a", "https://b"), ("https://a", "https://b")),
    ):
        planned = make_serve_plan(**own, audiences=given)  # type: ignore[arg-type]  # by name
        assert planned.identity is not None
        assert planned.identity.audiences == audiences


def entities(planned: ServePlan) -> dict[str, list[str]]:
    return {namespace.name: [entity.path for entity in namespace.entities] for namespace in planned.namespaces}


def ports(planned: ServePlan) -> dict[str, int | None]:
    return {namespace.name: namespace.port for namespace in planned.namespaces}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    value: dict[str, Any] = {"namespaces": [{"name": "one"}, {"name": "two", "port": 7000}, {"name": "three"}]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(value))
    return path


def test_without_options_it_is_a_primary_and_a_secondary_in_the_default_directory() -> None:
    planned = plan()
    assert ports(planned) == {"primary": 5672, "secondary": 5673}
    assert planned.data == DEFAULT_DATA


def test_memory_means_no_data() -> None:
    assert plan(memory=True).data is None


def test_named_namespaces_replace_the_defaults() -> None:
    assert ports(plan("alone=0")) == {"alone": 0}


def test_a_file_replaces_the_defaults_and_ports_follow_its_order(file: Path) -> None:
    assert ports(plan(config=file)) == {"one": 5672, "two": 7000, "three": 5674}


def test_an_option_overrides_the_port_of_the_file_and_may_add_a_namespace(file: Path) -> None:
    assert ports(plan("two=0", "four=7004", config=file)) == {"one": 5672, "two": 0, "three": 5674, "four": 7004}


@pytest.mark.parametrize(
    ("namespace", "said"),
    [
        ("primary", "'' is not a port"),
        ("primary=", "'' is not a port"),
        ("primary=http", "'http' is not a port"),
        ("primary=70000", "'70000' is not a port"),
        ("=5672", "'' is not a name of a namespace"),
        ("../x=5672", "'../x' is not a name of a namespace"),
    ],
)
def test_an_invalid_namespace_option_is_refused_with_an_example(namespace: str, said: str) -> None:
    with pytest.raises(OperatorError) as refused:
        plan(namespace)
    assert said in refused.value.text
    assert "NAME=PORT" in refused.value.hint


def test_one_port_for_two_namespaces_is_refused_but_free_ones_may_be_many() -> None:
    with pytest.raises(OperatorError, match="Port 6000 is given to several namespaces: a, b"):
        plan("a=6000", "b=6000")
    assert ports(plan("a=0", "b=0")) == {"a": 0, "b": 0}


def test_data_and_memory_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="exclude each other"):
        plan(data=tmp_path, memory=True)


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xff\xfe", "cannot be read"), (b"{}", "cannot be used:\n  namespaces: there is none")]
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(OperatorError) as refused:
        plan(config=path)
    assert str(path) in refused.value.text
    assert said in refused.value.text


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"nowhere\.toml cannot be read"):
        plan(config=tmp_path / "nowhere.toml")


def test_n5_the_file_gives_one_namespace_a_ledger_and_the_option_all_of_them(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[[namespaces]]\nname = "one"\nledger = "books"\n[[namespaces]]\nname = "two"\n')
    assert [found.ledger for found in plan(config=config).namespaces] == ["books", None]
    assert [found.ledger for found in plan(config=config, ledger=Path("all")).namespaces] == ["all", "all"]


def test_x3_names_of_the_option_are_added_to_those_of_the_file(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"namespaces": [{"name": "one", "host_names": ["a", "b:1"]}, {"name": "two"}]}))
    planned = plan(config=config, host_names=["c", "a"])
    assert {found.name: found.host_names for found in planned.namespaces} == {
        "one": ("c", "a", "b:1"),
        "two": ("c", "a"),
    }
    assert [found.host_names for found in plan(config=config).namespaces] == [("a", "b:1"), ()]


@pytest.mark.parametrize("name", ["", "http://bus.example", "bus.example/x", "a b", "bus:99999"])
def test_x3_an_invalid_name_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(OperatorError) as refused:
        plan(host_names=[name])
    assert repr(name) in refused.value.text
    assert "NAME:PORT" in refused.value.hint


# --- entities named on the command line ------------------------------------------------------------------------------


def test_n1_queues_and_topics_belong_to_the_first_namespace_unless_another_is_named() -> None:
    planned = plan(queues=["orders", "a/b", "secondary:other"], topics=["news", "events/audit", "events/all"])
    assert entities(planned) == {
        "primary": [
            "orders",
            "a/b",
            "news",
            "events",
            "events/Subscriptions/audit",
            "events/Subscriptions/all",
        ],
        "secondary": ["other"],
    }


def test_n1_a_topic_may_have_slashes_where_its_subscription_is_named() -> None:
    planned = plan("mine=0", topics=["a/b/c", "d/e/Subscriptions/f"])
    assert entities(planned) == {"mine": ["a/b", "a/b/Subscriptions/c", "d/e", "d/e/Subscriptions/f"]}


def test_n1_entities_of_the_command_line_are_added_to_those_of_the_file_which_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[[namespaces]]\nname = "mine"\n[[namespaces.queues]]\nname = "orders"\nrequires_session = true\n'
        '[[namespaces.topics]]\nname = "events"\n'
    )
    planned = plan(config=file, queues=["Orders", "bills"], topics=["EVENTS/audit"])
    found = planned.namespaces[0].entities
    assert [one.path for one in found] == ["orders", "events", "bills", "EVENTS/Subscriptions/audit"]
    assert isinstance(found[0], QueueDescription)
    assert found[0].requires_session


@pytest.mark.parametrize(
    ("queues", "topics", "said"),
    [
        (["or ders"], [], "--queue or ders: 'or ders' contains character(s) that are not allowed"),
        ([""], [], "--queue : The name of an entity cannot be empty"),
        (["orders/"], [], "empty segment"),
        (["x" * 261], [], "has 261 characters"),
        (["elsewhere:orders"], [], "--queue elsewhere:orders: there is no namespace 'elsewhere'"),
        ([], ["events/au dit"], "--topic events/au dit: 'au dit' contains"),
        ([], ["events/"], "The name of an entity cannot be empty"),
        (["orders"], ["orders"], "--topic orders: 'orders' is both a queue and a topic"),
    ],
)
def test_n1_an_invalid_name_is_refused_before_anything_starts(queues: list[str], topics: list[str], said: str) -> None:
    with pytest.raises(OperatorError) as refused:
        plan(queues=queues, topics=topics)
    assert said in refused.value.text
    assert refused.value.hint
