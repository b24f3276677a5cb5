"""Tokens of the official clients are accepted; every other token is refused with the reason."""

from contextlib import suppress
from urllib.parse import quote, quote_plus

import pytest
from azure.servicebus._pyamqp.utils import generate_sas_token
from hypothesis import given
from hypothesis import strategies as st

from twinbus.connect import make_sas_token, sas_signature
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim
from twinbus.namespace.front.sas_verifier import (
    DEFAULT_KEY,
    DEFAULT_KEY_NAME,
    SasVerifier,
    TokenProblem,
    TokenRefusedError,
    default_rule,
    implied_claims,
    resource_path,
    token_expiry,
)
from twinbus.namespace.own_names import OwnNames

NOW = 1_700_000_000.0
LATER = int(NOW) + 300
ALL = frozenset(Claim)
SENDER = AuthorizationRule("sender", "first", "second", frozenset({Claim.SEND}))
ODD = AuthorizationRule("odd & name", "key", "key", frozenset({Claim.LISTEN}))
ENTITY = AuthorizationRule("of-orders", "orders-key", "", frozenset({Claim.LISTEN}))

NAMES = OwnNames(5672, names=["bus.example"])
VERIFIER = SasVerifier([default_rule(), SENDER, ODD], NAMES)


def verify(token: str, resource: str = "orders", *rules: AuthorizationRule) -> frozenset[Claim]:
    return VERIFIER.verify(token, resource, rules, NOW, peer_is_loopback=True)


def fault(token: str, resource: str = "orders") -> TokenProblem:
    with pytest.raises(TokenRefusedError) as refused:
        verify(token, resource)
    assert refused.value.text
    return refused.value.problem


def token(resource: str, key_name: str = DEFAULT_KEY_NAME, key: str = DEFAULT_KEY, expires_at: int = LATER) -> str:
    return make_sas_token(resource, key_name, key, expires_at)


def of_python(resource: str, key_name: str = DEFAULT_KEY_NAME, key: str = DEFAULT_KEY) -> str:
    made: str = generate_sas_token(resource, key_name, key, LATER)  # type: ignore[no-untyped-call]  # the SDK's own
    return made


def raw(sr: str, key: str = DEFAULT_KEY, key_name: str = DEFAULT_KEY_NAME, order: str = "sr sig se skn") -> str:
    fields = {"sr": sr, "sig": quote(sas_signature(key, sr, str(LATER)), safe=""), "se": str(LATER), "skn": key_name}
    return "SharedAccessSignature " + "&".join(f"{name}={fields[name]}" for name in order.split())


@pytest.mark.parametrize(
    "made",
    [
        of_python("sb://localhost:5672/orders"),
        of_python("https://localhost:5672"),
        # The JavaScript admin client: the whole URL lower-cased, escapes included, and the fields in its own order.
        raw(quote("https://localhost:5672/orders?api-version=2021-05", safe="").lower(), order="sig se skn sr"),
        raw(quote("sb://localhost:5672/orders", safe="")),
        token("sb://localhost:5672/orders"),
        token("sb://localhost:5672/orders/"),
        token("SB://LOCALHOST/Orders"),
        token("amqps://127.0.0.1/"),
        token("http://[::1]:5672"),
        token("sb://bus.example/orders"),
        token("sb://localhost:5672/orders").replace("SharedAccessSignature", "sharedaccesssignature"),
        raw("sb://localhost/orders"),
    ],
)
def test_tokens_of_every_client_are_accepted(made: str) -> None:
    assert verify(made) == ALL


@pytest.mark.parametrize(
    ("sr", "resource", "covered"),
    [
        ("sb://localhost", "orders", True),
        ("sb://localhost/orders", "orders", True),
        ("sb://localhost/orders", "ORDERS/$management", True),
        ("sb://localhost/orders", "sb://localhost:5672/orders/$deadletterqueue", True),
        ("sb://localhost/news", "news/Subscriptions/all", True),
        ("sb://localhost/news/subscriptions/all", "news/Subscriptions/all/$management", True),
        ("https://localhost/a%2fb", "a/b", True),
        ("https://localhost/$Resources/queues", "$Resources/queues", True),
        ("sb://localhost/orders", "orders2", False),
        ("sb://localhost/orders2", "orders", False),
        ("sb://localhost/order", "orders", False),
        ("sb://localhost/orders/x", "orders", False),
        ("sb://localhost/news/Subscriptions/all", "news/Subscriptions/one", False),
        ("sb://localhost/news/Subscriptions/all", "news", False),
        ("sb://localhost/orders", "", False),
        ("sb://localhost/orders/..", "invoices", False),
    ],
)
def test_a_token_is_valid_for_what_its_resource_covers_and_nothing_else(sr: str, resource: str, covered: bool) -> None:
    if covered:
        assert verify(token(sr), resource) == ALL
    else:
        assert fault(token(sr), resource) is TokenProblem.NOT_COVERED


@pytest.mark.parametrize(
    "sr",
    [
        "sb://localhost:5673/orders",
        "sb://bus.example:5673/orders",
        "sb://elsewhere/orders",
        "sb://localhost.evil.example/orders",
        "sb://localhost@evil.example/orders",
        "sb://evil.example#localhost/orders",
        "sb://192.0.2.1/orders",
        "sb://0.0.0.0:5672/orders",
        "orders",
        "/orders",
        "sb:///orders",
        "sb://localhost:port/orders",
        "sb://[::1/orders",
    ],
)
def test_x3_a_token_for_a_foreign_name_is_refused(sr: str) -> None:
    assert fault(token(sr)) is TokenProblem.FOREIGN_NAME


def test_x3_the_refusal_of_a_foreign_name_gives_that_name_the_own_names_and_the_option() -> None:
    with pytest.raises(TokenRefusedError) as refused:
        verify(token("sb://elsewhere:5672/orders"))
    for said in ("'elsewhere:5672'", "localhost:5672", "[::1]:5672", "bus.example:5672", "--host-name"):
        assert said in refused.value.text


def test_x3_a_token_for_the_address_that_the_connection_arrived_at_is_accepted() -> None:
    made = token("sb://192.0.2.1:5672/orders")
    believed = VERIFIER.verify(made, "orders", (), NOW, peer_is_loopback=True, arrived_at="192.0.2.1")
    assert believed == ALL
    with pytest.raises(TokenRefusedError):
        VERIFIER.verify(made, "orders", (), NOW, peer_is_loopback=True, arrived_at="192.0.2.2")


GOOD = token("sb://localhost/orders")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("", TokenProblem.MALFORMED),
        ("Bearer ey.ey.ey", TokenProblem.MALFORMED),
        ("SharedAccessSignature", TokenProblem.MALFORMED),
        ("SharedAccessSignature sr", TokenProblem.MALFORMED),
        (GOOD.replace("&skn=RootManageSharedAccessKey", ""), TokenProblem.MALFORMED),
        (GOOD.replace("skn=RootManageSharedAccessKey", "skn="), TokenProblem.MALFORMED),
        (GOOD.replace(f"&se={LATER}", ""), TokenProblem.MALFORMED),
        (GOOD.replace(f"se={LATER}", "se=soon"), TokenProblem.MALFORMED),
        (GOOD.replace(f"se={LATER}", "se=²"), TokenProblem.MALFORMED),
        (GOOD.replace(f"se={LATER}", "se=" + "9" * 5000), TokenProblem.MALFORMED),
        (GOOD.replace(f"se={LATER}", f"se=-{LATER}"), TokenProblem.MALFORMED),
        (GOOD.split("&sig=")[0], TokenProblem.MALFORMED),
        (GOOD.replace(" sr=", " rs="), TokenProblem.MALFORMED),
        (GOOD + "&sr=sb%3A%2F%2Flocalhost", TokenProblem.MALFORMED),
        (GOOD + "&x=" + "y" * 10_000, TokenProblem.MALFORMED),
        (token("sb://localhost/orders", key_name="nobody"), TokenProblem.UNKNOWN_KEY_NAME),
        (token("sb://localhost/orders", key_name="rootmanagesharedaccesskey"), TokenProblem.UNKNOWN_KEY_NAME),
        (token("sb://localhost/orders", key="wrong"), TokenProblem.BAD_SIGNATURE),
        (token("sb://localhost/orders", key=""), TokenProblem.BAD_SIGNATURE),
        (GOOD.replace(f"se={LATER}", f"se={LATER + 1}"), TokenProblem.BAD_SIGNATURE),
        (GOOD.replace("orders", "others"), TokenProblem.BAD_SIGNATURE),
        (GOOD.replace("%3A", "%3a"), TokenProblem.BAD_SIGNATURE),
        (GOOD.replace("&sig=", "&sig=A"), TokenProblem.BAD_SIGNATURE),
        (token("sb://localhost/orders", expires_at=int(NOW)), TokenProblem.EXPIRED),
        (token("sb://localhost/orders", expires_at=0), TokenProblem.EXPIRED),
    ],
)
def test_the_refusal_of_a_token_says_why(made: str, why: TokenProblem) -> None:
    assert fault(made) is why


def test_no_refusal_repeats_a_signature_or_a_key() -> None:
    for made in (GOOD + "&sr=x", token("sb://localhost/x"), token("sb://localhost/orders", expires_at=0)):
        with pytest.raises(TokenRefusedError) as refused:
            verify(made)
        assert DEFAULT_KEY not in refused.value.text
        assert made.split("sig=")[1].split("&")[0] not in refused.value.text


def test_primary_and_secondary_key_are_both_accepted() -> None:
    for key in ("first", "second"):
        assert verify(token("sb://localhost/orders", "sender", key)) == {Claim.SEND}


def test_an_empty_secondary_key_accepts_nothing() -> None:
    with pytest.raises(TokenRefusedError):
        verify(token("sb://localhost/orders", "of-orders", ""), "orders", ENTITY)


def test_a_rule_of_an_entity_is_valid_for_that_entity_only() -> None:
    made = token("sb://localhost/", "of-orders", "orders-key")
    assert verify(made, "orders", ENTITY) == {Claim.LISTEN}
    assert fault(made, "invoices") is TokenProblem.UNKNOWN_KEY_NAME


def test_a_rule_of_the_entity_and_one_of_the_namespace_may_share_a_name() -> None:
    twin = AuthorizationRule("sender", "other", "other", frozenset({Claim.LISTEN}))
    assert verify(token("sb://localhost/orders", "sender", "other"), "orders", twin) == {Claim.LISTEN}
    assert verify(token("sb://localhost/orders", "sender", "first"), "orders", twin) == {Claim.SEND}


@pytest.mark.parametrize(
    "made",
    [
        of_python("sb://localhost/orders", "odd & name", "key"),
        token("sb://localhost/orders", "odd & name", "key"),
        raw("sb://localhost/orders", "key", quote_plus("odd & name")),
    ],
)
def test_the_name_of_a_key_may_be_encoded_once_or_twice(made: str) -> None:
    assert verify(made) == {Claim.LISTEN}


def test_manage_implies_send_and_listen_and_nothing_else_implies_anything() -> None:
    assert implied_claims({Claim.MANAGE}) == ALL
    assert implied_claims({Claim.SEND}) == {Claim.SEND}
    assert implied_claims({Claim.LISTEN}) == {Claim.LISTEN}
    assert implied_claims(()) == frozenset()


def test_only_the_default_key_is_refused_away_from_loopback() -> None:
    with pytest.raises(TokenRefusedError) as refused:
        VERIFIER.verify(GOOD, "orders", (), NOW, peer_is_loopback=False)
    assert refused.value.problem is TokenProblem.DEFAULT_KEY_ABROAD
    own = token("sb://localhost/orders", "sender", "first")
    assert VERIFIER.verify(own, "orders", (), NOW, peer_is_loopback=False) == {Claim.SEND}


def test_the_expiry_of_a_token_can_be_read_without_verifying_it() -> None:
    assert token_expiry(token("sb://h/q", key="wrong")) == LATER
    assert token_expiry("nonsense") is None


@pytest.mark.parametrize(
    ("resource", "path"),
    [
        ("sb://h:1/a/b/", "a/b"),
        ("sb://h", ""),
        ("/a/", "a"),
        ("a/Subscriptions/s", "a/Subscriptions/s"),
        ("sb://h/a?b", "a?b"),
        ("", ""),
    ],
)
def test_the_path_of_a_resource(resource: str, path: str) -> None:
    assert resource_path(resource) == path


names = st.text("abcXYZ019-._ ~%+é", min_size=1, max_size=12)


@given(path=st.lists(names, max_size=3), key_name=names, key=st.text(min_size=1, max_size=20), below=st.lists(names))
def test_a_token_is_valid_for_its_resource_and_all_below_whatever_the_names(
    path: list[str], key_name: str, key: str, below: list[str]
) -> None:
    key = key.encode("utf-8", "replace").decode()
    verifier = SasVerifier([AuthorizationRule(key_name, key, key, frozenset({Claim.SEND}))], NAMES)
    made = make_sas_token("sb://localhost/" + "/".join(path), key_name, key, LATER)
    assert verifier.verify(made, "/".join(path + below), (), NOW, peer_is_loopback=True) == {Claim.SEND}


@given(st.text(max_size=80))
def test_no_text_makes_the_verifier_fail(text: str) -> None:
    for made in (text, "SharedAccessSignature " + text, raw(text.replace("&", ""))):
        with suppress(TokenRefusedError):
            assert verify(made) == ALL
