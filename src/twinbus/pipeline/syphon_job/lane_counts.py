"""The numbers of lanes while they run (Y9): from the tasks to the driver, and each message counted once.

Spark passes the rows of a task to the driver only when the task has ended, and a lane runs for seconds. So the driver
listens on a port, and each lane connects to it and sends what it has counted so far, twice a second. Nothing depends on
this connection: if a lane cannot connect, the driver learns its numbers from the report at its end.

The connection carries counts and the names of destinations, no message and no key. A lane first sends a token, which it
has from its job. The driver listens where Spark's own driver listens. Anybody who reaches this port can connect to it.
So the number of connections without a token, and the bytes that are kept of each, have a limit.

A lane counts from its start. `LaneCounts` adds to the totals only what is new, so a number may arrive twice: while the
lane runs, with its report, and for a lane that died from the ledger (`lost_lanes`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Final, NamedTuple, Self

from twinbus.syphon import MessageCounts, ProgressCounter

_log = logging.getLogger(__name__)

_TOKEN_BYTES: Final = 32
_TOKEN_SECONDS: Final = 10.0
# The most connections whose token has not arrived. A further connection ends the oldest of these. A lane sends its
# token at once, so the oldest are not lanes.
_MOST_WITHOUT_TOKEN: Final = 256
_INTERVAL: Final = 0.5
# A line has at most this number of destinations. A name has at most 260 characters, so a line is far below the limit.
_PATHS_TOGETHER: Final = 500
_MOST_LINE_BYTES: Final = 2**20
_READ_BYTES: Final = 2**16


class LaneTry(NamedTuple):
    """One try of a lane task. Spark tries a task again if its process died."""

    plan: str
    queue: str
    lane: int
    number: int
    """0 for the first try."""


@dataclass(frozen=True, slots=True)
class CountsAddress:
    """Where lanes send their counts."""

    host: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class LaneProgress:
    """What a lane has counted since its start. `counts` has only destinations whose numbers have changed."""

    lane: LaneTry
    counts: Mapping[str, MessageCounts]
    operations: Mapping[str, int]

    def to_json(self) -> str:
        counts = {path: asdict(one) for path, one in self.counts.items()}
        return json.dumps({"lane": self.lane, "counts": counts, "operations": dict(self.operations)})

    @classmethod
    def of_json(cls, text: str | bytes) -> Self:
        """Reads the text of `to_json`. Raises ValueError, TypeError or KeyError if it is another text."""
        values = json.loads(text)
        counts = {path: MessageCounts(**one) for path, one in values["counts"].items()}
        return cls(LaneTry(*values["lane"]), counts, values["operations"])


# --- in the driver ---------------------------------------------------------------------------------------------------


class LaneCounts:
    """Adds the numbers of lanes to the totals of a run, each number once."""

    def __init__(self, total: ProgressCounter) -> None:
        self._total = total
        self._known: dict[LaneTry, tuple[dict[str, MessageCounts], dict[str, int]]] = {}

    def add(
        self, lane: LaneTry, counts: Mapping[str, MessageCounts], operations: Mapping[str, int], now: float
    ) -> None:
        """Adds what a lane has counted since its start, without what was added for this lane before."""
        known_counts, known_operations = self._known.setdefault(lane, ({}, {}))
        for path, one in counts.items():
            self._add(path, one, known_counts.get(path, MessageCounts()), now)
            known_counts[path] = one
        for stage, count in operations.items():
            self._total.operations[stage] += max(0, count - known_operations.get(stage, 0))
            known_operations[stage] = count

    def forget_all(self) -> None:
        """Forgets what the lanes have reported. Call it when no lane runs and all were added."""
        self._known.clear()

    def _add(self, path: str, one: MessageCounts, before: MessageCounts, now: float) -> None:
        total = self._total
        if (returned := one.returned - before.returned) > 0:
            total.returned(path, returned, max(0, one.bytes - before.bytes), now)
        total.deferred(path, max(0, one.deferred - before.deferred))
        for reason, count in one.dead_letter_reasons.items():
            if (more := count - before.dead_letter_reasons.get(reason, 0)) > 0:
                total.dead_lettered(path, more, reason)
        total.kept(path, max(0, one.kept - before.kept))
        total.possible_duplicates(path, max(0, one.possible_duplicates - before.possible_duplicates))


class CountsListener:
    """The driver's port for the counts of lanes. Calls `received` with what each lane sends."""

    def __init__(self, received: Callable[[LaneProgress], None]) -> None:
        self._received = received
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._server: asyncio.Server | None = None
        self._without_token: dict[asyncio.StreamWriter, None] = {}
        """Connections whose token has not arrived, the oldest first."""

    async def listen(self, host: str, bind: str) -> CountsAddress | None:
        """Starts to listen. Returns the address for lanes; None if the port cannot be opened, which is logged."""
        try:
            self._server = await asyncio.start_server(self._serve, bind, 0, limit=_READ_BYTES)
        except OSError as error:
            _log.warning("the lanes cannot report while they run, because %s cannot be listened on: %s", bind, error)
            return None
        return CountsAddress(host, self._server.sockets[0].getsockname()[1], self._token)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await self._has_token(reader, writer):
                async for line in _lines(reader):
                    self._received(LaneProgress.of_json(line))
        except (OSError, EOFError, TimeoutError):
            pass  # the lane has ended, or it was not a lane
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("counts of a lane cannot be read: %r", error)
        finally:
            writer.close()

    async def _has_token(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        waiting = self._without_token
        waiting[writer] = None
        if len(waiting) > _MOST_WITHOUT_TOKEN:
            oldest = next(iter(waiting))
            del waiting[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_TOKEN_SECONDS):
                given = await reader.readexactly(_TOKEN_BYTES)
        finally:
            waiting.pop(writer, None)
        return secrets.compare_digest(given, self._token.encode())


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yields lines, without a last line that has no end. Raises ValueError if a line is too long."""
    found = bytearray()
    while some := await reader.read(_READ_BYTES):
        found += some
        *lines, rest = found.split(b"\n")
        if max(map(len, (*lines, rest))) > _MOST_LINE_BYTES:
            raise ValueError(f"a line has more than {_MOST_LINE_BYTES} bytes")
        for line in lines:
            yield bytes(line)
        found = bytearray(rest)


# --- in a lane -------------------------------------------------------------------------------------------------------


async def send_counts(address: CountsAddress, lane: LaneTry, counts: ProgressCounter) -> None:
    """Sends what a lane has counted, until it is cancelled or the driver cannot be reached."""
    sent: dict[str, MessageCounts] = {}
    try:
        _, writer = await asyncio.open_connection(address.host, address.port)
        try:
            writer.write(address.token.encode())
            while True:
                for progress in _changes(lane, counts, sent):
                    writer.write(progress.to_json().encode() + b"\n")
                await writer.drain()
                await asyncio.sleep(_INTERVAL)
        finally:
            writer.close()
    except OSError as error:
        _log.info("the driver cannot be reached at %s:%s: %s", address.host, address.port, error)


def _changes(lane: LaneTry, counts: ProgressCounter, sent: dict[str, MessageCounts]) -> Iterator[LaneProgress]:
    """Yields what has changed since the last call."""
    changed = [path for path, one in counts.by_destination.items() if sent.get(path) != one]
    for first in range(0, len(changed), _PATHS_TOGETHER):
        some = {path: deepcopy(counts.by_destination[path]) for path in changed[first : first + _PATHS_TOGETHER]}
        sent |= some
        yield LaneProgress(lane, some, counts.operations)
