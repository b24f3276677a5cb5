"""P2: options, ranges, and where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from twinbus import aio, pair_connection_strings
from twinbus.backlog import COUNTING_FAILURES, FailureKind
from twinbus.errors import OptionError
from twinbus.ledger import Ledger, LedgerOptions
from twinbus.pairing.decide.failover import FailoverPolicy
from twinbus.pairing.options import SendAvailabilityOptions

Options = SendAvailabilityOptions
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)


def test_p2_the_defaults_are_those_of_the_spec() -> None:
    options = Options()
    assert (options.backlog_queue_count, options.enable_syphon) == (10, False)
    assert (options.failover_interval, options.ping_interval) == (60 * SECOND, 60 * SECOND)
    assert options.try_timeout == 10 * SECOND
    assert (options.on_unusable, options.provision, options.on_secondary_down) == ("divert", "create", "background")


@pytest.mark.parametrize(
    ("option", "least", "most"),
    [
        ("failover_interval", 0 * SECOND, 3600 * SECOND),
        ("ping_interval", SECOND, 1800 * SECOND),
        ("try_timeout", SECOND / 10, 300 * SECOND),
        ("server_busy_counts_after", SECOND, 3600 * SECOND),
        ("probation", SECOND, 3600 * SECOND),
        ("backlog_check_interval", 0 * SECOND, 3600 * SECOND),
        ("backlog_unattended_after", SECOND, 86400 * SECOND),
    ],
)
def test_p2_the_ends_of_a_range_are_in_it_and_what_is_beyond_is_named(
    option: str, least: timedelta, most: timedelta
) -> None:
    given: dict[str, Any]
    for value in (least, most):
        given = {option: value}
        assert getattr(Options(**given), option) == value
    for value in (least - MICROSECOND, most + MICROSECOND):
        given = {option: value}
        with pytest.raises(OptionError, match=option) as caught:
            Options(**given)
        assert (caught.value.option, caught.value.value) == (option, value)
        assert repr(value) in str(caught.value)


def test_p2_an_error_names_option_value_and_range() -> None:
    with pytest.raises(OptionError) as caught:
        Options(failover_interval=timedelta(hours=2))
    text = "failover_interval is datetime.timedelta(seconds=7200); it must be a timedelta from 0 s to 60 min"
    assert str(caught.value) == text
    with pytest.raises(OptionError, match=r"from 0\.1 s to 5 min"):
        Options(try_timeout=timedelta(0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"backlog_queue_count": 0},
        {"backlog_queue_count": True},
        {"backlog_queue_count": 2.0},
        {"failover_interval": 30},
        {"ping_jitter": -0.1},
        {"ping_jitter": 1.1},
        {"ping_jitter": "0.5"},
        {"enable_syphon": "yes"},
        {"on_unusable": "ignore"},
        {"ping": "http"},
        {"provision": "delete"},
        {"on_secondary_down": "panic"},
        {"ttl": "forever"},
        {"failover_on": "timeout"},
        {"failover_on": ["nonsense"]},
        {"failover_on": [1]},
        {"failover_on": None},
        {"primary_name": ""},
        {"primary_name": "a/b"},
        {"primary_name": "-a"},
        {"primary_name": "a" * 64},
        {"primary_name": 5},
        {"ledger": 5},
        {"ledger": ""},
        {"ledger_on_error": "panic"},
        {"ledger_durability": "eternal"},
    ],
    ids=str,
)
def test_p2_what_is_of_a_wrong_type_or_no_choice_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**wrong)
    assert caught.value.option == next(iter(wrong))


def test_m1_a_ledger_that_is_given_has_its_own_on_error(tmp_path: Path) -> None:
    with Ledger(tmp_path) as going_on, Ledger(tmp_path, options=LedgerOptions(on_error="stop")) as stopping:
        assert Options(ledger=going_on).ledger is going_on
        assert Options(ledger=stopping, ledger_on_error="stop").ledger is stopping
        with pytest.raises(OptionError, match="ledger_on_error is 'stop'; it must be left out"):
            Options(ledger=going_on, ledger_on_error="stop")


def test_l2_a_ledger_that_is_given_has_its_own_durability(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger, Ledger(tmp_path, options=LedgerOptions(durability="lazy")) as lazy:
        assert Options(ledger=ledger).ledger is ledger
        assert Options(ledger=lazy, ledger_durability="lazy").ledger is lazy
        with pytest.raises(OptionError, match="ledger_durability is 'lazy'; it must be left out"):
            Options(ledger=ledger, ledger_durability="lazy")


def test_p2_options_are_keywords_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        Options(10)  # type: ignore[call-arg]  # that it is refused is what is tested
    with pytest.raises(FrozenInstanceError):
        Options().ping_interval = SECOND  # type: ignore[misc]  # that it is refused is what is tested


def test_s2_failover_on_reaches_the_machine() -> None:
    policy = Options(failover_on=[FailureKind.SERVER_BUSY, "-timeout"]).policy
    assert policy.counting == COUNTING_FAILURES - {FailureKind.TIMEOUT} | {FailureKind.SERVER_BUSY}


def test_s2_server_busy_counts_after_reaches_the_machine_and_is_off_by_default() -> None:
    assert Options().server_busy_counts_after is None
    assert Options().policy.server_busy_counts_after is None
    assert Options(server_busy_counts_after=1.5 * SECOND).policy.server_busy_counts_after == 1.5
    with pytest.raises(OptionError, match="ping_interval is None"):
        Options(ping_interval=None)  # type: ignore[arg-type]  # that it is refused is what is tested


def test_p2_the_machines_own_defaults_are_those_of_the_options() -> None:
    assert Options().policy == FailoverPolicy()
    assert (FailoverPolicy().failover_interval, FailoverPolicy().ping_interval, FailoverPolicy().ping_jitter) == (
        60.0,
        60.0,
        0.1,
    )


def test_the_machine_gets_seconds() -> None:
    options = Options(failover_interval=1.5 * SECOND, ping_interval=2 * SECOND, ping_jitter=0.2, on_unusable="raise")
    policy = options.policy
    assert (policy.failover_interval, policy.ping_interval, policy.ping_jitter) == (1.5, 2.0, 0.2)
    assert policy.divert_while_unusable is False
    assert Options().policy.divert_while_unusable is True
    assert Options().policy.counting == COUNTING_FAILURES


# --- environment and file --------------------------------------------------------------------------------------------

EVERY = Options(
    backlog_queue_count=3,
    failover_interval=0 * SECOND,
    ping_interval=90 * SECOND,
    ping_jitter=0.25,
    enable_syphon=True,
    try_timeout=0.5 * SECOND,
    failover_on=("server_busy", "-timeout"),
    server_busy_counts_after=90 * SECOND,
    on_unusable="raise",
    ping="link",
    provision="assume",
    on_secondary_down="background",
    primary_name="contoso",
    probation=3600 * SECOND,
    ttl="absolute",
    backlog_check_interval=120 * SECOND,
    backlog_unattended_after=7200 * SECOND,
    state="secondary",
    ledger="books",
    ledger_on_error="stop",
    ledger_durability="lazy",
)


def test_p2_options_from_the_environment() -> None:
    environment = {
        "TWINBUS_BACKLOG_QUEUE_COUNT": "3",
        "TWINBUS_FAILOVER_INTERVAL": "0",
        "TWINBUS_PING_INTERVAL": "1.5m",
        "TWINBUS_PING_JITTER": "0.25",
        "TWINBUS_ENABLE_SYPHON": "True",
        "TWINBUS_TRY_TIMEOUT": " 500 ms ",
        "TWINBUS_FAILOVER_ON": "server_busy, -timeout,",
        "TWINBUS_SERVER_BUSY_COUNTS_AFTER": "1.5m",
        "TWINBUS_ON_UNUSABLE": "raise",
        "TWINBUS_PING": "link",
        "TWINBUS_PROVISION": "assume",
        "TWINBUS_ON_SECONDARY_DOWN": "background",
        "TWINBUS_PRIMARY_NAME": "contoso",
        "TWINBUS_PROBATION": "1h",
        "TWINBUS_TTL": "absolute",
        "TWINBUS_BACKLOG_CHECK_INTERVAL": "2m",
        "TWINBUS_BACKLOG_UNATTENDED_AFTER": "2h",
        "TWINBUS_STATE": "secondary",
        "TWINBUS_LEDGER": "books",
        "TWINBUS_LEDGER_ON_ERROR": "stop",
        "TWINBUS_LEDGER_DURABILITY": "lazy",
        "TWINBUS_SOMETHING_ELSE": "1",
        "PATH": "/bin",
    }
    assert len(environment) - 2 == len(fields(Options))
    assert Options.from_environment(environment) == EVERY


def test_p2_an_empty_environment_leaves_the_defaults() -> None:
    assert Options.from_environment({}) == Options()
    assert Options.from_environment({"MINE_PING": "link"}, "MINE_").ping == "link"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("BACKLOG_QUEUE_COUNT", "many"),
        ("FAILOVER_INTERVAL", "soon"),
        ("FAILOVER_INTERVAL", "-1"),
        ("PING_JITTER", "some"),
        ("ENABLE_SYPHON", "perhaps"),
        ("FAILOVER_ON", "nonsense"),
    ],
)
def test_p2_what_cannot_be_read_is_refused_by_name(variable: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_environment({f"TWINBUS_{variable}": text})
    assert caught.value.option == variable.lower()
    assert text in str(caught.value)


def test_p2_options_from_a_file() -> None:
    text = """
        title = "mine"
        [pairing]
        backlog_queue_count = 3
        failover_interval = 0
        ping_interval = "90s"
        ping_jitter = 0.25
        enable_syphon = true
        try_timeout = 0.5
        failover_on = ["server_busy", "-timeout"]
        server_busy_counts_after = 90
        on_unusable = "raise"
        ping = "link"
        provision = "assume"
        on_secondary_down = "background"
        primary_name = "contoso"
        probation = "60min"
        ttl = "absolute"
        backlog_check_interval = "2m"
        backlog_unattended_after = "2h"
        state = "secondary"
        ledger = "books"
        ledger_on_error = "stop"
        ledger_durability = "lazy"
    """
    assert Options.from_file(text) == EVERY
    assert Options.from_file("") == Options()


@pytest.mark.parametrize(
    ("line", "option"), [("pings = 1", "pings"), ("ping_interval = true", "ping_interval"), ("ttl = 1", "ttl")]
)
def test_p2_a_line_that_is_no_option_is_refused_by_name(line: str, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_file(f"[pairing]\n{line}")
    assert caught.value.option == option


def test_s16_options_for_short_lived_processes_divert_with_the_failing_call_and_can_be_changed() -> None:
    options = SendAvailabilityOptions.for_short_lived_processes()
    assert (options.failover_interval, options.try_timeout) == (timedelta(0), timedelta(seconds=3))
    assert options.backlog_check_interval == timedelta(0)
    changed = SendAvailabilityOptions.for_short_lived_processes(try_timeout=timedelta(seconds=1), provision="assume")
    assert (changed.failover_interval, changed.try_timeout) == (timedelta(0), timedelta(seconds=1))
    assert changed.provision == "assume"
    with pytest.raises(OptionError):
        SendAvailabilityOptions.for_short_lived_processes(ping_interval=timedelta(0))


def test_p2_a_mapping_has_texts_or_values_and_an_unknown_name_is_refused() -> None:
    given = {
        "failover_interval": "30s",
        "ping_interval": timedelta(seconds=5),
        "try_timeout": 2,
        "enable_syphon": "true",
    }
    defaults = SendAvailabilityOptions(backlog_queue_count=3, enable_syphon=False)
    assert SendAvailabilityOptions.from_mapping(given, defaults=defaults) == SendAvailabilityOptions(
        failover_interval=timedelta(seconds=30),
        ping_interval=timedelta(seconds=5),
        try_timeout=timedelta(seconds=2),
        enable_syphon=True,
        backlog_queue_count=3,
    )
    with pytest.raises(OptionError, match="failover_intervall"):
        SendAvailabilityOptions.from_mapping({"failover_intervall": "30s"})


STRING = "Endpoint=sb://one.example;SharedAccessKeyName=a;SharedAccessKey=b"


@pytest.mark.parametrize("paired", [pair_connection_strings, aio.pair_connection_strings])
@pytest.mark.parametrize(("primary", "secondary", "side"), [("junk", STRING, "primary"), (STRING, "junk", "secondary")])
def test_p1_a_connection_string_that_cannot_be_used_is_named(
    paired: Callable[..., Any], primary: str, secondary: str, side: str
) -> None:
    with pytest.raises(ValueError, match=f"^the {side}: Connection string is either blank or malformed"):
        paired(primary, secondary)


@pytest.mark.parametrize("paired", [pair_connection_strings, aio.pair_connection_strings])
def test_p1_two_namespaces_do_not_get_one_endpoint(paired: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="make two clients, and pair them with pair_namespaces"):
        paired(STRING, STRING.replace("one", "two"), custom_endpoint_address="sb://gateway.example")
