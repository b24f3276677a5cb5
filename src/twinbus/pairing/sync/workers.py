"""Threads of a sync pair for what may not come back: opening a link, trying again, pinging, closing.

They are used again and again, end by themselves when idle, and never keep a process from ending.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger("twinbus.pairing")

_IDLE_SECONDS: Final = 2.0


class Workers:
    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._stopped = False

    def run(self, job: Callable[[], object]) -> None:
        """In a thread of ours, at once. RuntimeError where the process may have no more threads."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
                return
        self._jobs.put(job)

    def stop(self, seconds: float) -> None:
        """Let them end: those at work when their job does. It waits for them so long at most."""
        with self._lock:
            self._stopped = True
            threads = list(self._threads)
            for _ in range(self._idle):
                self._jobs.put(None)
            self._idle = 0
        until = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(until - time.monotonic(), 0))

    def _work(self, job: Callable[[], object]) -> None:
        following: Callable[[], object] | None = job
        while following is not None:
            try:
                following()
            except Exception:
                _log.exception("a worker of the pair failed")
            following = self._next()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            if self._stopped:
                return None
            self._idle += 1
        try:
            return self._jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:
            if self._idle:
                self._idle -= 1
                return None
        # Counted on at the last moment: the job is on its way.
        return self._jobs.get()
