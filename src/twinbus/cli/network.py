"""Options for the way to the namespaces: WebSocket, proxy, custom endpoints, CA, and the credential for Entra ID.

`network_options` adds them to a verb. The verb itself does not see them. While it runs, `network_of` returns what was
given for one side, and `credential_name` the credential. The credentials of a proxy come from an environment variable
or from twinbus.toml, never from the command line.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.errors import WrongUsageError, errors_reported

if TYPE_CHECKING:
    from twinbus.connect import NetworkOptions

PROXY_CREDENTIALS: Final = "TWINBUS_PROXY_CREDENTIALS"


class Way(StrEnum):
    """Values of --transport-type."""

    AMQP = "amqp"
    WEBSOCKET = "websocket"


_Type = Annotated[
    Way | None,
    typer.Option(
        "--transport-type",
        envvar="TWINBUS_TRANSPORT_TYPE",
        show_envvar=True,
        show_default="amqp",
        help="How AMQP travels: amqp (port 5671), or websocket (port 443).",
    ),
]
_Proxy = Annotated[
    str | None,
    typer.Option(
        "--proxy",
        metavar="http://HOST:PORT",
        envvar="TWINBUS_PROXY",
        show_envvar=True,
        show_default="none",
        help=f"HTTP proxy, for AMQP in a WebSocket and for the management API. Its credentials: {PROXY_CREDENTIALS}="
        "user:password, or twinbus.toml.",
    ),
]
_Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        envvar="TWINBUS_CA",
        show_envvar=True,
        show_default="the system's",
        help="File with the certificates to trust.",
    ),
]
_PrimaryEndpoint = Annotated[
    str | None,
    typer.Option(
        "--primary-endpoint",
        metavar="sb://HOST[:PORT]",
        envvar="TWINBUS_PRIMARY_ENDPOINT",
        show_default="the namespace",
        help="Where to connect for AMQP to the primary, such as an application gateway.",
    ),
]
_SecondaryEndpoint = Annotated[
    str | None,
    typer.Option(
        "--secondary-endpoint",
        metavar="sb://HOST[:PORT]",
        envvar="TWINBUS_SECONDARY_ENDPOINT",
        show_default="the namespace",
        help="The same for the secondary.",
    ),
]
_Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="sb://HOST[:PORT]",
        envvar="TWINBUS_ENDPOINT",
        show_default="the namespace",
        help="Where to connect for AMQP, such as an application gateway.",
    ),
]
_Credential = Annotated[
    str | None,
    typer.Option(
        "--credential",
        metavar="NAME",
        envvar="TWINBUS_CREDENTIAL",
        show_envvar=True,
        show_default="none",
        help="Sign in with Entra ID to namespaces given by host: default, cli, environment or managed-identity[=ID].",
    ),
]
# By side, the name and the type of the option with its custom endpoint.
_PAIR: Final = {
    "primary": ("primary-endpoint", _PrimaryEndpoint),
    "secondary": ("secondary-endpoint", _SecondaryEndpoint),
}
_NAMESPACE: Final = {"namespace": ("endpoint", _Endpoint)}
_GIVEN: ContextVar[dict[str, NetworkOptions]] = ContextVar("network")
_CREDENTIAL: ContextVar[str | None] = ContextVar("credential", default=None)


def network_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb for a pair: it takes the options of this module too."""
    return _with_options(verb, _PAIR)


def namespace_network_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb for one namespace: it takes the options of this module too."""
    return _with_options(verb, _NAMESPACE)


def credential_option(verb: Callable[..., None]) -> Callable[..., None]:
    """Decorate a verb for a local namespace: it takes --credential too."""
    return _decorated(verb, {"credential": _Credential}, lambda given: {})


def _with_options(verb: Callable[..., None], sides: Mapping[str, tuple[str, Any]]) -> Callable[..., None]:
    endpoints = {side: name for side, (name, _) in sides.items()}
    options: dict[str, Any] = {"credential": _Credential, "transport_type": _Type, "proxy": _Proxy}
    options |= {name.replace("-", "_"): kind for name, kind in sides.values()}
    options["ca"] = _Authority
    return _decorated(verb, options, lambda given: _read(given, endpoints))


def _decorated(
    verb: Callable[..., None],
    options: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], dict[str, NetworkOptions]],
) -> Callable[..., None]:
    """Return the verb with these options too. `read` makes what `network_of` returns from their values."""
    own = inspect.signature(verb, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in options.items()
    ]

    @functools.wraps(verb)
    def run(*args: Any, **values: Any) -> None:
        given = {name: values.pop(name) for name in options}
        with errors_reported(debug=bool(values.get("debug"))):
            credential = _checked_credential(given.pop("credential"))
            network = read(given)
        tokens = _GIVEN.set(network), _CREDENTIAL.set(credential)
        try:
            verb(*args, **values)
        finally:
            _GIVEN.reset(tokens[0])
            _CREDENTIAL.reset(tokens[1])

    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.parameters.values()]
    run.__signature__ = own.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {**verb.__annotations__, **options}
    return run


def network_of(side: str) -> NetworkOptions:
    """Return the options for `primary`, `secondary` or `namespace` of the verb that runs."""
    from twinbus.connect import NetworkOptions  # noqa: PLC0415 - slow

    return _GIVEN.get({}).get(side) or NetworkOptions()


def credential_name() -> str | None:
    """Return the name of the credential of the verb that runs, or None."""
    return _CREDENTIAL.get()


def _checked_credential(name: str | None) -> str | None:
    """Return the value of --credential. Raises WrongUsageError."""
    if name is None:
        return None
    from twinbus.connect import CredentialNameError, check_credential_name  # noqa: PLC0415 - slow

    try:
        return check_credential_name(name)
    except CredentialNameError as error:
        raise WrongUsageError(f"--credential: {error}") from None


def _read(given: Mapping[str, Any], endpoints: Mapping[str, str]) -> dict[str, NetworkOptions]:
    if not any(given.values()):
        return {}
    from twinbus.connect import TRANSPORT_NAMES, HttpProxy, NetworkOptionError, NetworkOptions  # noqa: PLC0415 - slow

    proxy, ca = given["proxy"], given["ca"]
    try:
        found = None if proxy is None else HttpProxy.parse(proxy, os.environ.get(PROXY_CREDENTIALS))
    except NetworkOptionError as error:
        raise WrongUsageError(f"--proxy: {error}", f"Give its credentials in {PROXY_CREDENTIALS}.") from None
    made = {}
    for side, option in endpoints.items():
        try:
            made[side] = NetworkOptions(
                transport_type=TRANSPORT_NAMES.get(given["transport_type"]),
                http_proxy=found,
                custom_endpoint_address=given[option.replace("-", "_")],
                connection_verify=None if ca is None else str(ca),
            )
        except NetworkOptionError as error:
            raise WrongUsageError(f"--{option}: {error}") from None
    return made
