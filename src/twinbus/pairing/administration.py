"""Runs provisioning with the SDK's administration clients, sync and aio, and tells their errors apart.

What is asked and when it is given up is decided in `provisioning_steps`; every request ends within the time given here.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import ssl
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Final, Self, TypeVar, assert_never

from azure.core.exceptions import HttpResponseError
from azure.servicebus import ServiceBusClient
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioServiceBusAdministrationClient
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.backlog import FailureKind, evidence_of
from twinbus.errors import OperatorError
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.provisioning import (
    PROPERTIES,
    CreateQueues,
    GetQueues,
    Outcomes,
    Pause,
    Provisioned,
    QueueAnswer,
    QueueFailure,
    Steps,
    provisioning_again,
    provisioning_steps,
)
from twinbus.pairing.recording import UNRECORDED
from twinbus.sdk import admin_credential

T = TypeVar("T")

# Queues are asked about side by side, so that ten silent ones cost one time-out.
_AT_ONCE: Final = 32
_LONGEST_DETAIL: Final = 200
ALL_ENTITIES: Final = "$Resources"
"""The entity, in a ledger, of requests about all of them."""


class Administration:
    """The secondary's management, for one pair. A client that was given is not closed with it.

    Its requests are put down in the `recording`, which may be set.
    """

    def __init__(
        self,
        namespace: str,
        make: Callable[[], ServiceBusAdministrationClient],
        *,
        seconds: float = 10.0,
        owned: bool = True,
    ) -> None:
        self.namespace = namespace
        self._make = make
        self._owned = owned
        self._seconds = seconds
        self._authority = LocalAuthority(self.namespace, seconds / 2)
        self.recording = UNRECORDED

    @classmethod
    def of(
        cls, client: ServiceBusClient, admin: ServiceBusAdministrationClient | None = None, *, seconds: float = 10.0
    ) -> Self:
        """With the admin client given, or one made from the credential of the client."""
        if admin is not None:
            return cls(admin.fully_qualified_namespace, lambda: admin, seconds=seconds, owned=False)
        name = client.fully_qualified_namespace
        return cls(name, lambda: ServiceBusAdministrationClient(name, management_credential(client)), seconds=seconds)

    @classmethod
    def from_connection_string(cls, text: str, *, seconds: float = 10.0) -> Self:
        client = ServiceBusAdministrationClient.from_connection_string(text)
        return cls(client.fully_qualified_namespace, lambda: client, seconds=seconds)

    @cached_property
    def client(self) -> ServiceBusAdministrationClient:
        """Made when it is first wanted: provision="assume" never does (P8)."""
        return self._make()

    def provision(self, paths: Iterable[str], options: SendAvailabilityOptions) -> Provisioned:
        """Found or created, or ProvisioningError with each cause (P7). Asks nobody with provision="assume" (P8)."""
        return self.run(_begin(paths, options))

    def provision_again(self, paths: Iterable[str]) -> Provisioned:
        """One try for those that failed, for on_secondary_down="background". Never raises."""
        return self.run(provisioning_again(paths))

    def run(self, steps: Steps, pause: Callable[[float], None] = time.sleep) -> Provisioned:
        outcomes: Any = None
        while True:
            try:
                request = steps.send(outcomes)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return] # typeshed: the value of any generator
            match request:
                case Pause(seconds):
                    pause(seconds)
                    outcomes = {}
                case GetQueues(paths):
                    outcomes = self._each(paths, self._look)
                case CreateQueues(paths):
                    outcomes = self._each(paths, self._create)
                case _:
                    assert_never(request)

    def ask(self, method: Callable[..., T], *arguments: object, **keywords: object) -> T:
        """A call of the client's, in our own time, trusting a local namespace."""
        began = time.monotonic()
        try:
            found = method(*arguments, **request_keywords(self._seconds, self._authority.file()), **keywords)
        except Exception as error:
            _not_done(self, arguments, began, error)
            raise
        self.recording.managed(_about(arguments), began)
        return found

    def close(self) -> None:
        self._authority.close()
        if self._owned and "client" in self.__dict__:
            self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(
        self, paths: tuple[str, ...], one: Callable[[ServiceBusAdministrationClient, str], QueueAnswer | QueueFailure]
    ) -> Outcomes:
        client = self.client
        with ThreadPoolExecutor(min(len(paths), _AT_ONCE), thread_name_prefix="twinbus-provision") as pool:
            return dict(zip(paths, pool.map(partial(one, client), paths), strict=True))

    def _look(self, client: ServiceBusAdministrationClient, path: str) -> QueueAnswer | QueueFailure:
        try:
            self.ask(client.get_queue, path)
        except Exception as error:
            return looked(error)
        return QueueAnswer.FOUND

    def _create(self, client: ServiceBusAdministrationClient, path: str) -> QueueAnswer | QueueFailure:
        try:
            self.ask(client.create_queue, path, **PROPERTIES)
        except Exception as error:
            return created(error)
        return QueueAnswer.CREATED


class AioAdministration:
    """The same for asyncio."""

    def __init__(
        self,
        namespace: str,
        make: Callable[[], AioServiceBusAdministrationClient],
        *,
        seconds: float = 10.0,
        owned: bool = True,
    ) -> None:
        self.namespace = namespace
        self._make = make
        self._owned = owned
        self._seconds = seconds
        self._authority = LocalAuthority(self.namespace, seconds / 2)
        self.recording = UNRECORDED

    @classmethod
    def of(
        cls,
        client: AioServiceBusClient,
        admin: AioServiceBusAdministrationClient | None = None,
        *,
        seconds: float = 10.0,
    ) -> Self:
        """With the admin client given, or one made from the credential of the client."""
        if admin is not None:
            return cls(admin.fully_qualified_namespace, lambda: admin, seconds=seconds, owned=False)
        name = client.fully_qualified_namespace
        return cls(
            name, lambda: AioServiceBusAdministrationClient(name, management_credential(client)), seconds=seconds
        )

    @classmethod
    def from_connection_string(cls, text: str, *, seconds: float = 10.0) -> Self:
        client = AioServiceBusAdministrationClient.from_connection_string(text)
        return cls(client.fully_qualified_namespace, lambda: client, seconds=seconds)

    @cached_property
    def client(self) -> AioServiceBusAdministrationClient:
        """Made when it is first wanted: provision="assume" never does (P8)."""
        return self._make()

    async def provision(self, paths: Iterable[str], options: SendAvailabilityOptions) -> Provisioned:
        """Found or created, or ProvisioningError with each cause (P7). Asks nobody with provision="assume" (P8)."""
        return await self.run(_begin(paths, options))

    async def provision_again(self, paths: Iterable[str]) -> Provisioned:
        """One try for those that failed, for on_secondary_down="background". Never raises."""
        return await self.run(provisioning_again(paths))

    async def run(self, steps: Steps, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Provisioned:
        outcomes: Any = None
        while True:
            try:
                request = steps.send(outcomes)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return] # typeshed: the value of any generator
            match request:
                case Pause(seconds):
                    await pause(seconds)
                    outcomes = {}
                case GetQueues(paths):
                    outcomes = await self._each(paths, self._look)
                case CreateQueues(paths):
                    outcomes = await self._each(paths, self._create)
                case _:
                    assert_never(request)

    async def ask(self, method: Callable[..., Awaitable[T]], *arguments: object, **keywords: object) -> T:
        """A call of the client's, in our own time, trusting a local namespace."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds):
                # Only a local namespace is ever asked for its authority: no other costs a thread.
                authority = await asyncio.to_thread(self._authority.file) if self._authority.is_for else None
                found = await method(*arguments, **request_keywords(self._seconds, authority), **keywords)
        except Exception as error:
            _not_done(self, arguments, began, error)
            raise
        self.recording.managed(_about(arguments), began)
        return found

    async def close(self) -> None:
        self._authority.close()
        if self._owned and "client" in self.__dict__:
            await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _each(
        self,
        paths: tuple[str, ...],
        one: Callable[[AioServiceBusAdministrationClient, str], Awaitable[QueueAnswer | QueueFailure]],
    ) -> Outcomes:
        client, permits = self.client, asyncio.Semaphore(_AT_ONCE)

        async def permitted(path: str) -> QueueAnswer | QueueFailure:
            async with permits:
                return await one(client, path)

        return dict(zip(paths, await asyncio.gather(*map(permitted, paths)), strict=True))

    async def _look(self, client: AioServiceBusAdministrationClient, path: str) -> QueueAnswer | QueueFailure:
        try:
            await self.ask(client.get_queue, path)
        except Exception as error:
            return looked(error)
        return QueueAnswer.FOUND

    async def _create(self, client: AioServiceBusAdministrationClient, path: str) -> QueueAnswer | QueueFailure:
        try:
            await self.ask(client.create_queue, path, **PROPERTIES)
        except Exception as error:
            return created(error)
        return QueueAnswer.CREATED


# --- what both share -------------------------------------------------------------------------------------------------


def _about(arguments: Sequence[object]) -> str:
    """The entity that is asked about; a listing is about all."""
    return arguments[0] if arguments and isinstance(arguments[0], str) else ALL_ENTITIES


def _not_done(
    asked: Administration | AioAdministration, arguments: Sequence[object], began: float, error: Exception
) -> None:
    kind = management_failure(error).kind
    asked.recording.managed(_about(arguments), began, failure=kind)
    if kind is FailureKind.CERTIFICATE:
        asked._authority.forget()


def _begin(paths: Iterable[str], options: SendAvailabilityOptions) -> Steps:
    return provisioning_steps(
        paths, assume=options.provision == "assume", background=options.on_secondary_down == "background"
    )


def request_keywords(seconds: float, authority: str | None) -> dict[str, Any]:
    """One attempt per request, ours to repeat; connecting and reading together take no longer than `seconds`."""
    keywords: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": seconds / 2,
        "read_timeout": seconds / 2,
    }
    if authority is not None:
        keywords["connection_verify"] = authority
    return keywords


def management_credential(client: ServiceBusClient | AioServiceBusClient) -> Any:
    """The credential a client was made with, as an administration client takes it."""
    credential = admin_credential(client)
    if credential is None:
        raise OperatorError(
            "the secondary's client has a shared access signature, which its management does not take",
            'Give secondary_admin=, or let an operator run `twinbus provision` and pair with provision="assume".',
        )
    return credential


def looked(error: Exception) -> QueueAnswer | QueueFailure:
    failure = management_failure(error)
    return QueueAnswer.MISSING if failure.kind is FailureKind.ENTITY_NOT_FOUND else failure


def created(error: Exception) -> QueueAnswer | QueueFailure:
    # 40901 is a conflict with an operation under way, not with a queue that exists.
    if getattr(error, "status_code", None) == 409 and "40901" not in str(error):
        return QueueAnswer.EXISTS
    return management_failure(error)


_STATUSES: Final = {
    400: FailureKind.BAD_MESSAGE,
    401: FailureKind.UNAUTHORIZED,
    404: FailureKind.ENTITY_NOT_FOUND,
    408: FailureKind.TIMEOUT,
    429: FailureKind.SERVER_BUSY,
    503: FailureKind.SERVER_BUSY,
    504: FailureKind.TIMEOUT,
}
_TEXTS: Final = (
    ("CERTIFICATE_VERIFY_FAILED", FailureKind.CERTIFICATE),
    ("Certificate verify failed", FailureKind.CERTIFICATE),
    ("NameResolutionError", FailureKind.DNS),
    ("Name or service not known", FailureKind.DNS),
    ("Connection refused", FailureKind.CONNECTION_LOST),
    ("timed out", FailureKind.TIMEOUT),
)
_NAMES: Final = (
    ("ResourceNotFoundError", FailureKind.ENTITY_NOT_FOUND),
    ("ClientAuthenticationError", FailureKind.AUTHENTICATION),
    ("CredentialUnavailableError", FailureKind.AUTHENTICATION),
    ("ServiceRequestTimeoutError", FailureKind.TIMEOUT),
    ("ServiceResponseTimeoutError", FailureKind.TIMEOUT),
    ("TimeoutError", FailureKind.TIMEOUT),
    ("gaierror", FailureKind.DNS),
    ("SSLError", FailureKind.TLS),
    ("ServiceRequestError", FailureKind.CONNECTION_LOST),
    ("ServiceResponseError", FailureKind.CONNECTION_LOST),
    ("OSError", FailureKind.CONNECTION_LOST),
)


def management_failure(error: BaseException) -> QueueFailure:
    """What an error of an administration client is called: by its status, or by how the service was not reached."""
    return QueueFailure(_kind_of(error), " ".join(str(error).split())[:_LONGEST_DETAIL])


def _kind_of(error: BaseException) -> FailureKind:
    text = str(error)
    status = error.status_code if isinstance(error, HttpResponseError) else None
    if status == 403:
        # The service says 403 when the namespace is full; what stands before it says so when it lets nobody in.
        return FailureKind.QUOTA_EXCEEDED if "quota" in text.lower() else FailureKind.UNAUTHORIZED
    if status is not None:
        return _STATUSES.get(status, FailureKind.INTERNAL)
    for part, kind in _TEXTS:
        if part in text:
            return kind
    names = evidence_of(error).names
    return next((kind for name, kind in _NAMES if name in names), FailureKind.UNKNOWN)


AUTHORITY_PATH: Final = "/$ca"
_HTTPS_PORT: Final = 443
_MOST_BYTES: Final = 64 * 1024


class LocalAuthority:
    """The certificate file for `connection_verify=`, fetched when it is first wanted, removed on close."""

    def __init__(self, namespace: str, seconds: float) -> None:
        self._host, self._port = split_namespace(namespace)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._fetches = 0
        self._file: tempfile._TemporaryFileWrapper[bytes] | None = None

    @property
    def is_for(self) -> bool:
        """Whether the namespace is one on this machine."""
        return is_loopback(self._host)

    def file(self) -> str | None:
        """None where nothing is offered: then the client verifies as it always does. Blocks."""
        before = self._fetches
        with self._lock:
            # Whoever waited here for another's fetch takes what came of it: ten queues ask a silent namespace once.
            if self._file is None and self.is_for and self._fetches == before:
                self._fetches += 1
                offered = fetch_authority(self._host, self._port, self._seconds)
                if offered is not None:
                    # Kept open: closing removes it.
                    self._file = tempfile.NamedTemporaryFile(prefix="twinbus-ca-", suffix=".pem")  # noqa: SIM115
                    self._file.write(offered.encode("ascii"))
                    self._file.flush()
            return None if self._file is None else self._file.name

    def forget(self) -> None:
        """A namespace that was started anew may have another authority."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    close = forget


def split_namespace(namespace: str) -> tuple[str, int]:
    """Host and port of a `fully_qualified_namespace`."""
    host, colon, port = namespace.rpartition(":")
    if colon and port.isdigit() and not host.endswith(":") and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(port)
    return namespace.strip("[]"), _HTTPS_PORT


def is_loopback(host: str) -> bool:
    plain = host.rstrip(".").lower()
    if plain == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain.partition("%")[0]).is_loopback
    except ValueError:
        return False


def fetch_authority(host: str, port: int, seconds: float) -> str | None:
    """The PEM text that a local namespace offers; None if nobody there offers one."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.connect()
        # Whatever the machine's resolver makes of the name: the certificate comes from this machine or not at all.
        if not is_loopback(str(connection.sock.getpeername()[0])):
            return None
        connection.request("GET", AUTHORITY_PATH)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            return None
        text = response.read(_MOST_BYTES).decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
        return text
    except (OSError, http.client.HTTPException, ValueError):
        # ssl.SSLError is an OSError: what is no certificate is not trusted.
        return None
    finally:
        connection.close()
