"""The lock of tables in an object store (D6): an object that its owner renews. Other processes take over a lost one.

A process stores the object with a condition: only if there is none, or only if it is still the one that was read. So
of two processes one succeeds. The owner renews the object every RENEW_SECONDS. Another process takes it over if it did
not change for LEASE_SECONDS. That process compares versions and not times, so clocks may differ. An owner on the same
machine that has ended is noticed at once.

An owner that was stopped for too long has lost the lease, and must not commit: `check` raises an error.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from twinbus.errors import OperatorError
from twinbus.object_store import ObjectFolder, ObjectVersion, StorageError
from twinbus.pipeline.table_storage import TablesBusyError

_log = logging.getLogger(__name__)

NAME: Final = ".lock"
RENEW_SECONDS: Final = 5.0
LEASE_SECONDS: Final = 30.0


class StorageLease:
    """The lease of the tables in a folder of an object store. One thread uses it at a time.

    `renew` are the seconds between two renewals, and `lasts` those after which it is taken over.
    """

    def __init__(self, folder: ObjectFolder, renew: float = RENEW_SECONDS, lasts: float = LEASE_SECONDS) -> None:
        self._folder = folder
        self._renew_seconds = renew
        self._lease_seconds = lasts
        self._held: ObjectVersion | None = None
        self._renewed = 0.0
        self._changing = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Has the lease inside the `with` block. Raises TablesBusyError if another process renews it."""
        self._acquire()
        ended = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(ended,), name="twinbus-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            self._release()

    def check(self) -> None:
        """Raises OperatorError if this process may have lost the lease. Call this before a commit."""
        with self._changing:
            if self._held is None or time.monotonic() - self._renewed > self._lease_seconds - self._renew_seconds:
                raise OperatorError(
                    f"this process was stopped for too long, and lost the lock of {self._folder.location}",
                    "Start it again: it goes on where it was.",
                )

    # --- acquiring ---------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        seen: ObjectVersion | None = None
        changes, since = 0, time.monotonic()
        while True:
            began = time.monotonic()
            found = self._folder.read_version(NAME)
            if found is None:
                held = self._folder.put_if(NAME, self._content(), None)
            else:
                content, version = found
                if version != seen:
                    changes, seen, since = changes + 1, version, time.monotonic()
                if changes > 1:
                    raise self._taken(content)
                is_stale = time.monotonic() - since >= self._lease_seconds or _is_dead(content)
                held = self._folder.put_if(NAME, self._content(), version) if is_stale else None
            if held is not None:
                self._held, self._renewed = held, began
                return
            time.sleep(self._renew_seconds / 10)

    def _taken(self, content: bytes) -> TablesBusyError:
        owner = _owner(content)
        who = f"process {owner.get('pid')} on {owner.get('host')}"
        return TablesBusyError(
            f"another process ({who}) is writing the tables in {self._folder.location}", "Wait for it, or end it."
        )

    @staticmethod
    def _content() -> bytes:
        # A new id each time: some stores make the version of an object from its content.
        facts = {"id": uuid4().hex, "host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}
        return json.dumps({**facts, "started": _started(os.getpid())}).encode()

    # --- holding -----------------------------------------------------------------------------------------------------

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(self._renew_seconds):
            began = time.monotonic()
            try:
                held = self._folder.put_if(NAME, self._content(), self._held)
            except StorageError as error:
                _log.warning("the lock of the tables could not be renewed: %s", error)
                continue
            with self._changing:
                self._held, self._renewed = held, began
            if held is None:
                return  # another process has it

    def _release(self) -> None:
        with self._changing:
            held, self._held = self._held, None
        found = None if held is None else self._folder.read_version(NAME)
        if found is not None and found[1] == held:
            self._folder.remove(NAME)


def _owner(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_dead(content: bytes) -> bool:
    """Returns whether the owner was a process of this machine that has ended."""
    owner = _owner(content)
    return owner.get("machine") == _machine() and _started(owner.get("pid")) != owner.get("started")


def _machine() -> str:
    """Returns a name of this machine and container: host names are not unique, and containers count their processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: object) -> str:
    """Returns when a process of this machine began, in units of the kernel; nothing if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name of the program, in parentheses, may contain anything. A zombie has ended.
    fields = status.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
