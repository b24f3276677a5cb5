"""Which two namespaces a verb is about: the options for it, and clients made from the connection strings given.

No other credential is used or looked for: what is no connection string is refused before anything is contacted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.errors import OperatorError, TwinbusError

if TYPE_CHECKING:
    from azure.servicebus.aio import ServiceBusClient

    from twinbus.backlog import Endpoint
    from twinbus.ledger import Ledger
    from twinbus.pairing import Administration, AioAdministration
    from twinbus.syphon import Discovery, Transport

Primary = Annotated[
    str,
    typer.Option(
        "--primary",
        envvar="TWINBUS_PRIMARY_CONNECTION_STRING",
        show_envvar=True,
        show_default=False,
        help="Connection string of the primary.",
    ),
]
Secondary = Annotated[
    str,
    typer.Option(
        "--secondary",
        envvar="TWINBUS_SECONDARY_CONNECTION_STRING",
        show_envvar=True,
        show_default=False,
        help="Connection string of the secondary.",
    ),
]
PrimaryName = Annotated[
    str | None,
    typer.Option(
        envvar="TWINBUS_PRIMARY_NAME",
        help="First part of the backlog queues' paths, where the application sets primary_name.",
    ),
]
Count = Annotated[
    int,
    typer.Option(
        min=1, envvar="TWINBUS_BACKLOG_QUEUE_COUNT", show_envvar=True, help="backlog_queue_count of the application."
    ),
]
Seconds = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each request.")]


def endpoint(side: str, text: str) -> Endpoint:
    """Where it is. Nothing is contacted."""
    from twinbus.backlog import Endpoint  # noqa: PLC0415
    from twinbus.connect import ConnectionString, ConnectionStringError  # noqa: PLC0415

    try:
        found = ConnectionString.parse(text)
    except ConnectionStringError as error:
        raise OperatorError(
            f"--{side}: {error}",
            "The portal shows a namespace's connection strings; `twinbus serve` prints those of local ones.",
        ) from None
    return Endpoint.of(found.host, found.port)


def backlog_name(primary: str, given: str | None) -> str:
    """P4: the name of the primary, as applications that pair with it make it."""
    from twinbus.backlog import primary_name  # noqa: PLC0415
    from twinbus.pairing import SendAvailabilityOptions  # noqa: PLC0415 - slow

    return SendAvailabilityOptions(primary_name=given).primary_name or primary_name(endpoint("primary", primary))


def require_two_namespaces(primary: str, secondary: str) -> None:
    """P3."""
    from twinbus.backlog import same_endpoint  # noqa: PLC0415 - other verbs start without it

    if same_endpoint(endpoint("primary", primary), endpoint("secondary", secondary)):
        raise OperatorError("--primary and --secondary are the same namespace", "Name two different ones.")


def administration(text: str, seconds: float) -> Administration:
    from twinbus.pairing import Administration  # noqa: PLC0415 - slow

    return Administration.from_connection_string(text, seconds=seconds)


def aio_administration(text: str, seconds: float) -> AioAdministration:
    from twinbus.pairing import AioAdministration  # noqa: PLC0415 - slow

    return AioAdministration.from_connection_string(text, seconds=seconds)


def aio_client(text: str) -> ServiceBusClient:
    from azure.servicebus.aio import ServiceBusClient  # noqa: PLC0415 - slow

    return ServiceBusClient.from_connection_string(text)


def discovery(
    name: str, secondary: str, transport: Transport, seconds: float, ledger: Ledger | None = None
) -> Discovery:
    """The backlog queues of the primary of this name, listed where the key may; the requests are in the ledger (M1)."""
    from twinbus.backlog import primary_name  # noqa: PLC0415 - slow
    from twinbus.pairing import OperationRecorder  # noqa: PLC0415
    from twinbus.syphon import ListedDiscovery, ListedOrSearchedDiscovery, SearchedDiscovery  # noqa: PLC0415

    asked = aio_administration(secondary, seconds)
    asked.recording = OperationRecorder(ledger, primary_name(endpoint("secondary", secondary)))
    return ListedOrSearchedDiscovery(ListedDiscovery(name, asked), SearchedDiscovery(name, transport))


def no_backlog_error(secondary: str, name: str) -> OperatorError:
    """The secondary answered, and has none."""
    return OperatorError(
        f"{endpoint('secondary', secondary).host} has no backlog queue of {name!r}",
        "Is this its secondary? Where applications set primary_name, give it as --primary-name.",
    )


def is_refused(error: Exception) -> bool:
    """Time alone does not mend it."""
    from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind  # noqa: PLC0415
    from twinbus.pairing import management_failure  # noqa: PLC0415 - slow

    kind = getattr(error, "kind", None) or management_failure(error).kind
    return kind in {*CREDENTIAL_REFUSED, FailureKind.CERTIFICATE}


def connection_error(side: str, error: Exception) -> OperatorError:
    """An error of the administration client, for a person."""
    from twinbus.backlog import FailureKind  # noqa: PLC0415
    from twinbus.pairing import management_failure  # noqa: PLC0415 - slow

    if isinstance(error, TwinbusError) and is_refused(error):
        return OperatorError(
            f"the {side} refuses the key: {error}", "Look at the key's name, the key itself, and its rights there."
        )
    if isinstance(error, TwinbusError):
        return OperatorError(f"the {side} cannot be reached: {error}", "Is it there, and is the key its own?")
    failure = management_failure(error)
    hints = {
        FailureKind.UNAUTHORIZED: "The key or identity needs the Manage right on this namespace.",
        FailureKind.AUTHENTICATION: "The credential was refused: look at its key name and key.",
        FailureKind.CERTIFICATE: "Name its certificate authority in REQUESTS_CA_BUNDLE.",
    }
    hint = hints.get(failure.kind, "Is the namespace there, and does its management answer?")
    return OperatorError(f"the {side} cannot be inspected ({failure.kind}): {failure.detail}", hint)
