"""Find or create the backlog queues of a sync pair in a thread: a silent secondary delays no pair (P1, P8).

A pair that closes does not wait for this thread, because a request may have no answer.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from twinbus.pairing.administration import Administration
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.pair_state import PairState
from twinbus.pairing.provisioning import SILENCE_SECONDS, background_pause

_log = logging.getLogger("twinbus.pairing")


class Provisioner:
    """Provisions one pair. Closes `administration` at the end. Stops before its next request if `leaving` is set."""

    def __init__(self, administration: Administration, state: PairState, leaving: threading.Event) -> None:
        self._administration = administration
        self._state = state
        self._leaving = leaving
        self._news = threading.Event()
        self._first: Future[None] = Future()
        self._first.add_done_callback(lambda _: self._news.set())
        administration.on_answer = self._news.set

    def provision(self) -> None:
        """Start the thread, and wait for its first try. Raises the error of the first try.

        Returns earlier if the secondary was silent for SILENCE_SECONDS. The thread then goes on.
        """
        threading.Thread(target=self._run, name=f"twinbus-provision-{self._state.name}", daemon=True).start()
        while not self._first.done():
            if self._news.wait(SILENCE_SECONDS):
                self._news.clear()
            elif self._first.cancel():
                _log.info("%s: the secondary has not answered yet; the search for queues goes on", self._state.name)
                return
        self._first.result()

    def _run(self) -> None:
        with self._administration:
            failed = self._try_first()
            tries = 0
            while failed:
                tries += 1
                if self._leaving.wait(background_pause(tries, failed)):
                    return
                done = self._administration.provision_again([cause.queue for cause in failed])
                if self._leaving.is_set():
                    return
                self._state.provisioned(done)
                failed = done.failed

    def _try_first(self) -> tuple[QueueCause, ...]:
        """Try once to find or create the queues. Return the queues that failed, which the next tries repeat."""
        try:
            done = self._administration.provision(self._state.queues, self._state.options)
        except Exception as error:
            if self._leaving.is_set():
                return ()
            if self._first.set_running_or_notify_cancel():
                self._first.set_exception(error)
                return ()
            return self._state.first_try_failed_late(error)
        if self._leaving.is_set():
            return ()
        self._state.first_try_ended(done)
        if self._first.set_running_or_notify_cancel():
            self._first.set_result(None)
        return done.failed
