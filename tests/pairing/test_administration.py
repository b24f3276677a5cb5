"""Provisioning against real namespaces, over the SDK's administration clients, sync and aio."""

import asyncio
import itertools
import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from azure.core.exceptions import AzureError
from azure.servicebus import ServiceBusClient
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.management import ServiceBusAdministrationClient

from tests import tinyproxy
from twinbus.backlog import FailureKind, backlog_queue_paths
from twinbus.connect import ConnectionString, HttpProxy, NetworkOptions
from twinbus.errors import OperatorError
from twinbus.namespace import AuthorizationRule, Claim
from twinbus.pairing import administration as administration_module
from twinbus.pairing import local_authority
from twinbus.pairing.administration import Administration, AioAdministration, request_keywords
from twinbus.pairing.local_authority import LocalAuthority, fetch_authority, is_loopback, split_namespace
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.provisioning import Provisioned, ProvisioningError, provisioning_steps
from twinbus.pairing.threaded_administration import LoopCredential
from twinbus.testing import LocalEndpoint, LocalNamespaces

RULES = (
    AuthorizationRule("all", "key-of-all", "", frozenset({Claim.MANAGE, Claim.SEND, Claim.LISTEN})),
    AuthorizationRule("app", "key-of-app", "", frozenset({Claim.SEND, Claim.LISTEN})),
)
NUMBERS = itertools.count()
OPTIONS = SendAvailabilityOptions()
NOBODY = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true;"


@pytest.fixture(scope="module")
def secondary() -> Iterator[LocalEndpoint]:
    with LocalNamespaces("secondary", memory=True, rules=RULES) as namespaces:
        yield namespaces["secondary"]


@pytest.fixture
def paths() -> tuple[str, ...]:
    """Return the backlog queue paths of a primary that no other test uses."""
    return backlog_queue_paths(f"primary-{next(NUMBERS)}", 3)


def sync_provision(text: str, paths: tuple[str, ...], options: SendAvailabilityOptions = OPTIONS) -> Provisioned:
    with ServiceBusClient.from_connection_string(text) as client, Administration.of(client) as administration:
        return administration.provision(paths, options)


def aio_provision(text: str, paths: tuple[str, ...], options: SendAvailabilityOptions = OPTIONS) -> Provisioned:
    async def provision() -> Provisioned:
        async with (
            AioServiceBusClient.from_connection_string(text) as client,
            AioAdministration.of(client) as administration,
        ):
            return await administration.provision(paths, options)

    return asyncio.run(provision())


def threaded_provision(text: str, paths: tuple[str, ...], options: SendAvailabilityOptions = OPTIONS) -> Provisioned:
    """As where aiohttp is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(administration_module, "is_installed", lambda module: module != "aiohttp")
        return aio_provision(text, paths, options)


Provision = Callable[..., Provisioned]
both = pytest.mark.parametrize(
    "provision", [sync_provision, aio_provision, threaded_provision], ids=["sync", "aio", "aio-without-aiohttp"]
)


@both
def test_p1_p5_missing_queues_are_there_afterwards_as_the_clause_says(
    secondary: LocalEndpoint, paths: tuple[str, ...], provision: Provision
) -> None:
    assert provision(secondary.connection_string, paths) == Provisioned(found=paths, created=paths)
    with Administration.from_connection_string(secondary.connection_string) as administration:
        made = administration.request(administration.client.get_queue, paths[0])
        plain = administration.request(administration.client.create_queue, f"{paths[0]}-plain")
    longest = timedelta(days=10675199, hours=2, minutes=48, seconds=5, microseconds=477581)
    ours = {
        "max_size_in_megabytes": 5120,
        "max_delivery_count": 2147483647,
        "default_message_time_to_live": longest,
        "auto_delete_on_idle": longest,
        "lock_duration": timedelta(minutes=1),
        "dead_lettering_on_message_expiration": True,
        "enable_batched_operations": True,
        "name": paths[0],
    }
    defaults = dict(plain.items())
    assert {name: value for name, value in made.items() if value != defaults[name] or name in ours} == ours


@both
def test_p6_an_existing_queue_is_used_as_it_is_and_extras_are_left_alone(
    secondary: LocalEndpoint, paths: tuple[str, ...], provision: Provision
) -> None:
    extra = backlog_queue_paths(paths[0].partition("/")[0], 9)[8]
    with Administration.from_connection_string(secondary.connection_string) as administration:
        administration.request(administration.client.create_queue, paths[1], max_delivery_count=7)
        administration.request(administration.client.create_queue, extra)
        done = provision(secondary.connection_string, paths)
        assert done == Provisioned(found=paths, created=(paths[0], paths[2]))
        assert administration.request(administration.client.get_queue, paths[1]).max_delivery_count == 7
        assert administration.request(administration.client.get_queue, extra).name == extra


@both
def test_p7_a_key_without_the_manage_right_is_told_at_once(
    secondary: LocalEndpoint, paths: tuple[str, ...], provision: Provision
) -> None:
    weaker = secondary.connection_string.replace("Name=all", "Name=app").replace("key-of-all", "key-of-app")
    with pytest.raises(ProvisioningError) as raised:
        provision(weaker, paths)
    assert {(cause.queue, cause.kind) for cause in raised.value.causes} == {
        (path, FailureKind.UNAUTHORIZED) for path in paths
    }
    assert "twinbus provision" in raised.value.hint


def test_p7_a_queue_that_fails_drops_out_and_the_others_stay(secondary: LocalEndpoint, paths: tuple[str, ...]) -> None:
    secondary.faults.set("internal-error", entity=paths[1], points=("http",))
    try:
        with Administration.from_connection_string(secondary.connection_string) as administration:
            paused: list[float] = []
            done = administration.run(provisioning_steps(paths), pause=paused.append)
    finally:
        secondary.faults.clear()
    assert done.found == (paths[0], paths[2])
    assert [(cause.queue, cause.kind) for cause in done.failed] == [(paths[1], FailureKind.INTERNAL)]
    assert paused == [1.0, 3.0]


def test_p7_a_failure_that_passes_is_got_over(secondary: LocalEndpoint, paths: tuple[str, ...]) -> None:
    secondary.faults.set("server-busy", entity=paths[1], points=("http",), count=2)
    with Administration.from_connection_string(secondary.connection_string) as administration:
        done = administration.run(provisioning_steps(paths), pause=lambda _: None)
    assert done.found == paths


@both
def test_p8_assume_contacts_nobody(paths: tuple[str, ...], provision: Provision) -> None:
    done = provision(NOBODY, paths, SendAvailabilityOptions(provision="assume"))
    assert done == Provisioned(found=paths)


@both
def test_p8_an_application_starts_while_the_secondary_is_away(paths: tuple[str, ...], provision: Provision) -> None:
    done = provision(NOBODY, paths, SendAvailabilityOptions(on_secondary_down="background"))
    assert [(cause.queue, cause.kind) for cause in done.failed] == [(p, FailureKind.CONNECTION_LOST) for p in paths]


@pytest.mark.thorough
def test_p8_and_finds_it_when_it_is_back(paths: tuple[str, ...]) -> None:
    with LocalNamespaces("late", memory=True) as namespaces:
        text = namespaces["late"].connection_string
        with Administration.from_connection_string(text, seconds=5) as administration:
            namespaces.kill()
            assert administration.provision_again(paths).found == ()
            namespaces.start()
            assert administration.provision_again(paths) == Provisioned(found=paths, created=paths)
            # In memory, a namespace started anew has another authority: the one trusted before is forgotten.
            namespaces.restart()
            assert administration.provision_again(paths) == Provisioned(found=paths, created=paths)


@pytest.mark.parametrize("aio", [False, True], ids=["sync", "aio"])
def test_y1_a_namespace_that_offered_no_certificate_while_it_started_is_asked_again(
    secondary: LocalEndpoint, paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, aio: bool
) -> None:
    """A syphon that starts while the secondary starts must not take this for a certificate that nobody trusts."""
    fetch, fetched = fetch_authority, list[int]()

    def not_yet(host: str, port: int, seconds: float) -> str | None:
        fetched.append(port)
        return None if len(fetched) == 1 else fetch(host, port, seconds)

    monkeypatch.setattr(local_authority, "fetch_authority", not_yet)

    async def ask() -> list[str]:
        async with AioAdministration.from_connection_string(secondary.connection_string) as administration:
            return [str((await administration.request(administration.client.create_queue, paths[0])).name)]

    if aio:
        assert asyncio.run(ask()) == [paths[0]]
    else:
        with Administration.from_connection_string(secondary.connection_string) as administration:
            assert administration.request(administration.client.create_queue, paths[0]).name == paths[0]
    assert len(fetched) == 2


@pytest.mark.parametrize("aio", [False, True, "threads"], ids=["sync", "aio", "aio-without-aiohttp"])
def test_a_secondary_that_says_nothing_costs_one_timeout(
    paths: tuple[str, ...], aio: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if aio == "threads":
        monkeypatch.setattr(administration_module, "is_installed", lambda _: False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = NOBODY.replace(":1;", f":{port};")

        async def ask() -> Provisioned:
            async with AioAdministration.from_connection_string(text, seconds=0.4) as administration:
                return await administration.provision_again(paths)

        if aio:
            done = asyncio.run(ask())
        else:
            with Administration.from_connection_string(text, seconds=0.4) as administration:
                done = administration.provision_again(paths)
    assert {cause.kind for cause in done.failed} == {FailureKind.TIMEOUT}


def test_clients_with_a_named_key_serve_and_a_signature_is_refused_with_a_hint(
    secondary: LocalEndpoint, paths: tuple[str, ...]
) -> None:
    found = ConnectionString.parse(secondary.connection_string)
    named = ServiceBusClient(found.authority, AzureNamedKeyCredential(found.key_name, found.key), use_tls=False)
    with named, Administration.of(named) as administration:
        assert administration.provision(paths, OPTIONS).found == paths
    signed = ServiceBusClient(found.authority, AzureSasCredential("SharedAccessSignature sr=…"), use_tls=False)
    with signed, Administration.of(signed) as administration:
        assert administration.provision(paths, SendAvailabilityOptions(provision="assume")).found == paths
        with pytest.raises(OperatorError, match="secondary_admin"):
            administration.provision(paths, OPTIONS)


def test_an_admin_client_that_was_given_is_used_and_not_closed(
    secondary: LocalEndpoint, paths: tuple[str, ...]
) -> None:
    with ServiceBusAdministrationClient.from_connection_string(secondary.connection_string) as given:
        client = ServiceBusClient.from_connection_string(NOBODY)
        for _ in range(2):
            with Administration.of(client, given) as administration:
                assert administration.provision(paths, OPTIONS).found == paths
        client.close()


# --- whom it trusts --------------------------------------------------------------------------------------------------


def test_a_local_namespace_offers_the_authority_its_certificate_is_signed_by(secondary: LocalEndpoint) -> None:
    assert fetch_authority("localhost", secondary.port, 5) == secondary.ca.read_text()


def test_nothing_is_trusted_that_is_no_certificate_or_not_offered() -> None:
    assert fetch_authority("localhost", 1, 1) is None


@pytest.mark.parametrize(
    ("namespace", "asked"),
    [
        ("localhost:5672", True),
        ("LOCALHOST", True),
        ("127.0.0.9:5672", True),
        ("[::1]:5672", True),
        ("contoso.servicebus.windows.net", False),
        ("localhost.contoso.net:5672", False),
        ("10.0.0.1:5672", False),
        ("[fe80::1]:5672", False),
    ],
)
def test_only_a_namespace_on_this_machine_is_asked_for_its_authority(namespace: str, asked: bool) -> None:
    authority = LocalAuthority(namespace, 1)
    assert authority.is_local is asked
    assert asked or authority.file() is None


def test_the_port_of_a_namespace_is_told_apart_from_an_address() -> None:
    assert split_namespace("localhost:5672") == ("localhost", 5672)
    assert split_namespace("contoso.servicebus.windows.net") == ("contoso.servicebus.windows.net", 443)
    assert split_namespace("[::1]:5672") == ("::1", 5672)
    assert is_loopback("::1")


def test_a_certificate_of_a_stranger_is_still_refused(
    secondary: LocalEndpoint, paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_authority, "is_loopback", lambda _: False)
    with Administration.from_connection_string(secondary.connection_string) as administration:
        done = administration.provision_again(paths)
    assert {cause.kind for cause in done.failed} == {FailureKind.CERTIFICATE}


def test_without_aiohttp_tokens_come_from_the_asyncio_credential_in_its_own_loop() -> None:
    """The embedded server takes no bearer tokens, so this calls the credential as the SDK's client calls it."""
    asked: list[tuple[str, ...]] = []

    class Credential:
        async def get_token(self, *scopes: str, **_: object) -> AccessToken:
            asyncio.get_running_loop()
            asked.append(scopes)
            return AccessToken("token", 1)

    async def ask() -> AccessToken:
        credential = LoopCredential(Credential())
        credential.loop = asyncio.get_running_loop()
        token: AccessToken = await asyncio.to_thread(credential.get_token, "scope")
        return token

    assert asyncio.run(ask()).token == "token"
    assert asked == [("scope",)]


def test_without_aiohttp_queues_are_listed(
    secondary: LocalEndpoint, paths: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration_module, "is_installed", lambda _: False)

    async def ask() -> set[str]:
        async with AioAdministration.from_connection_string(secondary.connection_string) as administration:
            await administration.provision(paths, OPTIONS)
            trusted = request_keywords(5.0, str(secondary.ca))
            return {str(queue.name) async for queue in administration.client.list_queues(**trusted)}

    assert set(paths) <= asyncio.run(ask())


async def aio_request(text: str, **options: Any) -> None:
    async with AioAdministration.from_connection_string(text, **options) as administration:
        await administration.request(administration.client.get_queue, "orders")


def sync_request(text: str, **options: Any) -> None:
    with Administration.from_connection_string(text, **options) as administration:
        administration.request(administration.client.get_queue, "orders")


@pytest.mark.parametrize("aio", [False, True], ids=["sync", "aio"])
def test_the_credentials_of_a_proxy_are_not_in_the_error_nor_in_its_causes(tmp_path: Path, aio: bool) -> None:
    text = "Endpoint=sb://contoso.example;SharedAccessKeyName=a;SharedAccessKey=b"
    with tinyproxy.running(tmp_path, username="twin", password="another") as proxy:
        options = NetworkOptions(http_proxy=HttpProxy.parse(proxy.url, "twin:sesame")).http_options()
        with pytest.raises(AzureError, match="Unauthorized") as refused:
            asyncio.run(aio_request(text, **options)) if aio else sync_request(text, **options)
    assert "sesame" not in "".join(traceback.format_exception(refused.value))
