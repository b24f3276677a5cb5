"""What the verbs `twinbus entity …` share: the path of an entity, and access to one namespace.

A queue or topic has a path, such as `orders`. A subscription is written as Service Bus addresses it:
`events/subscriptions/audit`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar

import typer

from twinbus.cli import connections
from twinbus.cli.connections import NOT_TYPED
from twinbus.cli.errors import WrongUsageError
from twinbus.errors import OperatorError, TwinbusError
from twinbus.values import Condition

if TYPE_CHECKING:
    from twinbus.connect import ServiceBusConnection
    from twinbus.pairing import Administration

T = TypeVar("T")
_SUBSCRIPTION: Final = re.compile(r"(.+)/subscriptions/([^/]+)", re.IGNORECASE)
_SUB_QUEUE: Final = re.compile(r"/\$(transfer/\$)?deadletterqueue$", re.IGNORECASE)

AnyNamespace = Annotated[
    str,
    typer.Option(
        "--connection-string",
        "-c",
        envvar="TWINBUS_CONNECTION_STRING",
        show_envvar=True,
        show_default=False,
        help=f"Connection string of the namespace, or its host with --credential. {NOT_TYPED}",
    ),
]
Path = Annotated[
    str,
    typer.Argument(help="orders, or events/subscriptions/audit for a subscription.", show_default=False),
]
DeadLetter = Annotated[bool, typer.Option("--dead-letter", help="Its dead-letter queue instead.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


class Kind(StrEnum):
    QUEUE = "queue"
    TOPIC = "topic"
    SUBSCRIPTION = "subscription"


@dataclass(frozen=True, slots=True)
class EntityPath:
    """The path of a queue or topic, or of a subscription of the topic `root`."""

    root: str
    subscription: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what a user wrote. Raises WrongUsageError."""
        path = text.strip("/")
        if _SUB_QUEUE.search(path):
            raise WrongUsageError(f"{text!r} is a dead-letter queue", "Give the entity, and --dead-letter.")
        if not path:
            raise WrongUsageError("the path of the entity is empty", "Give a queue or topic, such as orders.")
        found = _SUBSCRIPTION.fullmatch(path)
        return cls(path) if found is None else cls(found[1], found[2])

    def __str__(self) -> str:
        return self.root if self.subscription is None else f"{self.root}/subscriptions/{self.subscription}"

    def address(self, *, dead_letter: bool = False) -> str:
        """Return the address of the entity's messages, as links and `$management` use it."""
        return f"{self}/$DeadLetterQueue" if dead_letter else str(self)


class Namespace:
    """One namespace: its management, and connections to it. Errors of the SDK become errors that name the namespace."""

    def __init__(self, text: str, seconds: float) -> None:
        self.name = connections.namespace_name("connection-string", text)
        self.seconds = seconds
        self._text = text

    @contextmanager
    def administration(self) -> Iterator[EntityAdministration]:
        with connections.administration(self._text, self.seconds, side="namespace") as administration:
            yield EntityAdministration(self.name, administration, self._text)

    @asynccontextmanager
    async def connected(
        self, path: EntityPath, kinds: str, not_allowed: str = ""
    ) -> AsyncIterator[ServiceBusConnection]:
        """Yield a connection for operations on one entity. `kinds` names what it can be, for an error.

        `not_allowed` is the hint for an operation that the entity does not allow.
        """
        from twinbus.backlog import FailureKind, failure_kind  # noqa: PLC0415 - slow
        from twinbus.connect import ServiceBusArgumentError, ServiceBusCommunicationError  # noqa: PLC0415

        try:
            async with connections.access(self._text, side="namespace").connect(timeout=self.seconds) as bus:
                yield bus
        except TwinbusError as error:
            kind = failure_kind(error)
            if kind is FailureKind.ENTITY_NOT_FOUND:
                raise connections.missing_entity(kinds, str(path), self.name) from error
            if isinstance(error, ServiceBusCommunicationError) or connections.is_refused(error):
                raise connections.access_error(self.name, error) from error
            if isinstance(error, ServiceBusArgumentError):
                hint = not_allowed if error.condition == Condition.NOT_ALLOWED else ""
                raise WrongUsageError(f"{self.name} refuses this: {error.description}", hint) from error
            raise


class EntityAdministration:
    """The management of one namespace's entities, with the errors of `Namespace`."""

    def __init__(self, name: str, administration: Administration, text: str) -> None:
        self.name = name
        self.client = administration.client
        self._administration = administration
        self._text = text

    def call(self, method: Callable[..., T], *arguments: object, **keywords: object) -> T:
        """Call a method of the SDK's client. Raises OperatorError that names the namespace, and ResourceNotFoundError.

        Raises WrongUsageError if the service does not accept a property.
        """
        from azure.core.exceptions import AzureError, ResourceNotFoundError  # noqa: PLC0415 - slow

        try:
            return self._administration.request(method, *arguments, **keywords)
        except ResourceNotFoundError:
            raise
        except (AzureError, OSError, TwinbusError) as error:
            status = getattr(error, "status_code", None)
            if status is None or connections.is_refused(error):
                raise connections.access_error(self.name, error) from error
            text = f"{self.name} refuses this: {connections.access_failure(error)[1]}"
            raise (WrongUsageError(text) if status == 400 else OperatorError(text)) from error

    def create_topic(self, path: str, **properties: object) -> None:
        """Create a topic. The SDK's `create_topic` takes no options of the request, so a client gets them instead."""

        def create(name: str, **keywords: Any) -> None:
            request = {key: value for key, value in keywords.items() if key not in properties}
            with connections.administration_client(self._text, side="namespace", **request) as client:
                client.create_topic(name, **properties)  # type: ignore[arg-type] # properties of any type, by name

        self.call(create, path, **properties)

    def listed(self, method: Callable[..., Any], *arguments: object) -> list[Any]:
        """Return all items of a method that lists something. The pages are requested inside this call."""

        def pages(*given: object, **keywords: object) -> list[Any]:
            return list(method(*given, **keywords))

        return self.call(pages, *arguments)

    def find(self, path: EntityPath) -> tuple[Kind, Any]:
        """Return what the path is, and its properties. Raises OperatorError if there is no such entity."""
        from azure.core.exceptions import ResourceNotFoundError  # noqa: PLC0415 - slow

        client = self.client
        if path.subscription is not None:
            try:
                return Kind.SUBSCRIPTION, self.call(client.get_subscription, path.root, path.subscription)
            except ResourceNotFoundError as error:
                raise self._missing(path) from error
        for kind, method in ((Kind.QUEUE, client.get_queue), (Kind.TOPIC, client.get_topic)):
            # The SDK raises AttributeError if the path is an entity of the other kind.
            with suppress(ResourceNotFoundError, AttributeError):
                return kind, self.call(method, path.root)
        raise self._missing(path)

    def counts(self, kind: Kind, path: EntityPath) -> Any:
        """Return the SDK's runtime properties of an entity."""
        client = self.client
        match kind:
            case Kind.SUBSCRIPTION:
                return self.call(client.get_subscription_runtime_properties, path.root, path.subscription)
            case Kind.TOPIC:
                return self.call(client.get_topic_runtime_properties, path.root)
            case Kind.QUEUE:
                return self.call(client.get_queue_runtime_properties, path.root)

    def _missing(self, path: EntityPath) -> OperatorError:
        client = self.client
        topics = [str(one.name) for one in self.listed(client.list_topics)]
        if path.subscription is None:
            known: Sequence[str] = [*topics, *(str(one.name) for one in self.listed(client.list_queues))]
        elif path.root.lower() not in {one.lower() for one in topics}:
            return connections.missing_entity("topic", path.root, self.name, _near(path.root, topics))
        else:
            found = self.listed(client.list_subscriptions, path.root)
            known = [f"{path.root}/subscriptions/{one.name}" for one in found]
        kind = "queue or topic" if path.subscription is None else "subscription"
        return connections.missing_entity(kind, str(path), self.name, _near(str(path), known))


def _near(path: str, known: Sequence[str]) -> str | None:
    return next(iter(get_close_matches(path, known, 1)), None)
