"""The native transport takes connection strings, clients of azure-servicebus and every kind of credential."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.servicebus import ServiceBusClient
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient

from twinbus.connect import ENTRA_SCOPE, JWT_TYPE, SAS_TYPE, AzureTokenSource, SasTokenSource
from twinbus.syphon.credentials import CredentialError, NamespaceAccess

HOST = "contoso.servicebus.windows.net"
TEXT = f"Endpoint=sb://{HOST}/;SharedAccessKeyName=root;SharedAccessKey=c2VjcmV0"
LOCAL = "Endpoint=sb://localhost:5000;SharedAccessKeyName=root;SharedAccessKey=c2VjcmV0;UseDevelopmentEmulator=true"


class AccessToken(NamedTuple):
    token: str
    expires_on: int


class Credential:
    """A credential like those of azure-identity."""

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        assert scopes == (ENTRA_SCOPE,)
        return AccessToken("jwt", 1_900_000_000)


class AioCredential:
    async def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        return Credential().get_token(*scopes)


@pytest.mark.parametrize("credential", [Credential(), AioCredential()])
async def test_a_token_credential_is_asked_whether_it_is_sync_or_aio(credential: Any) -> None:
    place = NamespaceAccess.with_credential(HOST, credential)
    assert (place.endpoint.host, place.endpoint.port, place.endpoint.tls) == (HOST, 5671, True)
    assert place.source is not None
    token = await place.source.token("sb://anything")
    assert (token.text, token.type, token.expires_at) == ("jwt", JWT_TYPE, 1_900_000_000)


@pytest.mark.parametrize("kind", [ServiceBusClient, AioServiceBusClient])
@pytest.mark.parametrize(("text", "authority", "tls"), [(TEXT, f"{HOST}:5671", True), (LOCAL, "localhost:5000", False)])
async def test_a_client_of_the_sdk_lends_its_key(kind: Any, text: str, authority: str, tls: bool) -> None:
    place = NamespaceAccess.of(kind.from_connection_string(text))
    assert (place.endpoint.authority, place.endpoint.tls) == (authority, tls)
    assert isinstance(place.source, SasTokenSource)
    assert (await place.source.token("sb://anything")).type == SAS_TYPE


def test_a_client_of_the_sdk_lends_its_token_credential() -> None:
    client: Any = ServiceBusClient(HOST, Credential())  # type: ignore[arg-type]  # it has what is asked of one
    assert isinstance(NamespaceAccess.of(client).source, AzureTokenSource)


async def test_named_keys_and_signatures_are_taken_too() -> None:
    named = NamespaceAccess.with_credential(f"{HOST}:5671", AzureNamedKeyCredential("root", "secret"))
    assert (named.endpoint.key_name, named.endpoint.key) == ("root", "secret")
    signed = NamespaceAccess.with_credential(HOST, AzureSasCredential("SharedAccessSignature sr=x"))
    assert signed.source is not None
    assert (await signed.source.token("sb://anything")).text == "SharedAccessSignature sr=x"


def test_a_connection_string_gives_access_and_access_is_returned_as_it_is() -> None:
    place = NamespaceAccess.of(TEXT)
    assert place.endpoint.key_name == "root"
    assert NamespaceAccess.of(place) is place


def test_an_object_that_is_no_credential_is_refused_with_its_type() -> None:
    with pytest.raises(CredentialError, match="a object is no credential"):
        NamespaceAccess.with_credential(HOST, object())
