"""JSON web tokens: which are accepted, what their roles grant, and why others are refused (N6)."""

import base64
import hashlib
import hmac
import json
import string
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from tests.entra import AUDIENCE, ISSUER, OWNER, RECEIVER, SENDER, Issuer
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.front.jwt_verifier import MAX_TOKEN, JwtVerifier
from twinbus.namespace.front.sas_verifier import TokenProblem, TokenRefusedError
from twinbus.namespace.identity import IdentityOptions, TokenKey, parse_key_set

ISSUERS = [Issuer("rsa"), Issuer("curve", curve=ec.SECP256R1())]
RSA = ISSUERS[0]
STRANGER = Issuer("rsa")


@cache
def keys() -> tuple[TokenKey, ...]:
    return parse_key_set(json.dumps({"keys": [one.public_jwk for one in ISSUERS]}))


@cache
def verifier() -> JwtVerifier:
    return JwtVerifier(IdentityOptions(keys(), (AUDIENCE,), (ISSUER,)))


def claims(token: str, path: str = "") -> frozenset[Claim]:
    return verifier().current_claims(verifier().verify(token, path, time.time()), path)


def refusal(token: str, path: str = "") -> TokenRefusedError:
    with pytest.raises(TokenRefusedError) as refused:
        verifier().verify(token, path, time.time())
    assert token[-20:] not in refused.value.text or not token
    assert len(refused.value.text) < 400
    return refused.value


@pytest.mark.parametrize("issuer", ISSUERS, ids=lambda one: one.kid)
@pytest.mark.parametrize(
    ("role", "granted"),
    [(SENDER, {Claim.SEND}), (RECEIVER, {Claim.LISTEN}), (OWNER, set(Claim))],
)
def test_n6_a_role_grants_what_it_grants_in_azure(issuer: Issuer, role: str, granted: set[Claim]) -> None:
    assert claims(issuer.token(role)) == claims(issuer.token(role), "orders") == granted


@pytest.mark.parametrize(
    ("roles", "path", "granted"),
    [
        (["AzureServiceBusDataSender"], "orders", {Claim.SEND}),
        ([SENDER, RECEIVER], "orders", {Claim.SEND, Claim.LISTEN}),
        ([f"{SENDER}:orders"], "orders", {Claim.SEND}),
        ([f"{SENDER}: /Orders/"], "orders/$management", {Claim.SEND}),
        ([f"{RECEIVER}:events"], "events/subscriptions/first", {Claim.LISTEN}),
        ([f"{RECEIVER}:events/Subscriptions/first"], "events/subscriptions/first/$deadletterqueue", {Claim.LISTEN}),
        ([SENDER, f"{RECEIVER}:orders"], "orders", {Claim.SEND, Claim.LISTEN}),
        ([SENDER, f"{RECEIVER}:orders"], "bills", {Claim.SEND}),
        (["unknown", 7, None, SENDER], "orders", {Claim.SEND}),
    ],
)
def test_n6_a_role_is_for_the_namespace_or_for_one_entity(roles: list[Any], path: str, granted: set[Claim]) -> None:
    assert claims(RSA.token(roles=roles), path) == granted


@pytest.mark.parametrize(
    ("roles", "path"),
    [
        ([], "orders"),
        (None, "orders"),
        (SENDER, "orders"),
        (["Reader"], "orders"),
        ([f"{SENDER}:orders"], ""),
        ([f"{SENDER}:orders"], "bills"),
        ([f"{SENDER}:orders"], "orders2"),
        ([f"{SENDER}:orders"], "orders/below"),
        ([f"{SENDER}:"], "orders"),
        ([f"{SENDER}: / "], ""),
    ],
)
def test_n6_a_token_without_a_role_for_the_resource_is_refused(roles: Any, path: str) -> None:
    refused = refusal(RSA.token(roles=roles), path)
    assert refused.problem is TokenProblem.NOT_COVERED
    assert "Data Sender" in refused.text


def test_n6_a_role_for_one_entity_grants_nothing_on_a_neighbour_below_it() -> None:
    granted = verifier().verify(RSA.token(SENDER, f"{RECEIVER}:orders"), "orders", time.time())
    assert verifier().current_claims(granted, "orders") == {Claim.SEND, Claim.LISTEN}
    assert verifier().current_claims(granted, "orders/below") == {Claim.SEND}


def hmac_with_public_key() -> str:
    """Return a token that the public key signs as if it were a shared secret. PyJWT itself refuses to sign it."""
    _, body, _ = RSA.token(OWNER).split(".")
    head = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "rsa"}).encode()).decode().rstrip("=")
    pem = RSA.private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = hmac.digest(pem, f"{head}.{body}".encode(), hashlib.sha256)
    return f"{head}.{body}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def with_signature_of_another_token() -> str:
    return f"{RSA.token(OWNER).rpartition('.')[0]}.{RSA.token(SENDER).rpartition('.')[2]}"


@pytest.mark.parametrize(
    ("made", "problem", "text"),
    [
        (lambda: RSA.token(OWNER, seconds=-1), TokenProblem.EXPIRED, "the token expired at"),
        (lambda: RSA.token(OWNER, nbf=time.time() + 3600), TokenProblem.EXPIRED, "not valid before"),
        (lambda: RSA.token(OWNER, aud="https://evil.example"), TokenProblem.FOREIGN_AUDIENCE, f"not {AUDIENCE}"),
        (lambda: RSA.token(OWNER, aud=None), TokenProblem.FOREIGN_AUDIENCE, "audience is 'null'"),
        (lambda: RSA.token(OWNER, aud=["a" * 5000]), TokenProblem.FOREIGN_AUDIENCE, "…"),
        (lambda: RSA.token(OWNER, iss="https://evil.example"), TokenProblem.FOREIGN_AUDIENCE, f"not {ISSUER}"),
        (lambda: RSA.token(OWNER, iss=None), TokenProblem.FOREIGN_AUDIENCE, "issuer is 'null'"),
        (lambda: RSA.token(OWNER, exp=None), TokenProblem.MALFORMED, "lacks 'exp'"),
        (lambda: RSA.token(OWNER, exp=1e300), TokenProblem.MALFORMED, "'exp' of the token is not a number"),
        (lambda: RSA.token(OWNER, exp=float("nan")), TokenProblem.MALFORMED, "'exp' of the token is not a number"),
        (lambda: RSA.token(OWNER, exp=True), TokenProblem.MALFORMED, "'exp' of the token is not a number"),
        (lambda: RSA.token(OWNER, nbf=-1), TokenProblem.MALFORMED, "'nbf' of the token is not a number"),
        (
            lambda: RSA.token(OWNER, headers={"kid": "nobody"}),
            TokenProblem.UNKNOWN_KEY_NAME,
            "no key with the kid 'nobody'",
        ),
        (lambda: RSA.token(OWNER, headers={"kid": ""}), TokenProblem.UNKNOWN_KEY_NAME, "names no key"),
        (
            lambda: RSA.token(OWNER, algorithm="RS512"),
            TokenProblem.BAD_SIGNATURE,
            "signed with 'RS512', the key is for RS256",
        ),
        (lambda: RSA.token(OWNER, algorithm="none"), TokenProblem.BAD_SIGNATURE, "signed with 'none'"),
        (hmac_with_public_key, TokenProblem.BAD_SIGNATURE, "signed with 'HS256'"),
        (lambda: STRANGER.token(OWNER), TokenProblem.BAD_SIGNATURE, "the signature does not match"),
        (with_signature_of_another_token, TokenProblem.BAD_SIGNATURE, "the signature does not match"),
        (lambda: RSA.token(OWNER)[:-9], TokenProblem.MALFORMED, "not a signed JSON web token"),
        (
            lambda: RSA.token(OWNER, headers={"crit": ["x"], "x": 1}),
            TokenProblem.MALFORMED,
            "not a signed JSON web token",
        ),
        (
            lambda: jwt.api_jws.encode(b"[]", RSA.private_key, "RS256", {"kid": "rsa"}),
            TokenProblem.MALFORMED,
            "JSON object",
        ),
        (
            lambda: jwt.api_jws.encode(b"x", RSA.private_key, "RS256", {"kid": "rsa"}),
            TokenProblem.MALFORMED,
            "not a signed",
        ),
        (
            lambda: jwt.api_jws.encode(b"[" * 10_000, RSA.private_key, "RS256", {"kid": "rsa"}),
            TokenProblem.MALFORMED,
            "not a signed",
        ),
        (lambda: "", TokenProblem.MALFORMED, "not a signed JSON web token"),
        (lambda: "a.b.c", TokenProblem.MALFORMED, "not a signed JSON web token"),
        (lambda: f"{base64.urlsafe_b64encode(b'[' * 9000).decode()}.e30.x", TokenProblem.MALFORMED, "not a signed"),
        (lambda: "x" * (MAX_TOKEN + 1), TokenProblem.MALFORMED, f"longer than {MAX_TOKEN} characters"),
    ],
)
def test_n6_a_token_that_is_not_valid_is_refused_with_the_reason(
    made: Callable[[], str], problem: TokenProblem, text: str
) -> None:
    refused = refusal(made())
    assert refused.problem is problem
    assert text in refused.text


def test_n6_an_issuer_whose_clock_is_a_little_ahead_is_accepted() -> None:
    assert claims(RSA.token(OWNER, nbf=time.time() + 60)) == set(Claim)


def test_n6_a_key_that_is_gone_or_replaced_grants_nothing_any_more() -> None:
    changing = JwtVerifier(IdentityOptions(keys(), (AUDIENCE,)))
    granted = changing.verify(RSA.token(OWNER, iss=None), "orders", time.time())
    changing.replace(IdentityOptions(parse_key_set(json.dumps(STRANGER.key_set)), (AUDIENCE,)))
    assert changing.current_claims(granted, "orders") == frozenset()
    changing.replace(IdentityOptions(keys()[:1], (AUDIENCE,)))
    assert changing.current_claims(granted, "orders") == set(Claim)


@given(st.data())
def test_n6_no_change_of_a_token_is_accepted_and_none_fails_otherwise(data: st.DataObject) -> None:
    token = valid_token()
    at = data.draw(st.integers(0, len(token) - 2))
    with_one = token[:at] + data.draw(st.sampled_from(string.printable)) + token[at + 1 :]
    changed = data.draw(st.sampled_from([with_one, token[:at], token[:at] + token[at + 1 :], token[at:]]))
    try:
        verifier().verify(changed, "orders", time.time())
    except TokenRefusedError:
        assert changed != token
    else:
        assert changed == token


@cache
def valid_token() -> str:
    return RSA.token(SENDER, seconds=86_400)
