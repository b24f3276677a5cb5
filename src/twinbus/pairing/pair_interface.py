"""The public methods of a pair that do not wait, the same for both drivers: senders, receivers, state and events.

The signatures are those of the SDK's client; `tests/pairing/test_sdk_signatures.py` compares them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from azure.servicebus import ServiceBusReceiveMode, ServiceBusSessionFilter, ServiceBusSubQueue

from twinbus.pairing.events import Callback
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_state import EntityState, PairState, PairSyphon
from twinbus.pairing.receivers import record_receiver
from twinbus.sdk import given_keywords

ClientT = TypeVar("ClientT")
SenderT = TypeVar("SenderT")
ReceiverT = TypeVar("ReceiverT")
SessionsT = TypeVar("SessionsT")
RenewerT = TypeVar("RenewerT")

SessionId = str | Literal[ServiceBusSessionFilter.NEXT_AVAILABLE] | None


class PairInterface(ABC, Generic[ClientT, SenderT, ReceiverT, SessionsT, RenewerT]):
    """The public methods of a pair that do not wait.

    A driver sets `options`, `fully_qualified_namespace`, `_state` and `_primary_client`.
    """

    options: SendAvailabilityOptions
    """The options of the pair. They cannot be changed after pairing."""
    fully_qualified_namespace: str
    """The host of the primary, as `ServiceBusClient.fully_qualified_namespace`."""
    _state: PairState
    _primary_client: ClientT
    _callbacks: dict[object, tuple[str, Callback, Callable[[], None]]]

    @abstractmethod
    def _make_sender(self, path: str, make: Callable[[], Any]) -> SenderT:
        """Return a paired sender for an entity. `make` returns a new sender of the primary client."""

    @abstractmethod
    def _make_quiet(self, receiver: Any) -> ReceiverT:
        """Return the receiver with `quiet_while_down`."""

    @classmethod
    def from_connection_string(cls, conn_str: str, **_: Any) -> Any:
        """Raise TypeError: a pair has two connection strings.

        Example: `pair_connection_strings(primary, secondary)`.
        """
        raise TypeError("a pair has two connection strings: call pair_connection_strings(primary, secondary)")

    # --- senders and receivers -------------------------------------------------------------------------------------

    def get_queue_sender(
        self,
        queue_name: str,
        *,
        client_identifier: str | None = None,
        socket_timeout: float | None = None,
        **kwargs: Any,
    ) -> SenderT:
        """Return a sender for a queue. It diverts to the backlog while the queue is failed over.

        The arguments are those of `ServiceBusClient.get_queue_sender`.

        Example: `with pair.get_queue_sender("orders") as sender: sender.send_messages(ServiceBusMessage("tea"))`.
        """
        client: Any = self._primary_client
        given = given_keywords(client_identifier=client_identifier, socket_timeout=socket_timeout) | kwargs
        return self._make_sender(queue_name, lambda: client.get_queue_sender(queue_name, **given))

    def get_topic_sender(
        self,
        topic_name: str,
        *,
        client_identifier: str | None = None,
        socket_timeout: float | None = None,
        **kwargs: Any,
    ) -> SenderT:
        """Return a sender for a topic. It diverts to the backlog while the topic is failed over.

        The arguments are those of `ServiceBusClient.get_topic_sender`.

        Example: `with pair.get_topic_sender("prices") as sender: sender.send_messages(ServiceBusMessage("3.20"))`.
        """
        client: Any = self._primary_client
        given = given_keywords(client_identifier=client_identifier, socket_timeout=socket_timeout) | kwargs
        return self._make_sender(topic_name, lambda: client.get_topic_sender(topic_name, **given))

    def get_queue_receiver(
        self,
        queue_name: str,
        *,
        client_identifier: str | None = None,
        socket_timeout: float | None = None,
        session_id: SessionId = None,
        sub_queue: ServiceBusSubQueue | str | None = None,
        receive_mode: ServiceBusReceiveMode | str = ServiceBusReceiveMode.PEEK_LOCK,
        max_wait_time: float | None = None,
        auto_lock_renewer: RenewerT | None = None,
        prefetch_count: int = 0,
        quiet_while_down: bool = False,
        **kwargs: Any,
    ) -> ReceiverT:
        """Return a receiver for a queue of the primary: the SDK's own.

        The arguments are those of `ServiceBusClient.get_queue_receiver`. With `quiet_while_down`, receiving and peeking
        return no messages while the primary cannot be reached, instead of raising.

        Example: `with pair.get_queue_receiver("orders", max_wait_time=5) as receiver: messages = list(receiver)`.
        """
        client: Any = self._primary_client
        given = given_keywords(
            client_identifier=client_identifier,
            socket_timeout=socket_timeout,
            session_id=session_id,
            sub_queue=sub_queue,
            max_wait_time=max_wait_time,
            auto_lock_renewer=auto_lock_renewer,
        )
        receiver = client.get_queue_receiver(
            queue_name, receive_mode=receive_mode, prefetch_count=prefetch_count, **given, **kwargs
        )
        return self._receiver(receiver, queue_name, quiet=quiet_while_down)

    def get_subscription_receiver(
        self,
        topic_name: str,
        subscription_name: str,
        *,
        client_identifier: str | None = None,
        socket_timeout: float | None = None,
        session_id: SessionId = None,
        sub_queue: ServiceBusSubQueue | str | None = None,
        receive_mode: ServiceBusReceiveMode | str = ServiceBusReceiveMode.PEEK_LOCK,
        max_wait_time: float | None = None,
        auto_lock_renewer: RenewerT | None = None,
        prefetch_count: int = 0,
        quiet_while_down: bool = False,
        **kwargs: Any,
    ) -> ReceiverT:
        """Return a receiver for a subscription on the primary: the SDK's own.

        The arguments are those of `ServiceBusClient.get_subscription_receiver`. With `quiet_while_down`, receiving and
        peeking return no messages while the primary cannot be reached, instead of raising.

        Example: `with pair.get_subscription_receiver("prices", "all") as receiver: found = receiver.peek_messages()`.
        """
        client: Any = self._primary_client
        given = given_keywords(
            client_identifier=client_identifier,
            socket_timeout=socket_timeout,
            session_id=session_id,
            sub_queue=sub_queue,
            max_wait_time=max_wait_time,
            auto_lock_renewer=auto_lock_renewer,
        )
        receiver = client.get_subscription_receiver(
            topic_name, subscription_name, receive_mode=receive_mode, prefetch_count=prefetch_count, **given, **kwargs
        )
        return self._receiver(receiver, f"{topic_name}/Subscriptions/{subscription_name}", quiet=quiet_while_down)

    def list_queue_sessions(
        self, queue_name: str, *, state_updated_after: datetime | None = None, timeout: float | None = None
    ) -> SessionsT:
        """Return the session ids of a queue of the primary, as `ServiceBusClient.list_queue_sessions` does.

        Example: `for session_id in pair.list_queue_sessions("orders"): print(session_id)`.
        """
        client: Any = self._primary_client
        sessions: SessionsT = client.list_queue_sessions(
            queue_name, state_updated_after=state_updated_after, timeout=timeout
        )
        return sessions

    def list_subscription_sessions(
        self,
        topic_name: str,
        subscription_name: str,
        *,
        state_updated_after: datetime | None = None,
        timeout: float | None = None,
    ) -> SessionsT:
        """Return the session ids of a subscription, as `ServiceBusClient.list_subscription_sessions` does.

        Example: `for session_id in pair.list_subscription_sessions("prices", "all"): print(session_id)`.
        """
        client: Any = self._primary_client
        sessions: SessionsT = client.list_subscription_sessions(
            topic_name, subscription_name, state_updated_after=state_updated_after, timeout=timeout
        )
        return sessions

    def _receiver(self, receiver: Any, entity: str, *, quiet: bool) -> ReceiverT:
        record_receiver(receiver, self._state.primary_recorder, entity)
        if quiet:
            return self._make_quiet(receiver)
        plain: ReceiverT = receiver
        return plain

    # --- state and events ------------------------------------------------------------------------------------------

    @property
    def syphon(self) -> PairSyphon | None:
        """The syphon of the pair, with the option `enable_syphon`; None otherwise.

        Example: `pair.syphon.state` is `"running"` while it moves messages.
        """
        return self._state.syphon

    def entities(self) -> tuple[EntityState, ...]:
        """Return the state of every entity that a sender of the pair was made for.

        Example: `[one.path for one in pair.entities() if one.state is not EntityMode.HEALTHY]`.
        """
        return self._state.entities()

    def on(self, event: str, callback: Callback) -> Callable[[], None]:
        """Call `callback` with the event at every event of this name, or of every name for `"*"`.

        Returns a function that removes the callback. Raises UnknownEventError for a name that does not exist. A sync
        pair calls it in a thread of its own, an asyncio pair in its event loop, where it may be a coroutine function.
        Callbacks that are registered after pairing also get its `secondary_unreachable` and `backlog_queue_unsafe`.

        Example: `pair.on("failover_engaged", lambda event: print(event.entity, event.cause))`.
        """
        key = object()
        self._callbacks[key] = (event, callback, self._state.events.on(event, callback))

        def off() -> None:
            if (found := self._callbacks.pop(key, None)) is not None:
                found[2]()

        return off

    def _register_callbacks(self) -> None:
        """Register the callbacks again, after the pair was entered again."""
        for key, (event, callback, _) in list(self._callbacks.items()):
            self._callbacks[key] = (event, callback, self._state.events.on(event, callback))
