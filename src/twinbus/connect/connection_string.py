"""Addresses of namespaces: a connection string, which has a key, or the host name of a namespace, which has none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import urlsplit

from twinbus.errors import CallerError

TLS_PORT: Final = 5671
PLAIN_PORT: Final = 5672

_HOST: Final = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+", re.ASCII)  # a name, or an address
_SCHEMES: Final = ("sb", "amqp", "amqps", "https", "http")


class ConnectionStringError(CallerError, ValueError):
    """The connection string or host name is not valid. The text never contains a key."""


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """The endpoint of a namespace and a key. `emulator=True` means plain TCP, as in the official clients.

    `key_name` and `key` are empty if the endpoint was given as a host name. Then a credential is needed.
    """

    host: str
    port: int
    key_name: str
    key: str = field(repr=False)
    entity_path: str | None = None
    emulator: bool = False

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse a connection string or the host name of a namespace. Raises ConnectionStringError."""
        return cls.parse(text) if "=" in text else cls.of_host(text)

    @classmethod
    def of_host(cls, text: str) -> Self:
        """Return the endpoint `host` or `host:port`, without a key. Raises ConnectionStringError.

        A name with neither a dot nor a port is refused, because it may be a key. So the text of an error never has a
        key.
        """
        given = text.strip()
        try:
            parts = urlsplit(f"//{given}")
            host, port = parts.hostname or "", parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        is_name = port is not None or host == "localhost" or "." in host or ":" in host
        is_plain = parts.netloc == given and "@" not in given
        if not is_name or not is_plain or not _HOST.fullmatch(host):
            raise ConnectionStringError(
                "it is neither a connection string nor a host such as contoso.servicebus.windows.net"
            )
        return cls(host, TLS_PORT if port is None else port, "", "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a connection string. Raises ConnectionStringError."""
        settings = _settings(text)
        if "sharedaccesssignature" in settings:
            raise ConnectionStringError(
                "SharedAccessSignature is not supported: give SharedAccessKeyName and SharedAccessKey"
            )
        # The official clients accept exactly this spelling and ignore all other spellings.
        emulator = settings.get("usedevelopmentemulator") == "true"
        host, port = _endpoint(settings, PLAIN_PORT if emulator else TLS_PORT)
        for name in ("SharedAccessKeyName", "SharedAccessKey"):
            if not settings.get(name.lower()):
                raise ConnectionStringError(f"{name} is missing from the connection string")
        return cls(
            host=host,
            port=port,
            key_name=settings["sharedaccesskeyname"],
            key=settings["sharedaccesskey"],
            entity_path=settings.get("entitypath", "").strip("/") or None,
            emulator=emulator,
        )

    @property
    def tls(self) -> bool:
        return not self.emulator

    @property
    def has_key(self) -> bool:
        """Whether the endpoint has a key. Without a key, a credential is needed."""
        return bool(self.key)

    def require_credential(self, credential: object) -> None:
        """Raise ConnectionStringError if the endpoint has no key and the credential is None."""
        if not self.has_key and credential is None:
            raise ConnectionStringError(f"{self.host} is a host name, which has no key: give a credential")

    @property
    def namespace(self) -> str:
        """The host as azure-servicebus takes it: with the port if that is not the usual one."""
        return self.host if self.port == TLS_PORT else self.authority

    @property
    def authority(self) -> str:
        """`host:port` as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resource(self, entity: str = "") -> str:
        """Return the URI that is the audience of a token: the token's namespace, or the entity in the namespace."""
        return f"sb://{self.authority}/{entity}"

    def render(self) -> str:
        """Return the connection string in the form that the official clients accept. The string contains the key."""
        parts = [
            f"Endpoint=sb://{self.authority}",
            f"SharedAccessKeyName={self.key_name}",
            f"SharedAccessKey={self.key}",
        ]
        if self.entity_path:
            parts.append(f"EntityPath={self.entity_path}")
        if self.emulator:
            parts.append("UseDevelopmentEmulator=true")
        return ";".join(parts) + ";"


def _settings(text: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for number, part in enumerate(text.strip().split(";"), start=1):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            # The error's text names only the position of the part: the part may be the end of a key.
            raise ConnectionStringError(f"part {number} of the connection string is not of the form name=value")
        settings[name.strip().lower()] = value.strip()
    if not settings:
        raise ConnectionStringError("the connection string is empty")
    return settings


def _endpoint(settings: dict[str, str], default_port: int) -> tuple[str, int]:
    endpoint = settings.get("endpoint")
    if not endpoint:
        raise ConnectionStringError("Endpoint is missing from the connection string")
    # With "=" in it, the text may hold a key, because a semicolon is missing; with "@", a password.
    shown = "" if "=" in endpoint or "@" in endpoint else f" {endpoint!r}"
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:  # its text repeats parts of the endpoint
        raise ConnectionStringError(f"Endpoint{shown} is not a URL such as sb://host or sb://host:port") from None
    if parts.scheme not in _SCHEMES or not host:
        raise ConnectionStringError(f"Endpoint{shown} is not of the form sb://host or sb://host:port")
    return host, default_port if port is None else port
