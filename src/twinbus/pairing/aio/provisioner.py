"""Find or create the backlog queues of an asyncio pair in a task: a silent secondary delays no pair (P1, P8)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from twinbus.pairing.administration import AioAdministration
from twinbus.pairing.aio.timeouts import wait_for_event
from twinbus.pairing.errors import QueueCause
from twinbus.pairing.pair_state import PairState
from twinbus.pairing.provisioning import SILENCE_SECONDS, background_pause

_log = logging.getLogger("twinbus.pairing")


class Provisioner:
    """Provisions one pair. The pair runs `run` in a task. Closes `administration` at the end."""

    def __init__(self, administration: AioAdministration, state: PairState) -> None:
        self._administration = administration
        self._state = state
        # A sender's call that pairs never fails because the secondary is away.
        self._options = replace(state.options, on_secondary_down="background")
        self._news = asyncio.Event()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first.add_done_callback(lambda _: self._news.set())
        administration.on_answer = self._news.set

    async def first_try(self) -> None:
        """Wait for the first try. Raises its error. Returns earlier if the secondary was silent for SILENCE_SECONDS."""
        while not self._first.done():
            await wait_for_event(self._news, SILENCE_SECONDS)
            # Not cancelled: the first try has ended, and a late event loop has not called its callback yet.
            if not self._news.is_set() and self._first.cancel():
                _log.info("%s: the secondary has not answered yet; the search for queues goes on", self._state.name)
                return
            self._news.clear()
        self._first.result()

    async def run(self) -> None:
        async with self._administration:
            failed = await self._try_first()
            tries = 0
            while failed:
                tries += 1
                await asyncio.sleep(background_pause(tries, failed))
                done = await self._administration.provision_again([cause.queue for cause in failed])
                self._state.provisioned(done)
                failed = done.failed

    async def _try_first(self) -> tuple[QueueCause, ...]:
        """Return the queues that the first try did not find, for the next tries."""
        try:
            done = await self._administration.provision(self._state.queues, self._options)
        except Exception as error:
            if self._first.cancelled():
                return self._state.first_try_failed_late(error)
            self._first.set_exception(error)
            return ()
        self._state.first_try_ended(done)
        if not self._first.cancelled():
            self._first.set_result(None)
        return done.failed
