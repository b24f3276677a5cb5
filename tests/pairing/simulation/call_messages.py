"""The messages that simulated callers send, and their copies for the backlog, made by the product's own `fit_to_link`.

Encoding takes longer than everything else in a world, so both are made once for all worlds. Within one world a
`CallMessages` is used by one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import count, islice
from random import Random
from typing import Any, NamedTuple

from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageHeader, AmqpMessageProperties

from tests.pairing.simulation.clause_model import ViolationError
from twinbus.backlog import PATH_PROPERTY, AliasInUseError, MessageFields, restore
from twinbus.pairing import message_copies
from twinbus.pairing.decide.send_flow import DivertedTransfer
from twinbus.pairing.errors import MessageTooLargeForBacklogError
from twinbus.sdk import LinkLimits, amqp_messages
from twinbus.values import Long, Timestamp

LIMITS = LinkLimits(message=3000, batch=2048, transport=PyamqpTransport)
TOMORROW = datetime(2030, 1, 2, tzinfo=UTC)
_TYPES = {"LONG": Long, "TIMESTAMP": Timestamp}

Raws = tuple[AmqpAnnotatedMessage, ...]


class CallMessages(NamedTuple):
    """The messages of one call. `spoilt`: no entity accepts them. `undivertible`: why no backlog queue accepts them."""

    raws: Raws
    ids: tuple[str, ...]
    spoilt: bool = False
    undivertible: type[Exception] | None = None


class SentTransfer(NamedTuple):
    """The messages of one transfer. To a backlog queue they have the path of their destination, to the primary none."""

    ids: tuple[str, ...]
    spoilt: bool = False
    path: str | None = None


# Sizes of bodies that, with aliases: share a batch, need a batch of their own, fit into no batch but can be sent alone,
# fit only compressed, or do not fit.
SMALL, MIDDLING, WIDE, LARGE = 20, 600, 2300, 3200


def _letters() -> Iterator[CallMessages]:
    chance = Random(0)
    numbers = count()

    def letter(
        *sizes: int, noise: bool = True, spoilt: bool = False, taken: bool = False, **known: Any
    ) -> CallMessages:
        ids = tuple(f"m{number}" for number in islice(numbers, len(sizes)))
        bodies = [chance.randbytes(size) if noise else bytes(size) for size in sizes]
        raws = tuple(_message(one, body, chance, taken=taken) for one, body in zip(ids, bodies, strict=True))
        return CallMessages(raws, ids, spoilt, **known)

    yield from [letter(SMALL) for _ in range(4)]
    for _ in range(4):
        yield letter(SMALL)
        yield letter(SMALL, SMALL, SMALL)
        yield letter(MIDDLING, MIDDLING)
        yield letter(SMALL)
        yield letter(SMALL, MIDDLING, SMALL, SMALL)
        yield letter(SMALL)
        yield letter(SMALL, LARGE, noise=False)
        yield letter(MIDDLING, MIDDLING, MIDDLING)
        yield letter(SMALL)
        yield letter(SMALL, WIDE, SMALL)
        yield letter(LARGE, noise=False)
    yield letter(SMALL, spoilt=True)
    yield letter(LARGE, undivertible=MessageTooLargeForBacklogError)
    yield letter(SMALL, LARGE, undivertible=MessageTooLargeForBacklogError)
    yield letter(SMALL, taken=True, undivertible=AliasInUseError)


def _message(identity: str, body: bytes, chance: Random, *, taken: bool) -> AmqpAnnotatedMessage:
    properties: dict[str, Any] = {"for": identity}
    if taken:
        properties[PATH_PROPERTY] = "mine"
    return AmqpAnnotatedMessage(
        data_body=body,
        properties=AmqpMessageProperties(message_id=identity, group_id=chance.choice((None, "red"))),
        header=AmqpMessageHeader(time_to_live=chance.choice((None, 1, 60_000))),
        application_properties=properties,
    )


def contents(letters: Iterable[CallMessages]) -> list[object]:
    """Return all values of the messages that could be changed."""
    return [
        (
            dict(raw.properties.items()) if raw.properties else None,
            dict(raw.header.items()) if raw.header else None,
            dict(raw.application_properties or {}),
            dict(raw.annotations or {}),
            [bytes(part) for part in raw.body],
        )
        for letter in letters
        for raw in letter.raws
    ]


# --- copies ----------------------------------------------------------------------------------------------------------


@cache
def fit(raws: Raws, path: str, limits: LinkLimits, scheduled: datetime | None = None) -> tuple[DivertedTransfer, ...]:
    """Call the product's `fit_to_link`. Checks that the copies can be restored to the original messages (S7)."""
    made = message_copies.fit_to_link(raws, path, limits, scheduled)
    milliseconds = None if scheduled is None else int(scheduled.timestamp() * 1000)
    meant = {message_copies.id_of(raw): (path, _sendable(raw, milliseconds)) for raw in raws}
    copies = [raw for transfer in made for raw in amqp_messages(transfer.payload)]
    found = {message_copies.id_of(raw): restore(_sendable(raw))[:2] for raw in copies}
    if len(copies) != len(raws) or found != meant:
        raise ViolationError(f"{meant} comes back as {found}")
    return made


@cache
def transfer_of(payload: message_copies.Payload) -> SentTransfer:
    copies = amqp_messages(payload)
    [path] = {restore(_sendable(raw)).path for raw in copies}
    return SentTransfer(tuple(str(message_copies.id_of(raw)) for raw in copies), path=path)


def _sendable(raw: AmqpAnnotatedMessage, scheduled: int | None = None) -> MessageFields:
    session = raw.properties.group_id if raw.properties else None
    return MessageFields(
        session_id=session.decode() if isinstance(session, bytes) else session,
        time_to_live=raw.header.time_to_live if raw.header else None,
        scheduled_enqueue_time=scheduled,
        application_properties={name: _plain(value) for name, value in (raw.application_properties or {}).items()},
    )


def _plain(value: Any) -> object:
    return _TYPES[value["TYPE"]](value["VALUE"]) if isinstance(value, Mapping) else value


_ALL = list(_letters())
LAST, LETTERS = tuple(_ALL[:4]), tuple(_ALL[4:])
"""Messages for the calls of a world. `LAST` are for calls at its end."""
