"""Manage the secondary with the SDK's administration clients, sync and asyncio: provisioning and its errors.

`provisioning` decides which requests are made. Every request ends within `seconds` and is recorded.
Certificates are always verified; `local_authority` fetches the CA of a local namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import queue
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, assert_never

from azure.core.exceptions import AzureError, HttpResponseError
from azure.core.pipeline.transport import RequestsTransport
from azure.servicebus import ServiceBusClient
from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.backlog import FailureKind, evidence_of, state_queue_path
from twinbus.errors import OperatorError
from twinbus.extras import is_installed
from twinbus.pairing.daemon_thread import in_daemon_thread
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.local_authority import LocalAuthority, is_loopback, split_namespace
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.provisioning import (
    PROPERTIES,
    CreateQueues,
    FoundUnsafe,
    GetQueues,
    Outcomes,
    Pause,
    Provisioned,
    ProvisioningSteps,
    QueueAnswer,
    QueueFailure,
    QueueOutcome,
    losing_properties,
    provisioning_again,
    provisioning_steps,
)
from twinbus.pairing.recording import NO_RECORDER
from twinbus.pairing.state_queue import STATE_PROPERTIES
from twinbus.sdk import admin_credential, administration_options, connection_settings, sync_admin_credential

if TYPE_CHECKING:
    from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
    from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioServiceBusAdministrationClient

T = TypeVar("T")

# Requests for several queues run at the same time, so that ten queues without an answer take the time of one timeout.
_AT_ONCE: Final = 32
_LONGEST_DETAIL: Final = 200
_DETAIL: Final = re.compile(r"<Detail>(.*?)</Detail>", re.DOTALL)
_CREDENTIALS: Final = re.compile(r"//[^/@\s]+@")
ALL_ENTITIES: Final = "$Resources"
"""The name of the entity that the ledger shows for a request that lists all entities."""


class Administration:
    """The management of one secondary. `close` closes the SDK's client only if `owned` is true.

    `recorder` records the requests. `on_answer` is called for each answer of the secondary, also in other threads. The
    caller may replace both.
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
        self.recorder = NO_RECORDER
        self.on_answer: Callable[[], object] = _nothing

    @classmethod
    def of(
        cls, client: ServiceBusClient, admin: ServiceBusAdministrationClient | None = None, *, seconds: float = 10.0
    ) -> Self:
        """Return an administration that uses `admin`; if it is None, a client made with the credential of `client`."""
        if admin is not None:
            return cls(admin.fully_qualified_namespace, lambda: admin, seconds=seconds, owned=False)
        name = _managed_namespace(client)

        def make() -> ServiceBusAdministrationClient:
            options = administration_options(client)
            credential, transport = management_credential(client), ClosingTransport(**options)
            return ServiceBusAdministrationClient(name, credential, transport=transport, **options)

        return cls(name, make, seconds=seconds)

    @classmethod
    def from_connection_string(cls, text: str, *, seconds: float = 10.0, **options: Any) -> Self:
        """`options` are for the SDK's client: `proxies`, `connection_verify`."""
        transport = ClosingTransport(**options)
        client = ServiceBusAdministrationClient.from_connection_string(text, transport=transport, **options)
        return cls(client.fully_qualified_namespace, lambda: client, seconds=seconds)

    @classmethod
    def with_credential(cls, namespace: str, credential: Any, *, seconds: float = 10.0, **options: Any) -> Self:
        """Return an administration of a host (`host` or `host:port`) with a sync TokenCredential."""
        client = ServiceBusAdministrationClient(namespace, credential, transport=ClosingTransport(**options), **options)
        return cls(namespace, lambda: client, seconds=seconds)

    @cached_property
    def client(self) -> ServiceBusAdministrationClient:
        """The SDK's client. It is made at the first use, because provision="assume" never uses it (P8)."""
        return self._make()

    def provision(self, paths: Iterable[str], options: SendAvailabilityOptions) -> Provisioned:
        """Find or create the queues. Raises ProvisioningError with each cause (P7). No requests with "assume" (P8)."""
        return self.run(_begin(paths, options))

    def provision_again(self, paths: Iterable[str]) -> Provisioned:
        """Try once more to find or create queues: those that failed at pairing, or were deleted since. Never raises."""
        return self.run(provisioning_again(paths))

    def run(self, steps: ProvisioningSteps, pause: Callable[[float], None] = time.sleep) -> Provisioned:
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
                    outcomes = self._each(paths, self._look_up)
                case CreateQueues(paths):
                    outcomes = self._each(paths, self._create)
                case _:
                    assert_never(request)

    def request(self, method: Callable[..., T], *arguments: object, **keywords: object) -> T:
        """Call a method of the client within our timeout, trusting a local namespace. Records the request."""
        started = time.monotonic()
        try:
            authority = self._authority.file()
            try:
                found = method(*arguments, **request_keywords(self._seconds, authority), **keywords)
            except Exception as error:
                if not _is_authority_outdated(self._authority, error):
                    raise
                authority = self._authority.instead_of(authority)
                found = method(*arguments, **request_keywords(self._seconds, authority), **keywords)
        except Exception as error:
            _record_failure(self, arguments, started, error)
            raise
        self.on_answer()
        self.recorder.management(_about(arguments), started)
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
        self, paths: tuple[str, ...], one: Callable[[ServiceBusAdministrationClient, str], QueueOutcome]
    ) -> Outcomes:
        client, outcomes = self.client, dict[str, QueueOutcome]()
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for path in paths:
            waiting.put(path)

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    path = waiting.get_nowait()
                    outcomes[path] = one(client, path)

        # Not the threads of an executor: these keep a process from ending while a secondary is silent.
        threads = [
            threading.Thread(target=work, name="twinbus-provision", daemon=True)
            for _ in range(min(len(paths), _AT_ONCE))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {path: outcomes[path] for path in paths}

    def _look_up(self, client: ServiceBusAdministrationClient, path: str) -> QueueOutcome:
        try:
            queue = self.request(client.get_queue, path)
        except Exception as error:
            return lookup_result(error)
        return found_result(queue)

    def _create(self, client: ServiceBusAdministrationClient, path: str) -> QueueOutcome:
        try:
            self.request(client.create_queue, path, **PROPERTIES)
        except Exception as error:
            return creation_result(error)
        return QueueAnswer.CREATED


class ClosingTransport(RequestsTransport):  # type: ignore[misc] # azure-core loads this class by name: mypy sees Any
    """HTTP for the sync client. `close` closes the sockets (C3).

    The transport of azure-core drops its pool of connections without closing them. An error of a request, such as "not
    found", refers to the pool, and is itself kept until the garbage collector runs.
    """

    def close(self) -> None:
        managers = [] if self.session is None else [one.poolmanager for one in self.session.adapters.values()]
        pools = [manager.pools[key] for manager in managers for key in manager.pools.keys()]  # noqa: SIM118 - no dict
        super().close()
        for pool in pools:
            pool.close()


class AioAdministration:
    """The management of one secondary for asyncio. The methods are those of `Administration`."""

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
        self.recorder = NO_RECORDER
        self.on_answer: Callable[[], object] = _nothing

    @classmethod
    def of(
        cls,
        client: AioServiceBusClient,
        admin: AioServiceBusAdministrationClient | None = None,
        *,
        seconds: float = 10.0,
    ) -> Self:
        """Return an administration that uses `admin`; if it is None, a client made with the credential of `client`."""
        if admin is not None:
            return cls(admin.fully_qualified_namespace, lambda: admin, seconds=seconds, owned=False)
        name = _managed_namespace(client)

        def make() -> AioServiceBusAdministrationClient:
            return _make_aio_client(name, management_credential(client), **administration_options(client))

        return cls(name, make, seconds=seconds)

    @classmethod
    def from_connection_string(cls, text: str, *, seconds: float = 10.0, **options: Any) -> Self:
        """`options` are for the SDK's client: `proxies`, `connection_verify`."""
        client = _aio_client_of(text, **options)
        return cls(client.fully_qualified_namespace, lambda: client, seconds=seconds)

    @classmethod
    def with_credential(cls, namespace: str, credential: Any, *, seconds: float = 10.0, **options: Any) -> Self:
        """Return an administration of a host (`host` or `host:port`) with an asyncio TokenCredential."""
        client = _make_aio_client(namespace, credential, **options)
        return cls(namespace, lambda: client, seconds=seconds)

    @cached_property
    def client(self) -> AioServiceBusAdministrationClient:
        """The SDK's client. It is made at the first use, because provision="assume" never uses it (P8)."""
        return self._make()

    async def provision(self, paths: Iterable[str], options: SendAvailabilityOptions) -> Provisioned:
        """Find or create the queues. Raises ProvisioningError with each cause (P7). No requests with "assume" (P8)."""
        return await self.run(_begin(paths, options))

    async def provision_again(self, paths: Iterable[str]) -> Provisioned:
        """Try once more to find or create queues: those that failed at pairing, or were deleted since. Never raises."""
        return await self.run(provisioning_again(paths))

    async def run(
        self, steps: ProvisioningSteps, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> Provisioned:
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
                    outcomes = await self._each(paths, self._look_up)
                case CreateQueues(paths):
                    outcomes = await self._each(paths, self._create)
                case _:
                    assert_never(request)

    async def request(self, method: Callable[..., Awaitable[T]], *arguments: object, **keywords: object) -> T:
        """Call a method of the SDK's client with a timeout, and record the request.

        For a local namespace, the client trusts the certificate authority of this namespace.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds):
                # Fetching blocks, so it runs in a thread. Only a local namespace needs it.
                authority = await in_daemon_thread(self._authority.file) if self._authority.is_local else None
                try:
                    found = await method(*arguments, **request_keywords(self._seconds, authority), **keywords)
                except Exception as error:
                    if not _is_authority_outdated(self._authority, error):
                        raise
                    authority = await in_daemon_thread(partial(self._authority.instead_of, authority))
                    found = await method(*arguments, **request_keywords(self._seconds, authority), **keywords)
        except Exception as error:
            _record_failure(self, arguments, started, error)
            raise
        self.on_answer()
        self.recorder.management(_about(arguments), started)
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
        one: Callable[[AioServiceBusAdministrationClient, str], Awaitable[QueueOutcome]],
    ) -> Outcomes:
        client, permits = self.client, asyncio.Semaphore(_AT_ONCE)

        async def permitted(path: str) -> QueueOutcome:
            async with permits:
                return await one(client, path)

        return dict(zip(paths, await asyncio.gather(*map(permitted, paths)), strict=True))

    async def _look_up(self, client: AioServiceBusAdministrationClient, path: str) -> QueueOutcome:
        try:
            queue = await self.request(client.get_queue, path)
        except Exception as error:
            return lookup_result(error)
        return found_result(queue)

    async def _create(self, client: AioServiceBusAdministrationClient, path: str) -> QueueOutcome:
        try:
            await self.request(client.create_queue, path, **PROPERTIES)
        except Exception as error:
            return creation_result(error)
        return QueueAnswer.CREATED


def provision_state_queue(administration: Administration, primary: str) -> Provisioned:
    """Find or create the queue of the shared state for the primary with this name (S16, P6)."""
    path, client = state_queue_path(primary), administration.client
    found = administration._look_up(client, path)
    if found is QueueAnswer.MISSING:
        try:
            administration.request(client.create_queue, path, **STATE_PROPERTIES)
        except Exception as error:
            found = creation_result(error)
        else:
            found = QueueAnswer.CREATED
    if isinstance(found, QueueFailure):
        return Provisioned(failed=(QueueCause(path, *found),))
    return Provisioned((path,), created=(path,) if found is QueueAnswer.CREATED else ())


# --- what both share -------------------------------------------------------------------------------------------------


def _nothing() -> None:
    """Do nothing. `on_answer` is this until a caller replaces it."""


def _about(arguments: Sequence[object]) -> str:
    """Return the entity of a request, or ALL_ENTITIES for a request that lists entities."""
    return arguments[0] if arguments and isinstance(arguments[0], str) else ALL_ENTITIES


def _is_authority_outdated(authority: LocalAuthority, error: Exception) -> bool:
    """Return whether a request should be repeated with the certificate that a local namespace offers now.

    A namespace that was started again may have another authority. One that was just starting offered none.
    """
    return authority.is_local and management_failure(error).kind is FailureKind.CERTIFICATE


def _record_failure(
    administration: Administration | AioAdministration, arguments: Sequence[object], started: float, error: Exception
) -> None:
    """Record a failed request, and leave the credentials of a proxy out of the error: callers log and show it."""
    if isinstance(error, HttpResponseError):
        administration.on_answer()
    administration.recorder.management(_about(arguments), started, failure=management_failure(error).kind)
    error.args = tuple(_without_credentials(one) if isinstance(one, str) else one for one in error.args)
    if isinstance(error, AzureError):
        error.message = _without_credentials(str(error.message))
    # aiohttp's error computes its text from the address, so it cannot be changed. `error` has the same text.
    if isinstance(error.__cause__, Exception) and _CREDENTIALS.search(str(error.__cause__)):
        error.__cause__ = error.__context__ = None
        if isinstance(error, AzureError):
            error.inner_exception = None


def _without_credentials(text: str) -> str:
    """Return the text of an HTTP client without the credentials of a proxy, which it may name with its address."""
    return _CREDENTIALS.sub("//…@", text)


def _begin(paths: Iterable[str], options: SendAvailabilityOptions) -> ProvisioningSteps:
    return provisioning_steps(
        paths, assume=options.provision == "assume", background=options.on_secondary_down == "background"
    )


def request_keywords(seconds: float, authority: str | None) -> dict[str, Any]:
    """Return the options of one request: no retries of the client, and at most `seconds` to connect and read."""
    keywords: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": seconds / 2,
        "read_timeout": seconds / 2,
    }
    if authority is not None:
        keywords["connection_verify"] = authority
    return keywords


def _aio_client_class() -> type[AioServiceBusAdministrationClient] | None:
    """Return the SDK's asyncio client; None if aiohttp is not installed, without which its module cannot be loaded."""
    if not is_installed("aiohttp"):
        return None
    # Imported here: a sync pair need not load the asyncio part of the SDK, and aiohttp with it.
    from azure.servicebus.aio import management  # noqa: PLC0415

    return management.ServiceBusAdministrationClient


def _make_aio_client(namespace: str, credential: Any, **options: Any) -> AioServiceBusAdministrationClient:
    if (made := _aio_client_class()) is not None:
        return made(namespace, credential, **options)
    from twinbus.pairing.threaded_administration import LoopCredential  # noqa: PLC0415 - rarely needed

    usable = LoopCredential.of(sync_admin_credential(credential))
    transport = ClosingTransport(**options)
    return _threaded(ServiceBusAdministrationClient(namespace, usable, transport=transport, **options), usable)


def _aio_client_of(text: str, **options: Any) -> AioServiceBusAdministrationClient:
    if (made := _aio_client_class()) is not None:
        return made.from_connection_string(text, **options)
    transport = ClosingTransport(**options)
    return _threaded(ServiceBusAdministrationClient.from_connection_string(text, transport=transport, **options))


def _threaded(client: ServiceBusAdministrationClient, credential: Any = None) -> AioServiceBusAdministrationClient:
    from twinbus.pairing.threaded_administration import (  # noqa: PLC0415 - rarely needed
        LoopCredential,
        ThreadedAdministrationClient,
    )

    bridge = credential if isinstance(credential, LoopCredential) else None
    made: Any = ThreadedAdministrationClient(client, bridge)
    return made  # type: ignore[no-any-return] # has the same methods, and is no subclass


def management_credential(client: ServiceBusClient | AioServiceBusClient) -> Any:
    """Return the credential of a client as an administration client takes it. Raises OperatorError if there is none."""
    credential = admin_credential(client)
    if credential is None:
        raise OperatorError(
            "the secondary's client has a shared access signature, which the management API does not accept",
            'Give secondary_admin=, or let an operator run `twinbus provision` and pair with provision="assume".',
        )
    return credential


def _managed_namespace(client: ServiceBusClient | AioServiceBusClient) -> str:
    """Return the host of a client's namespace, with the port of a local one, which clients in TLS do not show."""
    name = client.fully_qualified_namespace
    return connection_settings(client).namespace if is_loopback(split_namespace(name)[0]) else name


def found_result(queue: Any) -> QueueOutcome:
    losing = losing_properties(queue)
    return FoundUnsafe(losing) if losing else QueueAnswer.FOUND


def lookup_result(error: Exception) -> QueueOutcome:
    failure = management_failure(error)
    return QueueAnswer.MISSING if failure.kind is FailureKind.ENTITY_NOT_FOUND else failure


def creation_result(error: Exception) -> QueueOutcome:
    # 40901 is a conflict with another operation in progress, not with an existing queue.
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
    """Classify an error of an administration client by its status, or by how reaching the service failed."""
    return QueueFailure(_kind_of(error), service_text(error))


def service_text(error: BaseException) -> str:
    """Return the reason in an answer of the management API, without the XML and the sentence around it.

    HTTP clients name a proxy with its credentials: these are left out.
    """
    text = str(error)
    found = _DETAIL.search(text)
    plain = text if found is None else html.unescape(found[1])
    return _without_credentials(" ".join(plain.split()))[:_LONGEST_DETAIL]


def _kind_of(error: BaseException) -> FailureKind:
    text = str(error)
    status = error.status_code if isinstance(error, HttpResponseError) else None
    if status == 403:
        # The service answers 403 if the namespace is full; a proxy before it answers 403 if it refuses the client.
        return FailureKind.QUOTA_EXCEEDED if "quota" in text.lower() else FailureKind.UNAUTHORIZED
    if status is not None:
        return _STATUSES.get(status, FailureKind.INTERNAL)
    for part, kind in _TEXTS:
        if part in text:
            return kind
    names = evidence_of(error).names
    return next((kind for name, kind in _NAMES if name in names), FailureKind.UNKNOWN)
