"""An issuer of JSON web tokens for tests, in place of Entra ID: its key, credentials, and the endpoints of sign-ins."""

from __future__ import annotations

import json
import ssl
import threading
import time
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self, cast
from urllib.parse import parse_qs, urlsplit

import jwt
from azure.core.credentials import AccessToken
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

AUDIENCE: Final = "https://servicebus.azure.net"
ISSUER: Final = "https://issuer.example/tenant"
SENDER: Final = "Azure Service Bus Data Sender"
RECEIVER: Final = "Azure Service Bus Data Receiver"
OWNER: Final = "Azure Service Bus Data Owner"


class Issuer:
    """Signs tokens with one key. `key_set` is what it publishes."""

    def __init__(self, kid: str = "first", *, bits: int = 2048, curve: ec.EllipticCurve | None = None) -> None:
        self.kid = kid
        self._bits = bits
        self._curve = curve

    @cached_property
    def private_key(self) -> Any:
        if self._curve is not None:
            return ec.generate_private_key(self._curve)
        return rsa.generate_private_key(65537, self._bits)

    @property
    def public_jwk(self) -> dict[str, Any]:
        made = ECAlgorithm if self._curve is not None else RSAAlgorithm
        return {**json.loads(made.to_jwk(self.private_key.public_key())), "kid": self.kid, "use": "sig"}

    @property
    def key_set(self) -> dict[str, Any]:
        return {"keys": [self.public_jwk]}

    def token(
        self,
        *roles: str,
        seconds: float = 3600,
        algorithm: str | None = None,
        headers: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Return a token that is valid for `seconds`. `fields` replace fields of the token; None removes one."""
        now = int(time.time())
        payload = {"aud": AUDIENCE, "iss": ISSUER, "nbf": now, "iat": now, "exp": now + seconds, "roles": list(roles)}
        payload |= fields
        return jwt.encode(
            {name: value for name, value in payload.items() if value is not None},
            cast("Any", None if algorithm == "none" else self.private_key),
            algorithm or ("RS256" if self._curve is None else "ES256"),
            headers={"kid": self.kid, **(headers or {})},
        )


class IssuedTokens:
    """A credential as azure-servicebus takes it. `given` counts the tokens."""

    def __init__(self, issuer: Issuer, *roles: str, seconds: float = 3600, **fields: Any) -> None:
        self.issuer = issuer
        self.roles = roles
        self.seconds = seconds
        self.fields = fields
        self.given = 0
        self.texts: list[str] = []
        self.scopes: set[str] = set()

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        self.given += 1
        self.scopes |= set(scopes)
        token = self.issuer.token(*self.roles, seconds=self.seconds, jti=str(self.given), **self.fields)
        self.texts.append(token)
        return AccessToken(token, int(time.time() + self.seconds))


class AioIssuedTokens(IssuedTokens):
    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:  # type: ignore[override]  # as the SDK's
        return super().get_token(*scopes, **options)

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


# --- endpoints that azure-identity asks ------------------------------------------------------------------------------

TENANT: Final = "00000000-0000-0000-0000-000000000021"
_HEADER: Final = "header-of-the-identity"
_SECRET: Final = "secret-of-the-application"


class TokenEndpoint:
    """Answers azure-identity as Azure does: `environment` names the endpoint for the processes that sign in.

    It is the identity endpoint of App Service, for `managed-identity`, and with `tls` also an authority of Entra ID,
    for `environment`. `asked` has the client id of each token that was given; `refuses` makes it refuse.
    """

    def __init__(self, tokens: IssuedTokens, tls: ssl.SSLContext | None = None) -> None:
        self.tokens = tokens
        self.refuses = False
        self.asked: list[str | None] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://localhost:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def environment(self) -> dict[str, str]:
        if self.url.startswith("http:"):
            return {"IDENTITY_ENDPOINT": f"{self.url}/msi/token", "IDENTITY_HEADER": _HEADER}
        application = {"AZURE_CLIENT_ID": "application", "AZURE_CLIENT_SECRET": _SECRET}
        return {"AZURE_AUTHORITY_HOST": self.url, "AZURE_TENANT_ID": TENANT, **application}

    def answer(self, path: str, header: str | None, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        if path.endswith("/.well-known/openid-configuration"):
            base = f"{self.url}/{TENANT}"
            endpoints = {"authorization_endpoint": f"{base}/authorize", "token_endpoint": f"{base}/oauth2/v2.0/token"}
            return 200, {"issuer": f"{base}/v2.0", **endpoints}
        is_identity = path == "/msi/token"
        is_right = header == _HEADER if is_identity else form.get("client_secret") == [_SECRET]
        if (self.refuses or not is_right) and is_identity:
            return 400, {"statusCode": 400, "message": "refused on purpose"}
        if self.refuses or not is_right:
            return 401, {"error": "invalid_client", "error_description": "AADSTS0: refused on purpose"}
        self.asked.append(form.get("client_id", [None])[0])
        scope = form["resource"][0] if is_identity else form["scope"][0]
        found = self.tokens.get_token(scope)
        lifetime = {"expires_on": found.expires_on} if is_identity else {"expires_in": int(self.tokens.seconds)}
        return 200, {"access_token": found.token, "token_type": "Bearer", "resource": scope, **lifetime}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(endpoint: TokenEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            self._answer(parts.path, parse_qs(parts.query))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer(urlsplit(self.path).path, parse_qs(body))

        def _answer(self, path: str, form: dict[str, list[str]]) -> None:
            status, value = endpoint.answer(path, self.headers.get("X-IDENTITY-HEADER"), form)
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler
