"""A sender of an asyncio pair, with azure-servicebus' own interface: `calls` decides, this carries out."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from typing import Any, Final, Self, TypeVar, assert_never

from azure.servicebus import ServiceBusMessageBatch
from azure.servicebus.aio import ServiceBusSender
from azure.servicebus.exceptions import OperationTimeoutError

from twinbus.pairing import calls
from twinbus.pairing.aio_attempts import Attempts, wait
from twinbus.pairing.aio_backlog import BacklogLinks
from twinbus.pairing.calls import FailedOverMeanwhileError, LimitsOf, NoTurnError, OnPrimary, Place, Steps, ToBacklog
from twinbus.pairing.errors import ScheduledInBacklogError
from twinbus.pairing.failover import Route
from twinbus.pairing.outgoing import IdentifiedBatch, identified, is_empty, raws_of
from twinbus.pairing.sdk import Retries, abort, empty_batch, is_open, keep_alive_of, open_link

T = TypeVar("T")
# The time-out to give to the SDK: none on an open link, where ours holds.
Call = Callable[[ServiceBusSender, float | None], Coroutine[Any, Any, T]]
# Looked up once: a member of an Enum costs as much as half a microsecond at every use.
_PRIMARY: Final = Route.PRIMARY


class PairedSender:
    """Sends to the primary, or to the backlog while the entity is failed over.

    `timeout` bounds all of a call: waiting for a turn, the primary, the backlog (S6). Tasks may share it: on the
    primary they take turns, so that one that is cancelled or gives up takes nothing from the others (S13). Without a
    time-out a turn is waited for as long as it takes, each call before it taking `try_timeout` at most.
    """

    def __init__(
        self,
        place: Place,
        make: Callable[[], ServiceBusSender],
        links: BacklogLinks,
        attempts: Attempts,
        retries: Retries,
    ) -> None:
        self._place = place
        self._make = make
        self._links = links
        self._attempts = attempts
        self._retries = retries
        self._turn = asyncio.Lock()
        self._sender = make()
        self._episode = place.cell.entity.episode
        self._closed = False
        self.fully_qualified_namespace: str = self._sender.fully_qualified_namespace
        self.entity_name: str = self._sender.entity_name

    # --- azure-servicebus' interface -------------------------------------------------------------------------------

    async def send_messages(self, message: Any, *, timeout: float | None = None, **kwargs: Any) -> None:
        until = self._begin(timeout)
        message = identified(message)
        if is_empty(message):
            return
        await self._call(
            lambda sender, seconds: sender.send_messages(message, timeout=seconds, **kwargs),
            lambda: calls.divert(self._place, raws_of(message), until),
            until,
        )

    async def create_message_batch(self, max_size_in_bytes: int | None = None) -> ServiceBusMessageBatch:
        async def made(sender: ServiceBusSender, seconds: float | None) -> ServiceBusMessageBatch:
            if not is_open(sender):
                await open_link(sender, seconds)
            return await sender.create_message_batch(max_size_in_bytes)

        until = self._begin(None)
        batch = await self._call(
            made, lambda: calls.instead(lambda: empty_batch(self._sender, max_size_in_bytes)), until
        )
        return IdentifiedBatch.of(batch)

    async def schedule_messages(
        self, messages: Any, schedule_time_utc: datetime, *, timeout: float | None = None, **kwargs: Any
    ) -> list[int]:
        until = self._begin(timeout)
        message = identified(messages)
        if is_empty(message):
            return []
        return await self._call(
            lambda sender, seconds: sender.schedule_messages(message, schedule_time_utc, timeout=seconds, **kwargs),
            lambda: calls.schedule(self._place, raws_of(message), until, schedule_time_utc),
            until,
        )

    async def cancel_scheduled_messages(
        self, sequence_numbers: int | list[int], *, timeout: float | None = None, **kwargs: Any
    ) -> None:
        until = self._begin(timeout)
        if waiting := calls.in_backlog(sequence_numbers):
            raise ScheduledInBacklogError(waiting)
        given = [sequence_numbers] if isinstance(sequence_numbers, int) else sequence_numbers
        await self._call(
            lambda sender, seconds: sender.cancel_scheduled_messages(sequence_numbers, timeout=seconds, **kwargs),
            lambda: calls.cannot_cancel(given),
            until,
        )

    async def close(self) -> None:
        """A call that another task has under way may end first, if it is quick; later ones are refused (S13)."""
        if not self._closed:
            self._closed = True
            self.let_go()

    def let_go(self) -> None:
        """Closed, or its pair's primary is: the link goes in the background, after the call that is under way on it."""
        self._attempts.retire(self._sender, self._turn)

    async def __aenter__(self) -> Self:
        await self._call(open_link, calls.nothing, self._begin(None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # Dropped without being closed: neither its connection nor the task that keeps it alive stays behind.
        with contextlib.suppress(Exception):
            open_ = not self._closed and self._place.cell.entity.route is not Route.CLOSED
            if open_ and not sys.is_finalizing() and (keep_alive := keep_alive_of(self._sender)) is not None:
                keep_alive.cancel()
                abort(self._sender)

    # --- carrying out ----------------------------------------------------------------------------------------------

    async def _call(self, call: Call[T], backlog: Callable[[], Steps[T]], until: float | None) -> T:
        entity = self._place.cell.entity
        failed: Exception | None = None
        if entity.route is _PRIMARY:
            # The healthy path: the SDK's sender under a deadline, and nothing told unless something was wrong.
            try:
                result = await self._on_primary(call, until)
            except FailedOverMeanwhileError:
                pass
            except Exception as error:
                if self._closed:
                    raise _shut() from error
                failed = error
            else:
                after = self._place.cell.entity
                if after is not entity or after.deadline is not None:
                    self._succeeded_late()
                return result
        return await self._carry_out(calls.call(self._place, backlog, failed, until), call, until)

    async def _carry_out(self, steps: Steps[T], call: Call[Any], until: float | None) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._try(step, call, until)
                except Exception as error:
                    if self._closed and isinstance(step, OnPrimary):
                        raise _shut() from error
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return] # typeshed: the value of any generator
        finally:
            steps.close()

    async def _try(self, step: calls.Step, call: Call[Any], until: float | None) -> Any:
        match step:
            case OnPrimary():
                return await self._on_primary(call, until)
            case LimitsOf(queue, seconds):
                return await self._links[queue].limits(seconds)
            case ToBacklog(queue, payload, seconds):
                return await self._links[queue].take(payload, seconds)
            case _:
                assert_never(step)

    async def _on_primary(self, call: Call[T], until: float | None) -> T:
        attempts, turn, cut_short, seconds = self._attempts, self._turn, False, self._attempts.seconds
        if until is None:
            await turn.acquire()
        else:
            cut_short = await attempts.turn(turn, self.entity_name, until - time.monotonic())
            # Asked for when the turn has come: waiting for it took its share.
            seconds = self._place.primary_seconds(until)
        try:
            self._still_on_primary()
            return await attempts.tries(partial(self._once, call), seconds, self._retries, self._paused)
        except OperationTimeoutError as error:
            self._replace()
            if cut_short:
                raise NoTurnError(self.entity_name, seconds) from error
            raise
        except Exception:
            # The SDK has closed its link where it had to.
            raise
        except BaseException:
            # Cancelled in the middle of a frame, perhaps: the link cannot be used again (S13).
            self._replace()
            raise
        finally:
            turn.release()

    def _once(self, call: Call[T], left: float) -> Coroutine[Any, Any, T]:
        sender = self._sender
        return call(sender, None if is_open(sender) else left)

    async def _paused(self, seconds: float) -> None:
        """Between two tries, cut short where calls go another way meanwhile (S5, C3)."""
        rerouted = asyncio.Event()
        self._place.cell.rerouted.add(rerouted.set)
        try:
            await wait(rerouted, seconds)
        finally:
            self._place.cell.rerouted.discard(rerouted.set)
        self._still_on_primary()

    def _still_on_primary(self) -> None:
        if self._closed:
            raise _shut()
        entity = self._place.cell.entity
        if entity.route is not _PRIMARY:
            raise FailedOverMeanwhileError
        if entity.episode != self._episode:
            # After a failover the old link may be one that nobody answers on: begin anew.
            self._episode = entity.episode
            self._replace()

    def _succeeded_late(self) -> None:
        """The entity was failing, or something happened to it, while this call was under way (S3, S5)."""
        self._place.cell.succeeded()

    def _replace(self) -> None:
        """Of the call that has the turn."""
        if not self._closed:
            old = self._sender
            if self._place.cell.entity.route is not Route.CLOSED:
                self._sender = self._make()
            self._attempts.discard(old)

    def _begin(self, timeout: float | None) -> float | None:
        """Where the call has to end, on the monotonic clock."""
        if self._closed:
            raise _shut()
        if timeout is None:
            return None
        if timeout <= 0:
            raise ValueError("The timeout must be greater than 0.")
        return time.monotonic() + timeout


def _shut() -> ValueError:
    return ValueError("The handler has already been shutdown. Please use the pair to create a new instance.")
