"""The access of an asyncio pair to the state that processes share (S16)."""

import asyncio
from pathlib import Path
from typing import Any, cast

from twinbus.pairing.aio.state_access import TaskStateAccess
from twinbus.pairing.aio.timeouts import TaskTimeouts
from twinbus.pairing.decide.known_state import ReleaseRecord
from twinbus.pairing.recording import NO_RECORDER
from twinbus.pairing.state_sharing import StateLocation


async def test_p3_s16_a_read_or_write_that_is_cancelled_because_its_pair_closes_is_reported(tmp_path: Path) -> None:
    timeouts = TaskTimeouts(1.0)
    timeouts.claim()
    nobody = cast(Any, None)
    access = TaskStateAccess(StateLocation.of(tmp_path, "p"), nobody, timeouts, NO_RECORDER, nobody)
    reported: list[Any] = []
    access.write([ReleaseRecord("q", 1.0, "w")], reported.append)
    access.read(reported.append)
    tasks = list(timeouts._tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    assert [type(one) for one in reported] == [ConnectionAbortedError, ConnectionAbortedError]
