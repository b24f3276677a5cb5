"""The namespace for Spark's Python workers: blocking calls, one at a time, each on the broker's own event loop.

How messages are completed by their sequence numbers. Service Bus completes only messages that the receiver has locked,
and a receiver gets the unlocked messages with the lowest numbers first. So `complete` receives from the front of the
queue and completes the wanted messages. All other received messages stay locked until the end, so that the next receive
does not return them again. At the end `complete` releases these other messages, which does not change their delivery
count. `complete` ends when it receives a number that is higher than the highest wanted number.

Each other message in front of the wanted messages costs one delivery, and no other receiver can get it while it is
locked. So `complete` holds at most MOST_HELD other messages (a batch of a stream has the same limit by default), for at
most half of their lock duration: a lock that expires would increase the delivery count. Before the first receive,
`complete` counts the messages in front by peeking. Of other messages, only the delivery ids are stored in memory.

What happens in an outage. A query that starts has to fail at once if its namespace cannot be reached. A stream that
runs should survive a restart of the namespace. So a patient broker repeats an operation that failed with a RetryError,
for up to the option `timeout`. Peeking and completing can be repeated: a message that the first try has completed is
gone, and so it is not in `left`. Sending is not repeated here, because the messages might arrive twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, TypeVar
from uuid import uuid4

from twinbus.connect import (
    Management,
    MessageLockLostError,
    ReceivedMessage,
    Receiver,
    Sender,
    ServiceBusArgumentError,
    ServiceBusConnection,
    connect,
)
from twinbus.errors import RetryError
from twinbus.message import Message
from twinbus.pipeline.servicebus.fast_marks import marks_of
from twinbus.pipeline.servicebus.message_marks import MessageMarks
from twinbus.pipeline.servicebus.offsets import SequenceNumbers
from twinbus.pipeline.servicebus.options import SourceOptionError, SourceOptions
from twinbus.values import Condition

_log = logging.getLogger(__name__)

T = TypeVar("T")

PAGE: Final = 250
MOST_HELD: Final = 10_000
_TAKE: Final = 1000
_EMPTY_SECONDS: Final = 2.0
# Seconds between two tries of a patient broker. They double from the first to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0
# The shortest and the longest lock that the service grants, in seconds.
SHORTEST_LOCK, LONGEST_LOCK = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """What one call of `Broker.complete` did."""

    left: SequenceNumbers
    """Numbers that were not completed. Some of these messages may not exist any more."""
    held: int
    """How many other messages the call had to receive and release."""
    stopped: str | None
    """Why the call ended before it had received all wanted messages; None if it ended normally."""
    lock_seconds: float | None = None
    """The lock duration of the entity; None if no message was received, or if the clocks of broker and client differ
    too much."""


class Broker:
    """A connection to the namespace for one task: `with Broker(options) as broker`.

    If `is_patient`, it repeats peeks and completions while the namespace cannot be reached, for up to the option
    `timeout`.
    """

    def __init__(self, options: SourceOptions, *, is_patient: bool = False) -> None:
        self._options = options
        self._patience = options.timeout if is_patient else 0.0
        self._loop = asyncio.new_event_loop()
        self._bus: ServiceBusConnection | None = None
        self._management: Management | None = None  # one link for all pages
        self._senders: dict[str, Sender] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._loop.is_closed():
            if self._bus is not None:
                self._loop.run_until_complete(self._bus.close())
            self._loop.close()

    # --- peeking -----------------------------------------------------------------------------------------------

    def first_at_or_after(self, number: int) -> int | None:
        """Returns the lowest sequence number in the queue that is not below `number`; None if there is none."""
        return next((found.number for found, _ in self.from_number(number, 1) if found.number is not None), None)

    def last_after(self, number: int) -> int | None:
        """Returns the highest sequence number in the queue if it is above `number`, otherwise None.

        Finds it by a binary search: the number of peeks grows with the logarithm of the distance.
        """
        low = self.first_at_or_after(number + 1)
        if low is None:
            return None
        stride = 1
        while (found := self.first_at_or_after(low + stride)) is not None:
            low, stride = found, stride * 2
        high = low + stride  # nothing from here on
        while high - low > 1:
            middle = (low + high) // 2
            found = self.first_at_or_after(middle)
            low, high = (low, middle) if found is None else (found, high)
        return low

    def from_number(
        self, first: int, page_size: int = PAGE, *, session: str | None = None
    ) -> Iterator[tuple[MessageMarks, ReceivedMessage]]:
        """Yields the messages from this sequence number on, each with its marks, without locking them.

        With `session`, only messages of this session are peeked at.
        """
        while page := self._page(first, page_size, session):
            # The last message of a page of n messages has at least the number first + n - 1, also if it is unreadable.
            following = first + len(page)
            for message in page:
                marks = marks_of(message)
                if marks.number is not None and marks.number >= following:
                    following = marks.number + 1
                yield marks, message
            first = following

    def page(self, first: int) -> list[ReceivedMessage]:
        """Returns at most PAGE messages from this sequence number on, without locking them, by one operation."""
        return self._page(first, PAGE)

    def between(self, first: int, last: int) -> Iterator[tuple[MessageMarks, ReceivedMessage]]:
        """Yields the messages between two sequence numbers, both included, without locking them."""
        for marks, message in self.from_number(first, min(PAGE, last - first + 1)) if first <= last else ():
            number = marks.number
            if number is not None and number > last:
                return
            yield marks, message
            if number == last:
                return  # without a further peek

    def these(
        self, numbers: SequenceNumbers, *, session: str | None = None
    ) -> Iterator[tuple[MessageMarks, ReceivedMessage]]:
        """Yields the messages with these numbers, as far as they exist, in any state, without locking them.

        With `session`, only messages of this session are peeked at.
        """
        wanted, page_size = numbers.at_or_after(0), min(PAGE, len(numbers))
        while wanted is not None:
            page = self._page(wanted, page_size, session)
            if not page:
                return
            following = wanted + 1
            for message in page:
                marks = marks_of(message)
                if marks.number is not None:
                    following = max(following, marks.number + 1)
                    if marks.number in numbers:
                        yield marks, message
            wanted = numbers.at_or_after(following)

    def is_out_of_reach(self, number: int) -> bool:
        """Returns whether a message with this number has too many messages before it for `complete`.

        The limit is MOST_HELD active messages. Peeks at messages in other states cost too, so there is also a limit of
        4 * MOST_HELD messages in any state.
        """
        lowest = self.first_at_or_after(0)
        if lowest is None or lowest >= number:
            return False
        active = 0
        for seen, (marks, _) in enumerate(self.from_number(lowest)):
            if marks.number is not None and marks.number >= number:
                break
            active += marks.is_active
            if active > MOST_HELD or seen >= 4 * MOST_HELD:
                return True
        return False

    def _page(self, number: int, count: int, session: str | None = None) -> list[ReceivedMessage]:
        return self._repeated(lambda: self._peek(number, count, session))

    async def _peek(self, number: int, count: int, session: str | None = None) -> list[ReceivedMessage]:
        if self._management is None:
            self._management = self._connected().management(self._options.path, address=self._options.address)
        return await self._management.peek(number, count, session=session)

    # --- completing and sending --------------------------------------------------------------------------------

    def check_reachable(self) -> None:
        """Raises ServiceBusCommunicationError if the namespace cannot be reached. Costs no operation."""
        self._run(self._connected().open())

    def check_receiving(self) -> None:
        """Raises SourceOptionError if the entity requires sessions. Attaches a receiver, but receives no message."""
        try:
            self._run(self._check_receiving())
        except ServiceBusArgumentError as error:
            if error.condition != Condition.NOT_ALLOWED:
                raise
            raise SourceOptionError(
                f"servicebus cannot stream {self._options.address}: to complete what it has read, a stream receives "
                f"without a session, and the namespace refuses that ({error.description}). If the entity requires "
                "sessions, set the option sessions=true. Without it, the entity can be read with spark.read, or as a "
                "stream with completeCommitted=false, which removes nothing."
            ) from error

    def check_sessions(self) -> None:
        """Raises SourceOptionError if the entity has no sessions. Accepts a session that no message belongs to."""
        try:
            self._run(self._check_sessions())
        except ServiceBusArgumentError as error:
            if error.condition != Condition.NOT_ALLOWED:
                raise
            raise SourceOptionError(
                f"servicebus cannot read the sessions of {self._options.address}: the namespace refuses it "
                f"({error.description}). Remove the option sessions, or set it to false."
            ) from error

    async def _check_sessions(self) -> None:
        session = f"twinbus-check-{uuid4()}"
        async with await self._connected().receiver(self._options.path, session=session, prefetch=0):
            pass

    async def _check_receiving(self) -> None:
        async with await self._receiver():
            pass

    def still_there(
        self, numbers: SequenceNumbers, newest: int | None, *, session: str | None = None
    ) -> SequenceNumbers:
        """Returns the subset of `numbers` whose messages are active and were not enqueued after `newest` (ms)."""
        found = (marks for marks, _ in self.these(numbers, session=session) if _is_meant(marks, newest))
        return SequenceNumbers.of(marks.number for marks in found if marks.number is not None)

    def complete(self, numbers: SequenceNumbers, newest: int | None) -> Completion:
        """Completes the active messages with these numbers, and no other message.

        A message that was enqueued after `newest` (ms) is not completed: it is a different message with the same
        number. A message that another receiver has locked is not completed either; its number is in `left` of the
        result.
        """
        if not numbers:
            return Completion(numbers, 0, None)
        if self.is_out_of_reach(numbers.first):
            return Completion(numbers, MOST_HELD, _too_many())
        done = self._repeated(lambda: self._complete(numbers, newest))
        if done.stopped is None and done.left:
            return replace(done, left=self.still_there(done.left, newest))
        return done

    async def _complete(self, numbers: SequenceNumbers, newest: int | None) -> Completion:
        async with await self._receiver() as receiver:
            return await complete_received(receiver, numbers, newest)

    async def _receiver(self) -> Receiver:
        options = self._options
        return await self._connected().receiver(options.path, dead_letter=options.dead_letter, prefetch=0)

    def send(self, batches: Mapping[str, Sequence[Message]]) -> None:
        """Returns when every message was accepted."""
        self._run(self._send(batches))

    async def _send(self, batches: Mapping[str, Sequence[Message]]) -> None:
        for entity, messages in batches.items():
            sender = self._senders.get(entity)
            if sender is None:
                sender = self._senders[entity] = await self._connected().sender(entity)
            await sender.send(messages)

    # --- the connection ----------------------------------------------------------------------------------------

    def _repeated(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return repeated(lambda: self._run(call()), self._patience, self._options.address)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(call)

    def _connected(self) -> ServiceBusConnection:
        if self._bus is None:
            self._bus = connection(self._options)
        return self._bus


def repeated(call: Callable[[], T], seconds: float, address: str) -> T:
    """Returns the result of a call. Repeats the call for up to so many seconds while it raises a RetryError."""
    ends, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            return call()
        except RetryError as error:
            if time.monotonic() + pause > ends:
                raise
            _log.warning("%s: trying again in %s s: %s", address, pause, error)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def connection(options: SourceOptions) -> ServiceBusConnection:
    """Returns a connection to the namespace of the options, which is not open yet.

    This is the only place where options become a connection: credentials, certificates and proxies belong here.
    """
    network = options.network_options()
    # With a CA, also a connection string of the emulator means TLS.
    return connect(
        options.endpoint(),
        tls=network.tls_context(),
        credential=options.token_source(),
        network=network,
        timeout=options.timeout,
    )


async def complete_received(receiver: Receiver, numbers: SequenceNumbers, newest: int | None) -> Completion:
    """Receives messages, and completes those with these numbers that were not enqueued after `newest` (ms).

    Releases all other messages that it receives.
    """
    others, link, ends, stopped = array("I"), None, float("inf"), None
    held, missing, completed = 0, len(numbers), set[int]()
    lock_seconds: float | None = None
    completing: asyncio.Task[set[int]] | None = None
    received: list[ReceivedMessage] = []  # and not being completed yet
    try:
        while missing > 0 and stopped is None:
            # Request as many messages as are missing, and as many more as other messages were received so far.
            messages = await receiver.receive(min(_TAKE, missing + held), _EMPTY_SECONDS)
            if not messages:
                break
            lock_seconds = _granted_seconds(messages[0])
            if messages[0].link is not link:  # a new link: the locks of the old link have ended
                others, link = array("I"), messages[0].link
            is_beyond = False
            for message in messages:
                marks = marks_of(message)
                number = marks.number or 0
                if number in numbers and _is_meant(marks, newest):
                    received.append(message)
                else:
                    others.append(message.delivery_id)
                    is_beyond = is_beyond or number > numbers.last
            held += len(messages) - len(received)
            missing -= len(received)
            if held and ends == float("inf"):
                ends = time.monotonic() + _lock_seconds(messages[0]) / 2
            if completing is not None:
                completed |= await completing
            # The next messages are received while these are completed.
            completing, received = asyncio.create_task(_completed(receiver, received)), []
            if is_beyond:
                break
            if held > MOST_HELD:
                stopped = _too_many()
            elif time.monotonic() > ends:
                stopped = f"half of the lock time was over after {held} messages that this stream has not read"
        if completing is not None:
            completed |= await completing
    finally:
        if completing is not None:  # if an error has ended the loop, nobody has waited for it
            await asyncio.gather(completing, return_exceptions=True)
        others.extend(message.delivery_id for message in received if message.link is link)
        receiver.give_back(others)
    return Completion(numbers - SequenceNumbers.of(completed), held, stopped, lock_seconds)


def _too_many() -> str:
    return f"more than {MOST_HELD} messages that this stream has not read stand before them"


def _is_meant(marks: MessageMarks, newest: int | None) -> bool:
    return marks.is_active and (newest is None or marks.enqueued is None or marks.enqueued <= newest)


def _lock_seconds(message: ReceivedMessage) -> float:
    """Returns the lock duration of the message; the shortest possible duration if the clocks differ too much."""
    return _granted_seconds(message) or SHORTEST_LOCK


def _granted_seconds(message: ReceivedMessage) -> float | None:
    """Returns the lock duration of the message; None if the clocks differ too much.

    A lock ends no earlier than its duration after the arrival of the message, and both times are by the broker's clock.
    So a clock of this machine that is behind does not make the lock seem longer than that (L5).
    """
    marks = marks_of(message)
    until = marks.locked_until
    seconds = 0.0 if until is None else until / 1000 - time.time()
    if until is not None and marks.enqueued is not None:
        seconds = min(seconds, (until - marks.enqueued) / 1000)
    return seconds if SHORTEST_LOCK <= seconds <= LONGEST_LOCK else None


async def _completed(receiver: Receiver, messages: Sequence[ReceivedMessage]) -> set[int]:
    """Completes messages. Returns the numbers of those that were completed.

    A message whose lock has expired is not completed, and its number is not in the result.
    """
    try:
        await receiver.complete(messages)
    except MessageLockLostError as error:
        lost = {id(message) for message in error.failed}
        messages = [message for message in messages if id(message) not in lost]
    return {number for message in messages if (number := marks_of(message).number) is not None}
