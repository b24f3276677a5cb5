"""A peer with a coordinator link: declares and discharges transactions, and sends and settles in them."""

from itertools import count
from typing import Any, Self

from tests.amqp.transaction_requests import coordinator, declare, discharge, transaction_of
from tests.namespace.front.amqp_peer import Peer
from twinbus.amqp import (
    ACCEPTED,
    RECEIVER,
    Accepted,
    Delivered,
    DeliveryState,
    Disposed,
    Link,
    LinkAccepted,
    LinkFlowed,
    Properties,
    Rejected,
    Session,
    build_message,
    transactional_state,
)


class TransactionPeer:
    """A peer with a coordinator link."""

    def __init__(self, peer: Peer, link: Link) -> None:
        self.peer = peer
        self.link = link
        self._tags = count(1)

    @classmethod
    async def on(cls, peer: Peer, session: Session | None = None) -> Self:
        link = peer.attach_sender(coordinator(), session)
        await peer.event(LinkAccepted, link)
        await peer.event(LinkFlowed, link)
        return cls(peer, link)

    async def request(self, value: Any) -> DeliveryState | None:
        self.link.send(b"%d" % next(self._tags), build_message(value=value))
        self.peer.flush()
        (answer,) = await self.peer.answers(1)
        assert answer.settled
        return answer.state

    async def begin(self) -> bytes:
        found = transaction_of(await self.request(declare()))
        assert found is not None
        return found

    async def commit(self, name: bytes) -> str | None:
        """Commit. Returns the error condition if the transaction was rolled back."""
        return condition(await self.request(discharge(name, fail=False)))

    async def commit_settled(self, name: bytes) -> str | None:
        """Commit a transaction with one settlement, whose confirmation also arrives."""
        self.link.send(b"%d" % next(self._tags), build_message(value=discharge(name, fail=False)))
        self.peer.flush()
        answers = await self.peer.answers(2)
        (of_coordinator,) = (answer for answer in answers if answer.role is RECEIVER)
        return condition(of_coordinator.state)

    async def roll_back(self, name: bytes) -> str | None:
        return condition(await self.request(discharge(name, fail=True)))

    async def send(self, link: Link, name: bytes, *bodies: str) -> list[Disposed]:
        for body in bodies:
            payload = build_message(properties=Properties(message_id=body[:32]), data=body.encode())
            link.send(body.encode()[:32], payload, state=transactional_state(name))
        self.peer.flush()
        return await self.peer.answers(len(bodies))

    async def settle(self, found: Delivered, name: bytes, outcome: DeliveryState = ACCEPTED) -> Disposed:
        state = transactional_state(name, outcome)
        found.link.session.dispose(RECEIVER, found.delivery_id, settled=False, state=state)
        self.peer.flush()
        (answer,) = await self.peer.answers(1)
        return answer


def condition(state: DeliveryState | None) -> str | None:
    if isinstance(state, Rejected):
        assert state.error is not None
        return state.error.condition
    assert isinstance(state, Accepted)
    return None
