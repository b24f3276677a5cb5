"""A simple model of a queue or subscription: a dict of messages, and functions that let time pass and settle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["active", "deferred", "scheduled", "dead", "dead-deferred", "gone"]
LANES: dict[str, int] = {"active": 0, "deferred": 1, "scheduled": 2, "dead": 3, "dead-deferred": 4}


@dataclass
class ModelMessage:
    body: str
    session: str | None
    ttl: int | None
    state: State = "active"
    expires: int | None = None
    due: int | None = None
    seq: int | None = None
    deliveries: int = 0
    token: bytes | None = None
    until: int = 0

    @property
    def held(self) -> bool:
        return self.token is not None

    @property
    def mortal(self) -> bool:
        return self.state in ("active", "deferred")

    def is_over(self, now: int) -> bool:
        """Whether the message expires without a request. A deferred message does so only when it is received."""
        return self.state == "active" and self.is_overdue(now)

    def is_overdue(self, now: int) -> bool:
        return self.expires is not None and self.expires <= now


@dataclass
class SessionHolder:
    """The session that a receiver holds."""

    session: str
    until: int


@dataclass
class EntityModel:
    lock_duration: int
    max_delivery_count: int
    dead_letters_expired: bool
    sessions: bool
    messages: dict[str, ModelMessage] = field(default_factory=dict)
    holders: dict[object, SessionHolder] = field(default_factory=dict)
    """By receiver."""

    def arrive(self, body: str, session: str | None, ttl: int | None, due: int | None, now: int) -> None:
        if self.sessions and not session:
            self.messages[body] = ModelMessage(body, None, ttl, "dead")
            return
        message = ModelMessage(body, session if self.sessions else None, ttl)
        self.messages[body] = message
        if due is not None and due > now:
            message.state, message.due = "scheduled", due
        else:
            message.expires = None if ttl is None else now + ttl

    def in_state(self, *states: str) -> list[ModelMessage]:
        return [message for message in self.messages.values() if message.state in states]

    def by_token(self, token: bytes) -> ModelMessage | None:
        return next((message for message in self.messages.values() if message.token == token), None)

    def until_of(self, message: ModelMessage) -> int:
        """When the lock of a message ends. The messages of a session are locked as long as the session."""
        for holder in self.holders.values():
            if message.state in ("active", "deferred") and self.sessions and holder.session == message.session:
                return holder.until
        return message.until

    def pass_time(self, now: int) -> None:
        """Let everything expire whose time has come."""
        for message in self.messages.values():
            if message.held and self.until_of(message) <= now:
                self.let_go(message, now, failed=True)
            if not message.held and message.is_over(now):
                self.expire(message)
            if message.state == "scheduled" and message.due is not None and message.due <= now:
                message.state, message.due, message.seq = "active", None, None
                message.expires = None if message.ttl is None else now + message.ttl
                if message.ttl == 0:
                    self.expire(message)
        for receiver in [receiver for receiver, holder in self.holders.items() if holder.until <= now]:
            del self.holders[receiver]

    def expire(self, message: ModelMessage) -> None:
        message.state = "dead" if self.dead_letters_expired else "gone"

    def let_go(self, message: ModelMessage, now: int, *, failed: bool) -> None:
        message.token = None
        message.deliveries += failed
        if message.is_over(now):
            self.expire(message)
        elif message.mortal and failed and message.deliveries >= self.max_delivery_count:
            message.state = "dead"

    def settle(self, message: ModelMessage, outcome: str, now: int) -> bool:
        """Settle a message. Returns False if that is refused."""
        if outcome == "dead-letter" and message.state in ("dead", "dead-deferred"):
            return False
        if outcome in ("abandon", "release"):
            self.let_go(message, now, failed=outcome == "abandon")
            return True
        message.token = None
        if outcome == "complete":
            message.state = "gone"
        elif outcome == "dead-letter":
            message.state = "dead"
        else:
            message.state = "deferred" if message.mortal else "dead-deferred"
        return True

    def release_session(self, receiver: object, now: int, *, failed: bool) -> None:
        holder = self.holders.pop(receiver)
        for message in self.messages.values():
            if message.held and message.mortal and message.session == holder.session:
                self.let_go(message, now, failed=failed)

    def restart(self) -> None:
        self.holders.clear()
        for message in self.messages.values():
            message.token = None

    def available(self, state: str, session: str | None = None) -> list[ModelMessage]:
        return [
            message
            for message in self.messages.values()
            if message.state == state and not message.held and session in (None, message.session)
        ]
