"""Options for the two namespaces of a verb, and clients that are made from what these options have.

A namespace is given by its connection string, which has a key, or by its host, with the credential of --credential. A
verb uses no other credential. A text that is neither is refused before the verb contacts any namespace.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.errors import WrongUsageError
from twinbus.cli.network import credential_name, network_of
from twinbus.errors import OperatorError

if TYPE_CHECKING:
    from azure.servicebus.aio import ServiceBusClient
    from azure.servicebus.management import ServiceBusAdministrationClient

    from twinbus.backlog import Endpoint, FailureKind
    from twinbus.connect import ConnectionString
    from twinbus.ledger import Ledger
    from twinbus.pairing import Administration, AioAdministration, SharedState
    from twinbus.syphon import Discovery, NamespaceAccess, NativeTransport, Transport

NOT_TYPED: Final = "Other users can read a command line: use the variable or twinbus.toml."

Primary = Annotated[
    str,
    typer.Option(
        "--primary",
        envvar="TWINBUS_PRIMARY_CONNECTION_STRING",
        show_envvar=True,
        show_default=False,
        help=f"Connection string of the primary, or its host with --credential. {NOT_TYPED}",
    ),
]
Secondary = Annotated[
    str,
    typer.Option(
        "--secondary",
        envvar="TWINBUS_SECONDARY_CONNECTION_STRING",
        show_envvar=True,
        show_default=False,
        help=f"Connection string of the secondary, or its host with --credential. {NOT_TYPED}",
    ),
]
OptionalSecondary = Annotated[
    str | None,
    typer.Option(
        "--secondary",
        envvar="TWINBUS_SECONDARY_CONNECTION_STRING",
        show_envvar=True,
        show_default=False,
        help=f"Connection string of the secondary, or its host with --credential. {NOT_TYPED}",
    ),
]
PrimaryName = Annotated[
    str | None,
    typer.Option(
        envvar="TWINBUS_PRIMARY_NAME",
        help="First part of the backlog queues' paths, if the application sets primary_name.",
    ),
]
Count = Annotated[
    int,
    typer.Option(
        min=1, envvar="TWINBUS_BACKLOG_QUEUE_COUNT", show_envvar=True, help="The application's backlog_queue_count."
    ),
]
State = Annotated[
    str | None,
    typer.Option(
        "--state",
        envvar="TWINBUS_STATE",
        show_envvar=True,
        show_default="none",
        help="The application's state: a folder, or `secondary`.",
    ),
]
Seconds = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each request.")]


def address(side: str, text: str) -> ConnectionString:
    """Return the address in a connection string or host. Raises WrongUsageError; does not contact the namespace."""
    from twinbus.connect import ConnectionString, ConnectionStringError  # noqa: PLC0415

    try:
        found = ConnectionString.of(text)
    except ConnectionStringError as error:
        raise WrongUsageError(
            f"--{side}: {error}",
            "The portal shows a namespace's connection strings; `twinbus serve` prints those of local ones.",
        ) from None
    if not found.has_key and credential_name() is None:
        raise WrongUsageError(
            f"--{side}: {found.host} is a host name, which has no key",
            "Sign in with --credential default, cli, environment or managed-identity. Or give a connection string.",
        )
    return found


def endpoint(side: str, text: str) -> Endpoint:
    """Return the endpoint of a namespace. Raises WrongUsageError; does not contact the namespace."""
    from twinbus.backlog import Endpoint  # noqa: PLC0415

    found = address(side, text)
    return Endpoint.of(found.host, found.port)


def _credential() -> Any:
    """Return the credential of --credential, for sync clients. Raises MissingExtraError."""
    from twinbus.connect import named_credential  # noqa: PLC0415 - slow

    name = credential_name()
    assert name is not None, "`address` refuses a host without a credential"
    return named_credential(name)


def backlog_name(primary: str, given: str | None) -> str:
    """Return the primary's name in the paths of backlog queues. Applications compute the same name (P4)."""
    from twinbus.backlog import primary_name  # noqa: PLC0415
    from twinbus.pairing import SendAvailabilityOptions  # noqa: PLC0415 - slow

    return SendAvailabilityOptions(primary_name=given).primary_name or primary_name(endpoint("primary", primary))


def require_two_namespaces(primary: str, secondary: str) -> None:
    """Raise WrongUsageError if both are the same namespace (P3)."""
    if endpoint("primary", primary) == endpoint("secondary", secondary):
        raise WrongUsageError("--primary and --secondary are the same namespace", "Give two different namespaces.")


def administration(text: str, seconds: float, *, side: str = "secondary") -> Administration:
    from twinbus.pairing import Administration  # noqa: PLC0415 - slow

    found, options = address(side, text), network_of(side).http_options()
    if found.has_key:
        return Administration.from_connection_string(text, seconds=seconds, **options)
    return Administration.with_credential(found.namespace, _credential(), seconds=seconds, **options)


def administration_client(text: str, *, side: str, **options: Any) -> ServiceBusAdministrationClient:
    """Return the SDK's own administration client. `options` are for each of its requests."""
    from azure.servicebus.management import ServiceBusAdministrationClient  # noqa: PLC0415 - slow

    found, options = address(side, text), {**network_of(side).http_options(), **options}
    if found.has_key:
        return ServiceBusAdministrationClient.from_connection_string(text, **options)
    return ServiceBusAdministrationClient(found.namespace, _credential(), **options)


def aio_administration(text: str, seconds: float, *, side: str = "secondary", **more: Any) -> AioAdministration:
    """Return the management of a namespace. `more` are further options of the SDK's client."""
    from twinbus.connect import AioCredential  # noqa: PLC0415 - slow
    from twinbus.pairing import AioAdministration  # noqa: PLC0415

    found, options = address(side, text), {**network_of(side).http_options(), **more}
    if found.has_key:
        return AioAdministration.from_connection_string(text, seconds=seconds, **options)
    return AioAdministration.with_credential(found.namespace, AioCredential(_credential()), seconds=seconds, **options)


def aio_client(text: str, *, side: str = "primary") -> ServiceBusClient:
    """Return a client of the SDK that reaches the namespace in the way that the verb was given."""
    from azure.servicebus.aio import ServiceBusClient  # noqa: PLC0415 - slow

    from twinbus.connect import AioCredential  # noqa: PLC0415

    found = address(side, text)
    options = network_of(side).client_options(found, is_aio=True)
    if found.has_key:
        return ServiceBusClient.from_connection_string(text, **options)
    return ServiceBusClient(found.namespace, AioCredential(_credential()), **options)


def access(text: str, *, side: str) -> NamespaceAccess:
    """Return the access of our own client to a namespace, in the way that the verb was given."""
    from twinbus.syphon import NamespaceAccess  # noqa: PLC0415 - slow

    address(side, text)  # refuses a text that cannot be used
    return NamespaceAccess.of(text, network_of(side), credential_name())


def native_transport(primary: str, secondary: str, seconds: float) -> NativeTransport:
    from twinbus.syphon import NativeTransport  # noqa: PLC0415 - slow

    return NativeTransport(access(primary, side="primary"), access(secondary, side="secondary"), try_timeout=seconds)


def discovery(
    name: str, secondary: str, transport: Transport, seconds: float, ledger: Ledger | None = None
) -> Discovery:
    """Return a Discovery, which finds the backlog queues of this primary on the secondary.

    It lists the queues if the key has the right to list them. Otherwise it tries the possible paths. The list requests
    are recorded in the ledger (M1).
    """
    from twinbus.backlog import primary_name  # noqa: PLC0415 - slow
    from twinbus.pairing import OperationRecorder  # noqa: PLC0415
    from twinbus.syphon import ListedDiscovery, ListedOrSearchedDiscovery, SearchedDiscovery  # noqa: PLC0415

    administration = aio_administration(secondary, seconds)
    administration.recorder = OperationRecorder(ledger, primary_name(endpoint("secondary", secondary)))
    return ListedOrSearchedDiscovery(ListedDiscovery(name, administration), SearchedDiscovery(name, transport))


@asynccontextmanager
async def shared_state(
    state: str, name: str, secondary: str, seconds: float, ledger: Ledger | None = None
) -> AsyncIterator[SharedState]:
    """Open the shared state of the primary with this name (S16).

    `state` is a value of the application's option `state`: a folder, or `secondary`. Operations on the secondary are
    recorded in the ledger (M1).
    """
    from twinbus.backlog import primary_name  # noqa: PLC0415 - slow
    from twinbus.pairing import OperationRecorder, SharedState, StateLocation  # noqa: PLC0415

    location = StateLocation.of(state, name)
    recorder = OperationRecorder(ledger, primary_name(endpoint("secondary", secondary)))
    async with AsyncExitStack() as stack:
        client = None
        if location.folder is None:
            client = await stack.enter_async_context(aio_client(secondary, side="secondary"))
        yield await stack.enter_async_context(SharedState(location, client, seconds=seconds, recorder=recorder))


def no_backlog_error(secondary: str, name: str) -> OperatorError:
    """Return the error for a secondary that answered and has no backlog queue of this primary."""
    return OperatorError(
        f"{endpoint('secondary', secondary).host} has no backlog queue of {name!r}",
        "Is it the right secondary? If applications set primary_name, give the same name with --primary-name.",
    )


def is_refused(error: Exception) -> bool:
    """Return whether the error will occur again until somebody changes the credential or the certificate."""
    from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind  # noqa: PLC0415

    return access_failure(error)[0] in {*CREDENTIAL_REFUSED, FailureKind.CERTIFICATE}


def namespace_name(option: str, text: str) -> str:
    """Return the name of a namespace in messages: its host, and its port if that is not the usual port of Azure."""
    from twinbus.connect import TLS_PORT  # noqa: PLC0415

    found = endpoint(option, text)
    return found.host if found.port == TLS_PORT else str(found)


def missing_entity(kind: str, path: str, where: str, near: str | None = None) -> OperatorError:
    """Return the error for an entity that is not on a namespace. `near` is an entity there with a similar path."""
    hint = "`twinbus entity list` shows what is there." if near is None else f"Is it {near!r}?"
    return OperatorError(f"{kind} {path!r} is not on {where}", f"{hint} `twinbus entity create` makes a new one.")


async def refuse_missing_on_primary(primary: str, entity: str, seconds: float) -> None:
    """Raise OperatorError if the primary answers that it has no such queue or topic.

    A primary that is away, or a key without the Send right, raises nothing.
    """
    from twinbus.backlog import FailureKind, failure_kind  # noqa: PLC0415 - slow
    from twinbus.connect import ServiceBusError  # noqa: PLC0415

    async with access(primary, side="primary").connect(timeout=seconds) as bus:
        try:
            await bus.sender(entity)
        except ServiceBusError as error:
            if failure_kind(error) is FailureKind.ENTITY_NOT_FOUND:
                raise missing_entity("queue or topic", entity, namespace_name("primary", primary)) from error


def access_error(what: str, error: Exception) -> OperatorError:
    """Return the error for a namespace that refuses the key or cannot be reached. `what` names the namespace.

    With --credential, it may be the credential that is refused: by the namespace, or by the issuer of the tokens.
    """
    from twinbus.backlog import FailureKind  # noqa: PLC0415

    kind, detail = access_failure(error)
    if kind is FailureKind.CERTIFICATE:
        return OperatorError(
            f"the certificate of {what} is not trusted: {detail}",
            "Give the certificate of its CA with --ca.",
        )
    if is_refused(error):
        hint = "Check the key's name, the key, its rights on this namespace, and this machine's clock."
        if credential_name() is not None:
            hint = "Check who is signed in, and the roles of this identity on the namespace (Azure Service Bus Data …)."
        return OperatorError(f"the {_what_was_refused()} was refused by {what}: {detail}", hint)
    return OperatorError(
        f"{what} cannot be reached: {detail}", "Check the host name, and that the namespace is running."
    )


def _what_was_refused() -> str:
    """Return what signs in to a namespace: the key, or with --credential one of the two."""
    name = credential_name()
    return "key" if name is None else f"credential {name!r}, or the key of a connection string,"


@contextmanager
def provisioning_explained() -> Iterator[None]:
    """Turn the error of a pairing whose key or credential the secondary refuses into one that says so."""
    from twinbus.backlog import CREDENTIAL_REFUSED  # noqa: PLC0415
    from twinbus.pairing import ProvisioningError  # noqa: PLC0415 - slow

    try:
        yield
    except ProvisioningError as error:
        if any(cause.kind not in CREDENTIAL_REFUSED for cause in error.causes):
            raise
        raise OperatorError(
            f"the {_what_was_refused()} was refused by the secondary: {error.causes[0].detail}",
            f"Check the key's name and the key, or the roles of the credential. {error.hint}",
        ) from error


def connection_error(side: str, error: Exception) -> OperatorError:
    """Return an OperatorError that explains an error of a client or of the administration client."""
    return access_error(f"the {side}", error)


def access_failure(error: Exception) -> tuple[FailureKind, str]:
    """Return the kind of a failure, and the text of its first cause: without hint, entity and class."""
    from twinbus.backlog import failure_kind  # noqa: PLC0415
    from twinbus.connect import ServiceBusError  # noqa: PLC0415
    from twinbus.pairing import management_failure  # noqa: PLC0415 - slow

    first: BaseException = error
    while isinstance(cause := getattr(first, "inner_exception", None) or first.__cause__, Exception):
        if isinstance(first, ServiceBusError):
            break
        first = cause
    known: FailureKind | None = getattr(error, "kind", None)
    if isinstance(first, ServiceBusError):
        return known or failure_kind(error), first.description
    failure = management_failure(error)
    text = " ".join(str(first).split()) or type(first).__name__
    return known or failure.kind, management_failure(first).detail or text
