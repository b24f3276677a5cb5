"""The verbs with --credential: they sign in as azure-identity does, with endpoints that the tests answer (N6, P1)."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import invoke, run
from tests.cli.syphoned import CONFIG, Backlog, ids_of
from tests.entra import OWNER, RECEIVER, SENDER, IssuedTokens, Issuer, TokenEndpoint
from twinbus.connect import named_credential
from twinbus.namespace.front import ca_path, server_context
from twinbus.testing import LocalNamespaces

KEYS = Issuer()
IDENTITY = "managed-identity"


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=CONFIG, jwks=KEYS.key_set) as found:
        yield found


@pytest.fixture(autouse=True)
def signed_out() -> Iterator[None]:
    """Each test has its own endpoint; a credential keeps the endpoint that it was made with."""
    named_credential.cache_clear()
    yield
    named_credential.cache_clear()


@pytest.fixture
def endpoint() -> Iterator[TokenEndpoint]:
    with TokenEndpoint(IssuedTokens(KEYS, OWNER)) as endpoint:
        yield endpoint


def environment(namespaces: LocalNamespaces, endpoint: TokenEndpoint, **more: str) -> dict[str, str]:
    """Return what a user sets: the hosts of the namespaces, the CA, and no key."""
    hosts = {name: f"localhost:{namespaces[name].port}" for name in ("primary", "secondary")}
    return {
        "TWINBUS_PRIMARY_CONNECTION_STRING": hosts["primary"],
        "TWINBUS_SECONDARY_CONNECTION_STRING": hosts["secondary"],
        "TWINBUS_CONNECTION_STRING": hosts["primary"],
        "TWINBUS_CA": str(namespaces["primary"].ca),
        **endpoint.environment,
        **more,
    }


def test_n6_a_verb_signs_in_with_the_identity_of_the_machine(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint
) -> None:
    chosen = environment(namespaces, endpoint)
    listed = invoke("entity", "list", "--credential", "managed-identity=the-client-id", **chosen)
    assert listed.exit_code == 0, listed.stderr
    assert "orders-1" in listed.stdout
    assert set(endpoint.asked) == {"the-client-id"}
    assert endpoint.tokens.scopes == {"https://servicebus.azure.net/"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--credential", "nobody"], "--credential: 'nobody' is not a credential: choose default, cli, environment"),
        ([], "--connection-string: localhost is a host name, which has no key"),
    ],
)
def test_n6_wrong_options_are_refused_before_anything_is_contacted(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint, options: list[str], said: str
) -> None:
    refused = invoke("entity", "list", *options, **environment(namespaces, endpoint))
    assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
    assert endpoint.asked == []


def test_n6_a_refusal_names_the_credential_and_what_to_do(namespaces: LocalNamespaces, endpoint: TokenEndpoint) -> None:
    chosen = environment(namespaces, endpoint, TWINBUS_CREDENTIAL=IDENTITY)
    endpoint.tokens.roles = (SENDER,)
    for arguments in (("entity", "list"), ("entity", "peek", "orders-1"), ("fault", "list"), ("export",)):
        refused = invoke(*arguments, **chosen)
        assert refused.exit_code == 1, arguments
        assert f"the credential '{IDENTITY}'" in refused.stderr
        assert "Azure Service Bus Data" in refused.stderr
    endpoint.refuses = True
    named_credential.cache_clear()
    for arguments in (("entity", "list"), ("entity", "peek", "orders-1"), ("fault", "list")):
        refused = invoke(*arguments, **chosen)
        assert (refused.exit_code, "refused on purpose" in refused.stderr) == (1, True), refused.stderr


def test_n6_the_settings_file_names_the_credential(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint, tmp_path: Path
) -> None:
    chosen = environment(namespaces, endpoint)
    lines = [
        "[connections]",
        f'namespace = "{chosen.pop("TWINBUS_CONNECTION_STRING")}"',
        f'ca = "{chosen.pop("TWINBUS_CA")}"',
        f'credential = "{IDENTITY}"',
    ]
    (tmp_path / "twinbus.toml").write_text("\n".join(lines))
    listed = invoke("--settings", str(tmp_path / "twinbus.toml"), "entity", "list", "--json", **chosen)
    assert listed.exit_code == 0, listed.stderr
    assert endpoint.asked


def test_n6_a_key_serves_one_namespace_and_the_credential_the_other(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint
) -> None:
    backlog = Backlog(namespaces)
    backlog.divert("one")
    names = {"TWINBUS_PRIMARY_NAME": backlog.name, "TWINBUS_CREDENTIAL": IDENTITY}
    chosen = environment(namespaces, endpoint, **names)
    chosen["TWINBUS_PRIMARY_CONNECTION_STRING"] = backlog.environment["TWINBUS_PRIMARY_CONNECTION_STRING"]
    done = invoke("syphon", "--drain", **chosen)
    assert done.exit_code == 0, done.stderr
    assert ids_of(backlog.arrived()) == ["one"]
    assert endpoint.asked


@pytest.mark.thorough
def test_n6_every_verb_that_connects_signs_in(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint, tmp_path: Path
) -> None:
    backlog = Backlog(namespaces)
    backlog.divert("dead", "alive")
    backlog.dead_letter("dead")
    names = {"TWINBUS_PRIMARY_NAME": backlog.name, "TWINBUS_CREDENTIAL": IDENTITY}
    chosen, ledger = environment(namespaces, endpoint, **names), str(tmp_path / "ledger")
    verbs: list[tuple[list[str], int]] = [
        (["provision", "--count", "2", "--state", "secondary"], 0),
        (["doctor", "--count", "2", "--no-ping", "--state", "secondary"], 3),
        (["doctor", "--count", "2"], 3),
        (["doctor", "--conformance"], 0),
        (["deadletter", "list"], 0),
        (["deadletter", "resubmit", "--all", "--yes"], 0),
        (["syphon", "--dry-run"], 0),
        (["syphon", "--drain", "--ledger", ledger], 0),
        (["syphon", "--drain", "--transport", "sdk"], 0),
        (["ledger", "audit", ledger], 0),
        (["drill", "--entity", backlog.destination, "--count", "2", "--yes"], 0),
        (["entity", "create", "signed-in", "--topic"], 0),
        (["entity", "send", backlog.destination, "x"], 0),
        (["entity", "peek", backlog.destination], 0),
        (["entity", "delete", "signed-in", "--yes"], 0),
        (["fault", "set", "delay", "--delay", "0.1", "--count", "1", "--entity", "orders-1"], 0),
        (["fault", "list"], 0),
        (["fault", "clear"], 0),
        (["export"], 0),
    ]
    for arguments, code in verbs:
        before = len(endpoint.asked)
        named_credential.cache_clear()
        done = invoke(*arguments, **chosen)
        assert done.exit_code == code, (arguments, done.stdout, done.stderr)
        assert len(endpoint.asked) > before, arguments
        assert "eyJ" not in done.stdout + done.stderr


def test_n6_a_verb_signs_in_as_the_user_of_az_login(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint, tmp_path: Path
) -> None:
    """A program in place of `az` answers as Azure's command line: first for a user, then nobody has signed in."""
    asked, answer = tmp_path / "asked", tmp_path / "answer"
    found = endpoint.tokens.get_token()
    answer.write_text(json.dumps({"accessToken": found.token, "expires_on": found.expires_on, "tokenType": "Bearer"}))
    program = tmp_path / "az"
    program.write_text(
        "#!/bin/sh\n"
        f"echo \"$@\" >> '{asked}'\n"
        f"cat '{answer}' || {{ echo \"Please run 'az login' to setup account.\" >&2; exit 1; }}\n"
    )
    program.chmod(0o700)
    chosen = environment(namespaces, endpoint, PATH=f"{tmp_path}:{os.environ['PATH']}")
    listed = invoke("entity", "list", "--credential", "cli", **chosen)
    assert listed.exit_code == 0, listed.stderr
    assert "orders-1" in listed.stdout
    assert asked.read_text() == "account get-access-token --output json --resource https://servicebus.azure.net/\n"
    assert endpoint.asked == []
    answer.unlink()
    named_credential.cache_clear()
    refused = invoke("entity", "list", "--credential", "cli", **chosen)
    assert (refused.exit_code, "az login" in refused.stderr) == (1, True), refused.stderr


@pytest.mark.thorough
def test_n6_the_environment_has_the_secret_of_an_application(namespaces: LocalNamespaces, tmp_path: Path) -> None:
    """The authority is the one that AZURE_AUTHORITY_HOST names: azure-identity asks no other."""
    with TokenEndpoint(IssuedTokens(KEYS, OWNER), server_context(tmp_path)) as authority:
        chosen = environment(namespaces, authority, REQUESTS_CA_BUNDLE=str(ca_path(tmp_path)))
        for name in ("environment", "default"):
            done = run("entity", "list", "--credential", name, **chosen)
            assert done.returncode == 0, done.stderr
            assert set(authority.asked) == {"application"}
            authority.asked.clear()
        authority.refuses = True
        refused = run("entity", "list", "--credential", "environment", **chosen)
    assert (refused.returncode, "refused on purpose" in refused.stderr) == (1, True)
    assert authority.environment["AZURE_CLIENT_SECRET"] not in refused.stderr


@pytest.mark.thorough
def test_n6_a_syphon_outlives_its_first_tokens_and_brings_everything_home(
    namespaces: LocalNamespaces, endpoint: TokenEndpoint, tmp_path: Path
) -> None:
    """The rate makes the drain longer than three tokens. The roles are those of an application, without Manage."""
    endpoint.tokens.roles, endpoint.tokens.seconds = (SENDER, RECEIVER), 3
    backlog, ids = Backlog(namespaces), [f"message-{number}" for number in range(60)]
    backlog.divert(*ids[:30])
    backlog.divert(*ids[30:], queue=1)
    names = {"TWINBUS_PRIMARY_NAME": backlog.name, "TWINBUS_CREDENTIAL": IDENTITY}
    chosen, ledger = environment(namespaces, endpoint, **names), tmp_path / "ledger"
    done = invoke("syphon", "--drain", "--rate", "6", "--ledger", str(ledger), "--json", **chosen)
    assert done.exit_code == 0, done.stderr
    assert len(endpoint.asked) >= 8, "two namespaces, and each token is valid for 3 of 10 seconds"
    assert ids_of(backlog.arrived()) == sorted(ids)
    assert backlog.left() == []
    assert "eyJ" not in "".join(file.read_text() for file in ledger.rglob("*.jsonl"))
