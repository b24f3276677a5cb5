"""Inspects a namespace without traffic: every message by peeking, its counts, its sessions, its file.

The oracle decides whether it is right.
"""

from __future__ import annotations

import http.client
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import apsw
from defusedxml import ElementTree  # type: ignore[import-untyped]  # it ships no types

from tests.crash.entities import SESSIONS, TOPIC
from tests.crash.load import TIMEOUT, settlement, sighting
from tests.crash.oracle import EntityOracle, ObservedMessage, Oracle, Where
from twinbus.connect import (
    ConnectionString,
    MessageState,
    ReceivedMessage,
    Receiver,
    ServiceBusConnection,
    connect,
    make_sas_token,
)

DRAIN_SECONDS = 30.0
_STATES = {
    MessageState.ACTIVE: Where.ACTIVE,
    MessageState.DEFERRED: Where.DEFERRED,
    MessageState.SCHEDULED: Where.SCHEDULED,
}
_PAGE = 500
_COUNTS = "{http://schemas.microsoft.com/netservices/2011/06/servicebus}"
_ATOM = "{http://www.w3.org/2005/Atom}"


async def inspect(oracle: Oracle, connection_string: str) -> None:
    """Report everything that is stored to the oracle, after a restart and before the next load."""
    async with connect(connection_string, timeout=TIMEOUT) as bus:
        seen = {name: await _peek_all(bus, name) for name in oracle.accounts}
        for name, account in oracle.accounts.items():
            account.found(seen[name])
            account.check_numbers()
        oracle.check_wholes()
        counts = _counts(connection_string)
        for name, account in oracle.accounts.items():
            account.counted(counts[name.lower()], seen[name])
        sessions = oracle.accounts[SESSIONS]
        for session in list(sessions.states):
            async with await bus.receiver(SESSIONS, session=session, prefetch=0) as receiver:
                sessions.state_certain(session, await receiver.get_session_state())


async def drain(oracle: Oracle, connection_string: str) -> None:
    """Receive all messages from every queue, sub-queue and session, and report them to the oracle."""
    async with connect(connection_string, timeout=TIMEOUT) as bus:
        for account in oracle.accounts.values():
            sessions: list[str | None] = [*account.states]
            for session in sessions or [None]:
                async with await bus.receiver(account.name, session=session) as receiver:
                    await _drain_active(account, receiver)
                    await _drain_deferred(account, receiver)
            async with await bus.receiver(account.name, dead_letter=True) as receiver:
                while _left(account, None, Where.DEAD):
                    await _complete(account, receiver, await receiver.receive(100, DRAIN_SECONDS), Where.DEAD)


async def _drain_active(account: EntityOracle, receiver: Receiver) -> None:
    while _left(account, receiver.session_id, Where.ACTIVE, Where.SCHEDULED):
        messages = await receiver.receive(100, DRAIN_SECONDS)
        await _complete(account, receiver, messages, Where.ACTIVE)


async def _drain_deferred(account: EntityOracle, receiver: Receiver) -> None:
    numbers = [account.open[id].numbers[False] for id in _left(account, receiver.session_id, Where.DEFERRED)]
    if numbers:
        await _complete(account, receiver, await receiver.receive_deferred(numbers), Where.DEFERRED)


def _left(account: EntityOracle, session: str | None, *places: Where) -> list[str]:
    return [
        entry.id
        for entry in account.open.values()
        if not entry.known.isdisjoint(places) and (entry.session == session or session is None)
    ]


async def _complete(
    account: EntityOracle, receiver: Receiver, messages: Sequence[ReceivedMessage], where: Where
) -> None:
    assert messages, f"{account.name}: {_left(account, receiver.session_id, *Where)} never came"
    for message in messages:
        account.sighted(sighting(message, where))
    with settlement(account, messages, Where.NOWHERE):
        await receiver.complete(messages)


async def _peek_all(bus: ServiceBusConnection, name: str) -> list[ObservedMessage]:
    seen: list[ObservedMessage] = []
    for address in (name, f"{name}/$DeadLetterQueue"):
        node, start = bus.management(name, address=address), 0
        while messages := await node.peek(start, _PAGE):
            seen += [sighting(one, _STATES[one.state] if address == name else Where.DEAD) for one in messages]
            start = (messages[-1].sequence_number or 0) + 1
        await node.close()
    return seen


def _counts(connection_string: str) -> dict[str, dict[Where, int]]:
    """Return the counts of the management API for all queues and subscriptions, by path in lower case."""
    at = ConnectionString.parse(connection_string)
    token = make_sas_token(at.resource(), at.key_name, at.key, int(time.time()) + 300)
    found: dict[str, dict[Where, int]] = {}
    connection = http.client.HTTPConnection(at.host, at.port, timeout=TIMEOUT)
    try:
        for list_of, prefix in (("$Resources/queues", ""), (f"{TOPIC}/subscriptions", f"{TOPIC}/subscriptions/")):
            connection.request("GET", f"/{list_of}?api-version=2021-05&$top=100", headers={"Authorization": token})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == http.client.OK, text
            for entry in ElementTree.fromstring(text).iter(f"{_ATOM}entry"):
                found[prefix + (entry.findtext(f"{_ATOM}title") or "").lower()] = {
                    where: int(next(entry.iter(f"{_COUNTS}{kind}MessageCount")).text or 0)
                    for kind, where in (
                        ("Active", Where.ACTIVE),
                        ("DeadLetter", Where.DEAD),
                        ("Scheduled", Where.SCHEDULED),
                    )
                }
    finally:
        connection.close()
    return found


def check_file(data: Path, scratch: Path) -> tuple[int, int, int]:
    """Check a copy of the store. Returns the number of messages, of messages with shared bodies, and of bodies."""
    scratch.mkdir(exist_ok=True)
    for file in data.glob("primary.sqlite*"):
        shutil.copy(file, scratch / file.name)
    connection = apsw.Connection(str(scratch / "primary.sqlite"))
    try:
        assert connection.pragma("integrity_check") == "ok"
        orphans = "SELECT count(*) FROM body WHERE id NOT IN (SELECT body FROM message WHERE body IS NOT NULL)"
        doubles = "SELECT count(*) FROM message WHERE (body IS NULL) = (raw IS NULL)"
        # NOT IN of an empty list is true for NULL: with no body in the file, for every message.
        dangling = "SELECT count(*) FROM message WHERE body IS NOT NULL AND body NOT IN (SELECT id FROM body)"
        mischarged = """SELECT count(*) FROM shared WHERE bytes <> (
          SELECT coalesce(sum(length(raw)), 0) FROM body WHERE body.topic = shared.topic)"""
        uncharged = "SELECT count(*) FROM body WHERE topic NOT IN (SELECT topic FROM shared)"
        untold = "SELECT count(*) FROM freed"
        for question in (orphans, doubles, dangling, mischarged, uncharged, untold):
            found = connection.execute(question).get
            assert found == 0, f"{found}: {question}"
        rows: tuple[int, int, int] = connection.execute(
            "SELECT (SELECT count(*) FROM message), (SELECT count(body) FROM message), (SELECT count(*) FROM body)"
        ).get
        return rows
    finally:
        connection.close()
        shutil.rmtree(scratch)
