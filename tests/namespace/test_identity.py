"""Key sets: which keys of a file can verify tokens, and why a file is refused (N6)."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import RSAAlgorithm

from tests.entra import Issuer
from twinbus.namespace import KeySetError, parse_key_set
from twinbus.namespace.identity import has_audience

RSA = Issuer("rsa")
CURVE = Issuer("curve", curve=ec.SECP384R1())


def parse(*keys: Any) -> dict[str, str]:
    return {key.kid: key.algorithm for key in parse_key_set(json.dumps({"keys": keys}))}


def test_n6_each_key_has_one_algorithm() -> None:
    assert parse(RSA.public_jwk, CURVE.public_jwk) == {"rsa": "RS256", "curve": "ES384"}
    assert parse({**RSA.public_jwk, "alg": "PS256"}) == {"rsa": "PS256"}


@pytest.mark.parametrize(
    "left_out",
    [
        lambda: {**RSA.public_jwk, "kid": "other", "use": "enc"},
        lambda: {**RSA.public_jwk, "kid": "other", "alg": "HS256"},
        lambda: {**CURVE.public_jwk, "kid": "other", "alg": "ES256"},
        lambda: {**RSA.public_jwk, "kid": None},
        lambda: {**RSA.public_jwk, "kid": 7},
        lambda: {"kty": "OKP", "crv": "Ed25519", "kid": "other", "x": "AAAA"},
        lambda: {"kty": 7},
    ],
)
def test_n6_keys_that_cannot_verify_tokens_are_left_out(left_out: Callable[[], dict[str, Any]]) -> None:
    assert parse(left_out(), RSA.public_jwk) == {"rsa": "RS256"}
    with pytest.raises(KeySetError, match="no public key"):
        parse(left_out())


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: "{", "not JSON"),
        (lambda: "[" * 100_000, "not JSON"),
        (lambda: "[]", "not a JSON Web Key Set"),
        (lambda: '{"keys": {}}', "not a JSON Web Key Set"),
        (lambda: '{"keys": ["x"]}', "not a JSON Web Key Set"),
        (lambda: '{"keys": []}', "no public key"),
        (lambda: json.dumps({"keys": [RSA.public_jwk] * 101}), "101 keys"),
        (lambda: json.dumps({"keys": [RSA.public_jwk, {**Issuer("rsa").public_jwk}]}), "'rsa' is there twice"),
        (lambda: json.dumps({"keys": [{"kty": "oct", "kid": "x", "k": "c2VjcmV0"}]}), "shared key"),
        (lambda: json.dumps({"keys": [json.loads(RSAAlgorithm.to_jwk(RSA.private_key))]}), "private key"),
        (lambda: json.dumps({"keys": [Issuer("small", bits=1024).public_jwk]}), "1024 bits"),
        (lambda: json.dumps({"keys": [{"kty": "RSA", "kid": "x", "n": "!", "e": "AQAB"}]}), "not a valid key"),
        (lambda: json.dumps({"keys": [{"kty": "RSA", "kid": "x"}]}), "not a valid key"),
        (
            lambda: json.dumps({"keys": [{"kty": "EC", "crv": "P-256", "kid": "x", "x": "AA", "y": "AA"}]}),
            "not a valid key",
        ),
    ],
)
def test_n6_a_key_set_that_cannot_be_used_is_refused_with_the_reason_and_without_a_key(
    made: Callable[[], str], reason: str
) -> None:
    with pytest.raises(KeySetError, match=reason) as refused:
        parse_key_set(made())
    assert "c2VjcmV0" not in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        ("https://servicebus.azure.net", True),
        ("https://servicebus.azure.net/", True),
        (["https://other.example", "https://servicebus.azure.net"], True),
        ("https://servicebus.azure.net.evil.example", False),
        ([], False),
        (None, False),
        ([None, 7, {}], False),
        ({"https://servicebus.azure.net": 1}, False),
    ],
)
def test_n6_the_audience_is_a_text_or_a_list(found: object, is_same: bool) -> None:
    assert has_audience(found, ["https://servicebus.azure.net"]) is is_same
