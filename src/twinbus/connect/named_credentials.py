"""Credentials of azure-identity by name: `default`, `cli`, `environment`, `managed-identity` or `managed-identity=ID`.

The command line, the settings file and the Spark source have these names. A name is no secret: the secret, if there is
one, is where azure-identity looks for it, on the machine that makes the token.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

from twinbus.errors import CallerError
from twinbus.extras import require

CREDENTIAL_NAMES: Final = "default, cli, environment or managed-identity[=ID]"
_IDENTITY: Final = "managed-identity"
_PLAIN: Final = ("default", "cli", "environment", _IDENTITY)


class CredentialNameError(CallerError, ValueError):
    """The text is not the name of a credential."""


def check_credential_name(text: str) -> str:
    """Return the name of a credential in the form in which `named_credential` takes it. Raises CredentialNameError."""
    name, equals, client_id = text.strip().partition("=")
    if name not in _PLAIN or bool(equals) != bool(client_id.strip()) or (equals and name != _IDENTITY):
        raise CredentialNameError(f"{text!r} is not a credential: choose {CREDENTIAL_NAMES}")
    return f"{name}={client_id.strip()}" if equals else name


@cache
def named_credential(name: str) -> Any:
    """Return the sync credential with this name. Connects to nothing. The same name gives the same object.

    The ID of a managed identity is its client id; without one, it is the identity that the system has assigned. Raises
    CredentialNameError, and MissingExtraError if azure-identity is not installed.
    """
    kind, _, client_id = check_credential_name(name).partition("=")
    require("azure")
    from azure.identity import (  # noqa: PLC0415 - slow, and may not be installed
        AzureCliCredential,
        DefaultAzureCredential,
        EnvironmentCredential,
        ManagedIdentityCredential,
    )

    if kind == "cli":
        return AzureCliCredential()
    if kind == _IDENTITY:
        return ManagedIdentityCredential(client_id=client_id or None)
    made = EnvironmentCredential if kind == "environment" else DefaultAzureCredential
    return made(**_authority_options())


def _authority_options() -> dict[str, Any]:
    """Return options for the authority that AZURE_AUTHORITY_HOST names: the host that issues tokens.

    azure-identity asks Microsoft's public cloud about an authority that it does not know, and refuses it. An authority
    in a network of its own, such as Azure Stack, is trusted because the operator has named it.
    """
    from azure.identity import AzureAuthorityHosts  # noqa: PLC0415 - slow, and may not be installed

    given = os.environ.get("AZURE_AUTHORITY_HOST", "")
    host = urlsplit(given if "//" in given else f"//{given}").netloc
    known = {value for name, value in vars(AzureAuthorityHosts).items() if name.startswith("AZURE_")}
    return {"disable_instance_discovery": True} if host and host not in known else {}


class AioCredential:
    """A sync credential as the asyncio clients of azure-servicebus take it: its requests run in threads.

    The asyncio credentials of azure-identity would need aiohttp.
    """

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        return await asyncio.to_thread(self._credential.get_token, *scopes, **options)

    async def close(self) -> None:
        """Close nothing: others may use the credential."""

    async def __aenter__(self) -> AioCredential:
        return self

    async def __aexit__(self, *_: object) -> None: ...
