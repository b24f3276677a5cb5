"""One call of a sender, carried out as the drivers do: `send_flow` decides the steps, a fake entity answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.pairing.simulation.call_messages import LIMITS, TOMORROW, SentTransfer, fit, transfer_of
from tests.pairing.simulation.call_oracle import INSTEAD, NUMBERS, CallKind, CallOracle, no_turn
from tests.pairing.simulation.clause_model import TRY_TIMEOUT, ViolationError
from tests.pairing.simulation.fake_entities import OVERDUE, QUICK, Answer, Failure, FakeEntity, failure
from twinbus.backlog import FailureKind
from twinbus.errors import CallerError
from twinbus.pairing.decide import send_flow
from twinbus.pairing.decide.failover import SendRoute
from twinbus.pairing.decide.send_flow import (
    CallOrigin,
    CallPrimary,
    Diversion,
    DivertTo,
    FailedOverMeanwhileError,
    QueueLeftMeanwhileError,
    SendStep,
    SendSteps,
    WaitForQueue,
)
from twinbus.pairing.message_copies import next_payload

if TYPE_CHECKING:
    from .process import Sender, SimulatedProcess


class QueueAnswered(NamedTuple):
    """The answer of a backlog queue to a call."""

    queue: str
    error: Exception | None
    parcel: SentTransfer | None


class Turn:
    """One call at a time on a link; the others wait."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[Callable[[], bool]] = deque()

    def ask(self, come: Callable[[], bool]) -> None:
        """Wait for a turn: `come` is called when the turn comes, and returns whether the call uses the turn."""
        if self._held:
            self._waiting.append(come)
        else:
            self._held = True
            come()

    def leave(self) -> None:
        while self._waiting:
            if self._waiting.popleft()():
                return
        self._held = False


class SimulatedCall:
    def __init__(self, process: SimulatedProcess, sender: Sender, story: CallOracle, cancelled_at: int | None) -> None:
        self._process = process
        self._sender = sender
        self._context = sender.context
        self.story = story
        self._steps: SendSteps[Any] | None = None
        self._turn: Turn | None = None
        self._trying: object = None
        self._tried = 0
        self._cancelled_at = cancelled_at
        self._origin = CallOrigin(0, False)

    def begin(self) -> None:
        process, story = self._process, self.story
        story.restores = story.belief.restores
        story.begins(process.now())
        self._origin = CallOrigin(self._context.shared.entity.restores, story.with_message)
        if self._context.shared.entity.route is SendRoute.PRIMARY and process.chance.random() < 0.7:
            # The usual path of the drivers: they start `send_flow` only after a failure.
            self._try(CallPrimary(self._context.primary_seconds(story.until)))
        else:
            self._call()

    # --- the generator -----------------------------------------------------------------------------------------------

    def _call(self, failed: Exception | None = None) -> None:
        self._steps = steps = send_flow.call(self._context, self._origin, self._backlog, failed, self.story.until)
        self._carry_on(lambda: next(steps))

    def _backlog(self) -> SendSteps[Any]:
        story = self.story
        match story.what:
            case CallKind.SEND:
                return send_flow.divert(self._context, list(story.letter.raws), story.until)
            case CallKind.SCHEDULE:
                return send_flow.schedule(self._context, list(story.letter.raws), TOMORROW, story.until)
            case CallKind.OPEN:
                return send_flow.nothing()
            case CallKind.BATCH:
                return send_flow.instead(lambda: INSTEAD)
            case CallKind.CANCEL:
                return send_flow.cannot_cancel(NUMBERS)

    def _carry_on(self, resume: Callable[[], SendStep]) -> None:
        try:
            step = resume()
        except StopIteration as end:
            self._end(end.value, None)
        except Exception as error:
            self._end(None, error)
        else:
            self._try(step)

    def _got(self, result: Any) -> None:
        steps = self._steps
        if steps is None:
            self._context.shared.succeeded(*self._origin)
            self._end(result, None)
        else:
            self._carry_on(lambda: steps.send(result))

    def _threw(self, error: Exception) -> None:
        steps = self._steps
        if steps is not None:
            self._carry_on(lambda: steps.throw(error))
        else:
            self._call(None if isinstance(error, FailedOverMeanwhileError) else error)

    def _end(self, value: Any, error: Exception | None) -> None:
        self._over()
        self.story.ends(value, error, self._process.now())

    def _over(self) -> None:
        self._trying = None
        self._process.calls.discard(self)
        self._leave_turn()

    def _cancel(self, token: object) -> None:
        """The caller cancels the call, at any step (S13)."""
        if self._trying is not token or not self._process.alive:
            return
        self.story.stock.endings[f"cancelled at step {self._tried}"] += 1
        self._over()
        self.left_behind()
        self.story.abandons_probe()
        if self._steps is not None:
            self._steps.close()

    def left_behind(self) -> None:
        """Record that it is unknown what happened to the messages: the caller gets no result."""
        self.story.stock.doubtful.update(self.story.letter.ids)

    # --- one step ----------------------------------------------------------------------------------------------------

    def _try(self, step: SendStep) -> None:
        process = self._process
        now = process.now()
        self.story.tries(step, now)
        self._tried += 1
        token = self._trying = object()
        if self._tried == self._cancelled_at:
            process.at(
                process.chance.random() * process.chance.choice((QUICK, TRY_TIMEOUT)), lambda: self._cancel(token)
            )
        match step:
            case CallPrimary():
                until = self.story.until
                left = None if until is None else until - now
                self._in_turn(self._sender.turn, left, lambda _: self._primary(), self._primary_answered)
            case DivertTo(queue, diversion, seconds, probe):
                turn = process.links[queue]
                late = partial(self._failed, queue)
                self._in_turn(turn, seconds, lambda left: self._queue(queue, diversion, left, probe), late)
            case WaitForQueue(_, seconds):
                self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        process, token = self._process, self._trying

        def look_again() -> None:
            process.rotation.on_change.discard(wake)
            if self._trying is token and process.alive:
                self._trying = None
                self.story.seeks(process.now())
                self._got(None)

        def wake() -> None:
            process.at(0.0, look_again)

        process.rotation.on_change.add(wake)
        process.at(seconds, look_again)

    def _in_turn(
        self, turn: Turn | None, seconds: float | None, go: Callable[[float], None], late: Callable[[Failure], None]
    ) -> None:
        """Call `go` with the rest of the seconds, or `late`. Without turns (asyncio), calls overlap."""
        process, token = self._process, self._trying
        if turn is None:
            go(0.0)
            return
        end = None if seconds is None else process.now() + seconds
        came = False

        def come() -> bool:
            nonlocal came
            if self._trying is not token or not process.alive:
                return False
            came, self._turn = True, turn
            go(0.0 if end is None else end - process.now())
            return True

        def overdue() -> None:
            if self._trying is token and not came and process.alive:
                late(no_turn("a link", seconds or 0.0))

        turn.ask(come)
        if seconds is not None and not came:
            process.at(seconds + OVERDUE, overdue)

    def _leave_turn(self) -> None:
        if self._turn is not None:
            turn, self._turn = self._turn, None
            turn.leave()

    def _primary(self) -> None:
        process, story = self._process, self.story
        if self._context.shared.entity.route is not SendRoute.PRIMARY:
            self._failed_over_meanwhile()
            return
        if story.belief.over or story.belief.closed:
            raise ViolationError(f"a call on the primary while {story.belief.mode}")
        parcel = SentTransfer(story.letter.ids, story.letter.spoilt) if story.with_message else None
        # Computed again: the turn may have come late.
        seconds = self._context.primary_seconds(story.until)
        self._attempt("primary", process.primary_places[story.path], parcel, seconds, self._primary_answered)

    def _failed_over_meanwhile(self) -> None:
        self._leave_turn()
        self.story.begins(self._process.now())
        self._threw(FailedOverMeanwhileError())

    def _queue(self, queue: str, diversion: Diversion, left: float, probe: bool) -> None:
        process = self._process
        end = process.now() + left
        if not probe and queue not in process.rotation.rotation.usable:
            self._leave_turn()
            self.story.seeks(process.now())
            self._threw(QueueLeftMeanwhileError())
        elif queue in process.opened:
            # An earlier call has opened the link.
            self._send(queue, diversion, end)
        else:

            def opened(found: Failure | None) -> None:
                if found is None:
                    process.opened.add(queue)
                    self._send(queue, diversion, end)
                else:
                    self._failed(queue, found)

            self._attempt("secondary", process.backlog[queue], None, min(TRY_TIMEOUT, left), opened)

    def _send(self, queue: str, diversion: Diversion, end: float) -> None:
        """The link is open: make the copies that fit the link, and send the next one."""
        process, story = self._process, self.story
        story.link_is_open()
        try:
            parcel = transfer_of(next_payload(diversion, LIMITS, fit=fit))
        except CallerError as error:
            self._leave_turn()
            self._threw(error)
            return
        story.sends(parcel)

        def answered(found: Failure | None) -> None:
            if found is None:
                self._took(queue, parcel)
            else:
                self._failed(queue, found)

        left = max(end - process.now(), 0.0)
        self._attempt("secondary", process.backlog[queue], parcel, min(TRY_TIMEOUT, left), answered)

    def _attempt(
        self, side: str, place: FakeEntity, parcel: SentTransfer | None, seconds: float, answered: Answer
    ) -> None:
        process, token = self._process, self._trying

        def answer(found: Failure | None) -> None:
            if self._trying is token and process.alive:
                answered(found)

        if process.shut[side]:
            answer(failure(FailureKind.CLOSED))
        else:
            place.attempt(parcel, seconds, answer)

    # --- its answer --------------------------------------------------------------------------------------------------

    def _primary_answered(self, found: Failure | None) -> None:
        rerouted = self._context.shared.entity.route is not SendRoute.PRIMARY
        if found is not None and rerouted and self._process.chance.random() < 0.5:
            # This was one of several tries, and the driver makes no further try.
            self._failed_over_meanwhile()
            return
        self._leave_turn()
        self._process.failed_late += found is not None and self.story.restores < self.story.belief.restores
        self.story.primary_answered(found, self._process.now())
        if found is not None:
            self._threw(found.error)
        else:
            self._got(self.story.result)

    def _took(self, queue: str, parcel: SentTransfer) -> None:
        self._leave_turn()
        self.story.queue_took(queue, parcel, self._process.now())
        self._process.heard = QueueAnswered(queue, None, parcel)
        self._got(None)

    def _failed(self, queue: str, found: Failure) -> None:
        self._leave_turn()
        self.story.queue_failed(queue, found, self._process.now())
        self._process.heard = QueueAnswered(queue, found.error, None)
        self._threw(found.error)
