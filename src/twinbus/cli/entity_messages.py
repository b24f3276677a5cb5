"""`twinbus entity peek|send|purge`: messages of a queue or subscription, without a program."""

from __future__ import annotations

import asyncio
import base64
import json as json_text
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path as File
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple
from uuid import uuid4

import typer

from twinbus.cli.connections import Seconds
from twinbus.cli.entity_access import AnyNamespace, DeadLetter, EntityPath, Json, Kind, Namespace, Path, Yes
from twinbus.cli.errors import ATTENTION, Debug, WrongUsageError, errors_reported
from twinbus.cli.network import namespace_network_options
from twinbus.cli.option_values import span_option
from twinbus.cli.spinner import spinner
from twinbus.cli.tables import print_table
from twinbus.errors import OperatorError, TwinbusError
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.connect import MessageState, ReceivedMessage, Receiver, ServiceBusConnection, SessionChoice
    from twinbus.message import Message

_PEEK_PAGE: Final = 100
_DELETE_PAGE: Final = 1000
_SEND_PAGE: Final = 1000
# The part of a body that the table of `peek` shows.
_PREVIEW: Final = 60
# The largest whole number of AMQP, and of a sequence number.
_LARGEST: Final = 2**63 - 1
_VALUES: Final = "After := a value is a number of at most 64 bits, true or false; after = it is text."
# After this time without a message, the messages that are left are locked by other receivers.
_WAIT_SECONDS: Final = 2.0


@namespace_network_options
def peek(
    path: Path,
    connection_string: AnyNamespace,
    count: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 10,
    after: Annotated[
        int,
        typer.Option(
            min=0,
            max=_LARGEST - 1,
            metavar="NUMBER",
            help="Only messages after this sequence number.",
            show_default="from the first",
        ),
    ] = 0,
    dead_letter: DeadLetter = False,
    whole: Annotated[bool, typer.Option("--whole", help="Show whole bodies and all properties.")] = False,
    seconds: Seconds = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")] = False,
    debug: Debug = False,
) -> None:
    """Look at messages without locking or removing them.

    Needs a key with the Listen right.

    Examples:
      twinbus entity peek orders
      twinbus entity peek orders --dead-letter --whole
      twinbus entity peek events/subscriptions/audit --count 100 --json
    """
    with errors_reported(debug=debug):
        wanted = EntityPath.parse(path)
        found = asyncio.run(_peeked(Namespace(connection_string, seconds), wanted, count, after, dead_letter))
        if json:
            for one in found:
                typer.echo(json_text.dumps(_as_json(one)))
        elif whole:
            for one in found:
                _print_whole(one)
        elif found:
            _print_messages(found)
        if not json:
            last = found[-1].sequence_number if found else 0
            more = f"; --after {last} shows what follows" if len(found) == count else ""
            kind = "dead letter" if dead_letter else "message"
            typer.echo(f"{len(found):,} {kind}{'' if len(found) == 1 else 's'}{more}")


@namespace_network_options
def send(
    path: Annotated[str, typer.Argument(help="The queue or topic.", show_default=False)],
    connection_string: AnyNamespace,
    body: Annotated[str | None, typer.Argument(help="The body.", show_default="standard input")] = None,
    file: Annotated[File | None, typer.Option(help="Read the body from this file.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of the input is a message.")] = False,
    count: Annotated[int, typer.Option(min=1, help="Send this many copies.")] = 1,
    id: Annotated[str | None, typer.Option(help="Message id.", show_default="a new one for each message")] = None,
    session: Annotated[str | None, typer.Option(help="Session id.")] = None,
    subject: Annotated[str | None, typer.Option(help="Subject, or label.")] = None,
    content_type: Annotated[str | None, typer.Option(help="Content type: application/json.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="Correlation id.")] = None,
    property: Annotated[
        list[str] | None,
        typer.Option(help="Application property: name=text, or name:=3 for a number, true or false; may be repeated."),
    ] = None,
    time_to_live: Annotated[timedelta | None, span_option("Time to live: 30s, 10m, 1d.")] = None,
    delay: Annotated[timedelta | None, span_option("Schedule it: it can be received after this time.")] = None,
    seconds: Seconds = 10.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Send messages to a queue or topic.

    Needs a key with the Send right. Sends to this namespace only: nothing is diverted.

    Examples:
      twinbus entity send orders "hello"
      twinbus entity send orders --file order.json --property region=eu
      seq 1000 | twinbus entity send orders --lines
    """
    with errors_reported(debug=debug):
        wanted = EntityPath.parse(path)
        if wanted.subscription is not None:
            raise WrongUsageError(
                f"{path} is a subscription: only its topic takes messages", f"Send to {wanted.root} instead."
            )
        if body is not None and file is not None:
            raise WrongUsageError("the body is given twice", "Give it as an argument, or with --file.")
        bodies = _bodies(body, file, lines=lines) * count
        if id is not None and len(bodies) > 1:
            raise WrongUsageError("--id is for one message", "Leave it out: each message gets an id of its own.")
        from twinbus.message import Message  # noqa: PLC0415 - other verbs start without it

        if time_to_live is not None and time_to_live < timedelta(milliseconds=1):
            raise WrongUsageError("--time-to-live is shorter than 1 ms", "Leave it out for the entity's own time.")
        properties = dict(_property(text) for text in property or ())
        at = None if delay is None else _later(delay)
        messages = [
            Message(
                one,
                message_id=id or uuid4().hex,
                session_id=session,
                subject=subject,
                content_type=content_type,
                correlation_id=correlation_id,
                time_to_live=time_to_live,
                scheduled_enqueue_time=at,
                application_properties=properties or None,
            )
            for one in bodies
        ]
        namespace = Namespace(connection_string, seconds)
        asyncio.run(_send(namespace, wanted, messages))
        if json:
            ids = [one.message_id for one in messages]
            typer.echo(json_text.dumps({"namespace": namespace.name, "entity": str(wanted), "message_ids": ids}))
        else:
            what = f"message {_text(messages[0].message_id)}" if len(messages) == 1 else f"{len(messages):,} messages"
            when = "" if at is None else f", scheduled for {at:%Y-%m-%d %H:%M:%S} UTC"
            typer.echo(printable(f"sent: {what} to {wanted} on {namespace.name}{when}"))


@namespace_network_options
def purge(
    path: Path,
    connection_string: AnyNamespace,
    dead_letter: DeadLetter = False,
    yes: Yes = False,
    seconds: Seconds = 10.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove all messages of a queue or subscription. They cannot be brought back.

    Asks for confirmation first. Removes deferred and scheduled messages too. Messages that a receiver has locked, and
    those that arrive meanwhile, stay.

    Exit code: 0 if every message that was there is removed, 3 if some are left.

    Examples:
      twinbus entity purge orders
      twinbus entity purge orders --dead-letter --yes
    """
    with errors_reported(debug=debug):
        wanted = EntityPath.parse(path)
        if json and not yes:
            raise WrongUsageError("purge asks for confirmation, and --json cannot ask", "Add --yes.")
        namespace = Namespace(connection_string, seconds)
        with namespace.administration() as administration:
            kind, found = administration.find(wanted)
            if kind is Kind.TOPIC:
                raise WrongUsageError(
                    f"{path} is a topic: its subscriptions hold the messages", _subscriptions_hint("Purge", wanted)
                )
            counts = administration.counts(kind, wanted)
        scheduled = 0 if dead_letter else getattr(counts, "scheduled_message_count", None) or 0
        there = scheduled + (counts.dead_letter_message_count if dead_letter else counts.active_message_count)
        what = f"{'the dead-letter queue of ' if dead_letter else ''}{kind} {wanted} on {namespace.name}"
        if there and not yes:
            typer.confirm(printable(f"Remove {there:,} message{'' if there == 1 else 's'} of {what}?"), abort=True)
        removed = 0
        if there:
            purging = _Purge(namespace, wanted, there, scheduled, dead_letter, sessions=bool(found.requires_session))
            with spinner(f"removing messages of {wanted}"):
                removed = asyncio.run(purging.run())
        left = max(0, there - removed)
        if json:
            told = {"namespace": namespace.name, "entity": str(wanted), "dead_letter": dead_letter}
            typer.echo(json_text.dumps({**told, "removed": removed, "left": left}))
        else:
            text = f"removed: {removed:,} message{'' if removed == 1 else 's'} of {what}"
            typer.echo(printable(f"{text}; {left:,} are left: a receiver has locked them" if left else text))
        if left:
            raise typer.Exit(ATTENTION)


def _subscriptions_hint(verb: str, topic: EntityPath) -> str:
    return f"{verb} {topic}/subscriptions/NAME. `twinbus entity list '{topic}*'` lists them."


# --- peek ------------------------------------------------------------------------------------------------------------


async def _peeked(
    namespace: Namespace, path: EntityPath, count: int, after: int, dead_letter: bool
) -> list[ReceivedMessage]:
    kinds, hint = "subscription", ""
    if path.subscription is None:
        kinds, hint = "queue", _subscriptions_hint("Peek at", path)
    async with namespace.connected(path, kinds, hint) as bus:
        pages = _pages(bus, path, after + 1 if after else 0, count, dead_letter=dead_letter)
        return [message async for page in pages for message in page]


async def _pages(
    bus: ServiceBusConnection, path: EntityPath, start: int, count: int | None, *, dead_letter: bool
) -> AsyncGenerator[list[ReceivedMessage], None]:
    """Yield pages of messages from a sequence number on, until there are `count` of them; None means all."""
    management = bus.management(str(path), address=path.address(dead_letter=dead_letter))
    left = count
    try:
        while left is None or left > 0:
            page = await management.peek(start, _PEEK_PAGE if left is None else min(left, _PEEK_PAGE))
            if not page:
                return
            yield page
            start = (page[-1].sequence_number or 0) + 1
            left = None if left is None else left - len(page)
    finally:
        await management.close()


def _print_messages(found: Sequence[ReceivedMessage]) -> None:
    columns = ("number", "id", "enqueued, UTC", "state", "session", "subject", "reason", "bytes", "body")
    rows = [
        (
            str(one.sequence_number),
            _text(one.message_id),
            _instant(one.enqueued_time),
            "" if one.state.name == "ACTIVE" else one.state.name.lower(),
            one.session_id,
            one.subject,
            one.dead_letter_reason,
            len(one.raw),
            _preview(one),
        )
        for one in found
    ]
    print_table(columns, rows, wrapped={"body", "reason"}, optional={"state", "session", "subject", "reason"})


def _print_whole(message: ReceivedMessage) -> None:
    fields = {name: value for name, value in _as_json(message).items() if value is not None}
    properties = fields.pop("application_properties", {})
    for name in ("body", "body_base64"):
        fields.pop(name, None)
    for name, value in fields.items():
        typer.echo(printable(f"{name.replace('_', ' '):24} {value}"))
    for name, value in properties.items():
        typer.echo(printable(f"  {name} = {value!r}"))
    text = _body_text(message)
    typer.echo()
    typer.echo(printable(text, newlines=True) if text is not None else base64.b64encode(message.body).decode())
    typer.echo()


def _as_json(message: ReceivedMessage) -> dict[str, Any]:
    text = _body_text(message)
    fields: dict[str, Any] = {
        "sequence_number": message.sequence_number,
        "message_id": None if message.message_id is None else _text(message.message_id),
        "state": message.state.name.lower(),
        "enqueued_time": None if message.enqueued_time is None else message.enqueued_time.isoformat(),
        "scheduled_enqueue_time": None
        if message.scheduled_enqueue_time is None
        else message.scheduled_enqueue_time.isoformat(),
        "delivery_count": message.delivery_count,
        "size": len(message.raw),
        "subject": message.subject,
        "session_id": message.session_id,
        "content_type": message.content_type,
        "correlation_id": None if message.correlation_id is None else _text(message.correlation_id),
        "reply_to": message.reply_to,
        "to": message.to,
        "time_to_live_seconds": None if message.time_to_live is None else message.time_to_live.total_seconds(),
        "dead_letter_reason": message.dead_letter_reason,
        "dead_letter_description": message.dead_letter_error_description,
        "application_properties": {str(name): _plain(value) for name, value in message.application_properties.items()},
    }
    return {**fields, "body": text} if text is not None else {**fields, "body_base64": _base64(message.body)}


def _body_text(message: ReceivedMessage) -> str | None:
    """Return the body as text; None for bytes that are not UTF-8."""
    body = message.body
    if not isinstance(body, bytes | bytearray | memoryview):
        return body if isinstance(body, str) else json_text.dumps(_plain(body))
    try:
        return bytes(body).decode()
    except UnicodeDecodeError:
        return None


def _preview(message: ReceivedMessage) -> str:
    text = _body_text(message)
    if text is None:
        return f"binary, {len(message.body):,} bytes"
    short = printable(text if len(text) <= _PREVIEW else text[: _PREVIEW - 1])
    return short if len(text) <= _PREVIEW else f"{short}…"


def _plain(value: Any) -> Any:
    """Return an AMQP value for JSON."""
    from twinbus.connect import to_datetime  # noqa: PLC0415 - slow
    from twinbus.values import Timestamp  # noqa: PLC0415

    if isinstance(value, Timestamp):
        return to_datetime(value).isoformat()
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _base64(bytes(value))
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _text(value: object) -> str:
    return _base64(value) if isinstance(value, bytes) else "" if value is None else str(value)


def _instant(value: datetime | None) -> str:
    return "" if value is None else f"{value:%Y-%m-%d %H:%M:%S}"


# --- send ------------------------------------------------------------------------------------------------------------


def _bodies(body: str | None, file: File | None, *, lines: bool) -> list[bytes]:
    if body is not None:
        content = body.encode()
    elif file is not None:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise OperatorError(f"{file} cannot be read: {error.strerror}", "Name a file with the body.") from error
    else:
        if sys.stdin.isatty():
            raise WrongUsageError("there is no body", 'Give it: twinbus entity send orders "hello". Or use --file.')
        content = sys.stdin.buffer.read()
    if not lines:
        return [content]
    found = content.splitlines()
    if not found:
        raise WrongUsageError("the input has no line, so there is no message", "Leave out --lines for an empty body.")
    return found


def _later(delay: timedelta) -> datetime:
    try:
        return datetime.now(UTC) + delay
    except OverflowError:
        raise WrongUsageError("--delay ends after the last date that Python has", "Give a shorter one.") from None


def _property(text: str) -> tuple[str, bool | int | float | str]:
    name, equals, value = text.partition("=")
    typed = name.endswith(":")
    name = name.removesuffix(":")
    if not equals or not name:
        raise WrongUsageError(f"--property {text!r} is not name=text or name:=value", _VALUES)
    return name, _number_or_bool(text, value) if typed else value


def _number_or_bool(text: str, value: str) -> bool | int | float:
    try:
        found = json_text.loads(value)
    except ValueError:
        found = None
    if isinstance(found, bool):
        return found
    if isinstance(found, int) and -_LARGEST <= found <= _LARGEST:
        return found
    if isinstance(found, float) and isfinite(found):
        return found
    raise WrongUsageError(f"--property {text!r} has no value that a message can carry", _VALUES)


async def _send(namespace: Namespace, path: EntityPath, messages: Sequence[Message]) -> None:
    sessions = all(message.session_id is not None for message in messages)
    hint = "" if sessions else "Add --session ID: each message for this entity belongs to a session."
    sent = 0
    try:
        async with namespace.connected(path, "queue or topic", hint) as bus, await bus.sender(path.root) as sender:
            for start in range(0, len(messages), _SEND_PAGE):
                page = messages[start : start + _SEND_PAGE]
                await sender.send(page)
                sent += len(page)
    except TwinbusError as error:
        if not sent:
            raise
        text = error.text if isinstance(error, OperatorError) else str(error)
        raise OperatorError(
            f"{sent:,} of {len(messages):,} messages were sent. Then: {text}",
            f"The first {sent:,} are there: send only the rest. Some of the next {_SEND_PAGE:,} may be there too.",
        ) from error


# --- purge -----------------------------------------------------------------------------------------------------------


class _NotDelivered(NamedTuple):
    """A deferred or scheduled message."""

    state: MessageState
    session: str | None
    number: int


class _Purge:
    """Removes the messages of one queue or subscription: at most as many as it had when the purge began.

    Messages that can be received are received and deleted. Deferred and scheduled messages are not delivered: they are
    found by peeking, and removed by their sequence numbers.
    """

    def __init__(
        self,
        namespace: Namespace,
        path: EntityPath,
        there: int,
        scheduled: int,
        dead_letter: bool,
        *,
        sessions: bool,
    ) -> None:
        self._namespace = namespace
        self._path = path
        self._left = there
        self._scheduled = scheduled
        self._dead_letter = dead_letter
        # A dead-letter queue has no sessions.
        self._sessions = sessions and not dead_letter
        self._removed = 0

    async def run(self) -> int:
        """Remove the messages. Returns how many were removed."""
        async with self._namespace.connected(self._path, "queue or subscription") as bus:
            if self._sessions:
                await self._empty_sessions(bus)
            else:
                await self._empty(await self._receiver(bus))
            if self._left > 0 and not self._dead_letter:
                await self._remove_by_number(bus)
        return self._removed

    async def _receiver(self, bus: ServiceBusConnection, session: SessionChoice = None) -> Receiver:
        from twinbus.connect import RECEIVE_AND_DELETE  # noqa: PLC0415 - slow

        return await bus.receiver(
            self._path.root,
            subscription=self._path.subscription,
            mode=RECEIVE_AND_DELETE,
            dead_letter=self._dead_letter,
            session=session,
            session_timeout=_WAIT_SECONDS,
        )

    async def _empty(self, receiver: Receiver) -> None:
        async with receiver:
            while (waiting := self._left - self._scheduled) > 0:
                page = await receiver.receive(min(waiting, _DELETE_PAGE), _WAIT_SECONDS)
                if not page:
                    return
                self._count(len(page))

    async def _empty_sessions(self, bus: ServiceBusConnection) -> None:
        from twinbus.connect import NEXT_AVAILABLE, OperationTimeoutError  # noqa: PLC0415 - slow

        while self._left > self._scheduled:
            try:
                receiver = await self._receiver(bus, NEXT_AVAILABLE)
            except OperationTimeoutError:
                return  # no session has a message that can be received
            await self._empty(receiver)

    async def _remove_by_number(self, bus: ServiceBusConnection) -> None:
        from twinbus.connect import MessageNotFoundError, MessageState, bisect_refused  # noqa: PLC0415 - slow

        deferred: dict[str | None, list[int]] = {}
        scheduled: list[int] = []
        for message in await self._not_delivered(bus):
            if message.state is MessageState.DEFERRED:
                deferred.setdefault(message.session, []).append(message.number)
            else:
                scheduled.append(message.number)
        for session, numbers in deferred.items():
            async with await self._receiver(bus, session) as receiver:
                for part in _parts(numbers):
                    self._count(len(await receiver.receive_deferred(part, leave_out_missing=True)))
        management = bus.management(str(self._path))

        async def cancel(part: Sequence[int]) -> bool:
            await management.cancel_scheduled(part)
            return True

        for part in _parts(scheduled):
            answers = await bisect_refused(part, cancel, MessageNotFoundError)
            self._count(sum(len(done) for done, answer in answers if answer))
        await management.close()

    async def _not_delivered(self, bus: ServiceBusConnection) -> list[_NotDelivered]:
        """Return the oldest deferred and scheduled messages: at most as many as the purge may still remove.

        Programs may defer and schedule more messages in the meantime.
        """
        from twinbus.connect import MessageState  # noqa: PLC0415 - slow

        found: list[_NotDelivered] = []
        async with aclosing(_pages(bus, self._path, 0, None, dead_letter=False)) as pages:
            async for page in pages:
                found += [
                    _NotDelivered(one.state, one.session_id if self._sessions else None, one.sequence_number or 0)
                    for one in page
                    if one.state in (MessageState.DEFERRED, MessageState.SCHEDULED)
                ]
                if len(found) >= self._left:
                    break
        return found[: self._left]

    def _count(self, removed: int) -> None:
        self._removed += removed
        self._left -= removed


def _parts(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[start : start + _PEEK_PAGE] for start in range(0, len(numbers), _PEEK_PAGE)]
