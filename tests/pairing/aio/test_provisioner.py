"""How long an asyncio pair waits for the first try to find its backlog queues (P1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from twinbus.pairing.aio import provisioner
from twinbus.pairing.aio.provisioner import Provisioner
from twinbus.pairing.options import SendAvailabilityOptions

SILENCE = 0.05


class Refusing:
    """The administration of a secondary that refuses the credential, just before the pair stops waiting for it."""

    on_answer: Callable[[], object]

    async def provision(self, *_: object) -> None:
        await asyncio.sleep(SILENCE * 0.9)
        raise PermissionError("refused")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


async def test_p1_a_refusal_at_the_end_of_the_wait_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is late, so that it handles the refusal and the end of the wait together."""
    monkeypatch.setattr(provisioner, "SILENCE_SECONDS", SILENCE)
    state = SimpleNamespace(name="contoso", queues=("b0",), options=SendAvailabilityOptions())
    waiting = Provisioner(cast(Any, Refusing()), cast(Any, state))
    asyncio.get_running_loop().call_later(SILENCE / 2, time.sleep, SILENCE)
    run = asyncio.create_task(waiting.run())
    # The order of the two timers: the request was sent before the wait began.
    await asyncio.sleep(0)
    with pytest.raises(PermissionError):
        await waiting.first_try()
    await run
