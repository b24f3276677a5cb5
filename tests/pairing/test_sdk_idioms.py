"""`client` becomes `pair`, and nothing else: programs of the SDK's samples, run with both, see the same (P1, S1)."""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import azure.servicebus
import azure.servicebus.aio
import pytest

from tests.pairing import sdk_programs
from tests.pairing.sdk_programs import PROGRAMS, Entities
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.pairing.aio.pair import Pair as AioPair
from twinbus.pairing.aio.sender import PairedSender as AioPairedSender
from twinbus.pairing.sync.pair import Pair
from twinbus.pairing.sync.sender import PairedSender
from twinbus.testing import LocalNamespaces

Program = Callable[..., Any]
FLAVOURS = ("aio", "sync")
USERS = ("client", "pair")
# Nearly all of a program's time is waiting.
AT_ONCE = 16
OPTIONS = SendAvailabilityOptions(backlog_queue_count=1, try_timeout=timedelta(seconds=60))


def namespace_of(program: Program, flavour: str) -> str:
    """Return a namespace for one program: a process can pair a namespace only once (P3); programs run in parallel."""
    return f"{flavour}-{PROGRAMS.index(program)}"


def entities(user: str) -> Entities:
    return Entities(f"{user}-plain", f"{user}-sessions", f"{user}-topic", "all", "grouped")


def config() -> dict[str, Any]:
    made = [entities(user) for user in USERS]
    queues: list[dict[str, Any]] = [{"name": one.queue} for one in made]
    queues += [{"name": one.session_queue, "requires_session": True} for one in made]
    grouped: dict[str, Any] = {"name": "grouped", "requires_session": True}
    topics = [{"name": one.topic, "subscriptions": [{"name": "all"}, grouped]} for one in made]
    names = [namespace_of(*one) for one in product(PROGRAMS, FLAVOURS)]
    return {"namespaces": [{"name": name, "queues": queues, "topics": topics} for name in names]}


def maker(flavour: str, user: str, primary: str, secondary: str) -> Callable[..., Any]:
    sdk: Any = azure.servicebus.aio if flavour == "aio" else azure.servicebus
    if user == "client":
        return partial(sdk.ServiceBusClient.from_connection_string, primary)
    paired: Any = aio.pair_connection_strings if flavour == "aio" else pair_connection_strings
    return partial(paired, primary, secondary, options=OPTIONS)


def run(program: Program, flavour: str, make: Callable[..., Any], used: Entities) -> object:
    if flavour == "aio":
        return asyncio.run(program(make, used))
    text = re.sub(r"\basync (def|with|for)\b", r"\1", inspect.getsource(program)).replace("await ", "")
    names = {**vars(sdk_programs), "AutoLockRenewer": azure.servicebus.AutoLockRenewer}
    exec(compile(text, program.__name__, "exec"), names)  # noqa: S102 - our own text
    return names[program.__name__](make, used)


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[tuple[Program, str, str], Future[object]]]:
    """What each program returned, by program, flavour and whether it used a client or a pair."""
    names = [namespace_of(*one) for one in product(PROGRAMS, FLAVOURS)]
    with (
        LocalNamespaces(*names, "secondary", memory=True, config=config()) as local,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        secondary = local["secondary"].connection_string
        yield {
            (program, flavour, user): pool.submit(
                run,
                program,
                flavour,
                maker(flavour, user, local[namespace_of(program, flavour)].connection_string, secondary),
                entities(user),
            )
            for program, flavour, user in product(PROGRAMS, FLAVOURS, USERS)
        }


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_p1_a_program_for_the_sdks_client_sees_the_same_with_a_pair(
    program: Program, flavour: str, seen: dict[tuple[Program, str, str], Future[object]]
) -> None:
    with_client, with_pair = (seen[program, flavour, user].result(100) for user in USERS)
    assert with_client
    assert repr(with_pair).replace("pair-", "") == repr(with_client).replace("client-", "")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Pair, azure.servicebus.ServiceBusClient),
        (AioPair, azure.servicebus.aio.ServiceBusClient),
        (PairedSender, azure.servicebus.ServiceBusSender),
        (AioPairedSender, azure.servicebus.aio.ServiceBusSender),
    ],
)
def test_p1_a_pair_and_its_senders_have_every_public_name_of_the_sdk(ours: type, theirs: type) -> None:
    assert {name for name in dir(theirs) if not name.startswith("_")} - set(dir(ours)) == set()
