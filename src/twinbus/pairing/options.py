"""The options of a pair: names, units, ranges and defaults (P2, and those marked ★ in S and G).

Options come from Python, from environment variables or from a TOML file; the same checks hold for all three.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

from twinbus.backlog import PRIMARY_NAME_PATTERN, FailureKind, counting_kinds
from twinbus.errors import OptionError
from twinbus.ledger import Ledger
from twinbus.pairing.decide.failover import FailoverPolicy

ClientT = TypeVar("ClientT")
_SECOND, _MINUTE, _HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)


class DurationRange(NamedTuple):
    """A range of durations. Both ends are allowed."""

    least: timedelta
    most: timedelta

    def __str__(self) -> str:
        return f"a timedelta from {_duration_text(self.least)} to {_duration_text(self.most)}"


RANGES: Final[Mapping[str, DurationRange]] = {
    "failover_interval": DurationRange(timedelta(0), 60 * _MINUTE),
    "ping_interval": DurationRange(_SECOND, 30 * _MINUTE),
    "try_timeout": DurationRange(_SECOND / 10, 5 * _MINUTE),
    "server_busy_counts_after": DurationRange(_SECOND, 60 * _MINUTE),
    "probation": DurationRange(_SECOND, _HOUR),
    "backlog_check_interval": DurationRange(timedelta(0), _HOUR),
    "backlog_unattended_after": DurationRange(_SECOND, 24 * _HOUR),
}
# Options whose default is None: without a value, what the option describes does not happen.
_OPTIONAL: Final = frozenset({"server_busy_counts_after"})
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "on_unusable": ("divert", "raise"),
    "ping": ("auto", "message", "link"),
    "provision": ("create", "assume"),
    "on_secondary_down": ("raise", "background"),
    "ttl": ("restart", "absolute"),
    "ledger_on_error": ("go_on", "stop"),
    "ledger_durability": ("process", "lazy"),
}


@dataclass(frozen=True, kw_only=True)
class SendAvailabilityOptions:
    """How a pair keeps its senders available. Raises OptionError for a value out of range.

    Example: `SendAvailabilityOptions(failover_interval=timedelta(seconds=30), enable_syphon=True)`.
    """

    backlog_queue_count: int = 10
    """Number of backlog queues on the secondary (≥ 1)."""
    failover_interval: timedelta = 60 * _SECOND
    """Time from an entity's first counting failure to its failover. With 0, the failing call diverts."""
    ping_interval: timedelta = 60 * _SECOND
    """Time between pings of a failed-over entity."""
    ping_jitter: float = 0.1
    """The first ping of a failover is delayed by at most this part of the interval (0 to 1)."""
    enable_syphon: bool = False
    """Run a syphon with the pair."""
    try_timeout: timedelta = 10 * _SECOND
    """Time limit of every attempt."""
    failover_on: Collection[str] = ()
    """Kinds of failure that count as well; a kind with `-` before it does not count."""
    server_busy_counts_after: timedelta | None = None
    """Server busy counts towards failover if the primary has been busy for this time and has accepted no message. After
    a longer pause between two answers, the time begins anew. None: it never counts, unless `failover_on` names it."""
    on_unusable: Literal["divert", "raise"] = "divert"
    """What sends do while the entity is gone from the primary, or the primary refuses the credential."""
    ping: Literal["auto", "message", "link"] = "auto"
    """`message` sends an empty message, `link` only opens a sender link. `auto` is `message` if the service hides
    pings, otherwise `link`."""
    provision: Literal["create", "assume"] = "create"
    """`create` creates missing backlog queues. `assume` expects that they exist, and needs no Manage right."""
    on_secondary_down: Literal["raise", "background"] = "background"
    """`background` lets the application start while the secondary cannot be reached; `raise` does not."""
    primary_name: str | None = None
    """The first part of the backlog queues' paths, in place of the primary's own name."""
    probation: timedelta = 30 * _SECOND
    """Time that a backlog queue stays out of the rotation after it failed."""
    ttl: Literal["restart", "absolute"] = "restart"
    """`restart`: a message's time to live starts anew on the primary. `absolute` deducts the time spent in the
    backlog."""
    backlog_check_interval: timedelta = 5 * _MINUTE
    """Time between checks of the backlog queues that the pair diverted to, until they are empty. 0: never."""
    backlog_unattended_after: timedelta = 30 * _MINUTE
    """Time that a message may wait in the backlog, although it could be delivered, before an alert."""
    state: str | os.PathLike[str] | None = None
    """Where processes share failovers and holds: a folder, or `secondary`."""
    ledger: str | os.PathLike[str] | Ledger | None = None
    """Records every operation and change of state: a directory, or a Ledger of the caller."""
    ledger_on_error: Literal["go_on", "stop"] = "go_on"
    """While the ledger cannot be written, `go_on` sends without it; `stop` raises LedgerUnavailableError."""
    ledger_durability: Literal["process", "lazy"] = "process"
    """`process`: a send that returned is in the ledger, even if the process is killed in the next instant. `lazy`: the
    ledger may miss the last moments, and costs less CPU."""

    def __post_init__(self) -> None:
        for option, span in RANGES.items():
            value = getattr(self, option)
            in_range = isinstance(value, timedelta) and span.least <= value <= span.most
            _check(option, value, in_range or (value is None and option in _OPTIONAL), str(span))
        for option, choices in CHOICES.items():
            _check(option, getattr(self, option), getattr(self, option) in choices, f"one of {', '.join(choices)}")
        count, jitter = self.backlog_queue_count, self.ping_jitter
        name: object = self.primary_name
        _check("backlog_queue_count", count, type(count) is int and count >= 1, "an integer from 1")
        _check("ping_jitter", jitter, type(jitter) in (int, float) and 0 <= jitter <= 1, "a number from 0 to 1")
        _check("enable_syphon", self.enable_syphon, type(self.enable_syphon) is bool, "true or false")
        _check(
            "primary_name",
            name,
            name is None or (isinstance(name, str) and bool(PRIMARY_NAME_PATTERN.fullmatch(name))),
            "letters, digits, '.', '-' and '_', beginning and ending with a letter or digit, at most 63 of them",
        )
        state: object = self.state
        named = isinstance(state, os.PathLike) or (isinstance(state, str) and bool(state.strip()))
        _check("state", state, named or state is None, "a folder, or 'secondary'")
        self._check_ledger()
        kinds = f"kinds of failure, '-' before those that shall not count: {', '.join(FailureKind)}"
        _check("failover_on", self.failover_on, _are_kinds(self.failover_on), kinds)
        object.__setattr__(self, "failover_on", tuple(map(str, self.failover_on)))

    def _check_ledger(self) -> None:
        ledger = self.ledger
        named = isinstance(ledger, os.PathLike) or (isinstance(ledger, str) and bool(ledger.strip()))
        _check("ledger", ledger, named or ledger is None or isinstance(ledger, Ledger), "a directory or a Ledger")
        if isinstance(ledger, Ledger):
            given = ledger.options
            for option, default, own in (
                ("on_error", "go_on", given.on_error),
                ("durability", "process", given.durability),
            ):
                chosen = getattr(self, f"ledger_{option}")
                allowed = f"left out where a Ledger is given: it has an {option} of its own"
                _check(f"ledger_{option}", chosen, chosen in (default, own), allowed)

    @property
    def policy(self) -> FailoverPolicy:
        """The options that failover depends on.

        Example: `options.policy.failover_interval`.
        """
        busy = self.server_busy_counts_after
        return FailoverPolicy(
            failover_interval=self.failover_interval.total_seconds(),
            ping_interval=self.ping_interval.total_seconds(),
            ping_jitter=self.ping_jitter,
            counting=counting_kinds(self.failover_on),
            divert_while_unusable=self.on_unusable == "divert",
            server_busy_counts_after=None if busy is None else busy.total_seconds(),
        )

    def with_state(self, state: str | os.PathLike[str] | None) -> Self:
        """Return these options with another `state`; None returns them as they are.

        Example: `options.with_state("/var/lib/twinbus/state")`.
        """
        return self if state is None else replace(self, state=state)

    @classmethod
    def for_short_lived_processes(cls, **given: Any) -> Self:
        """Return options for a job or a function that lives for seconds; `given` options replace them.

        Such a process ends before a failover interval is over. So the failing call itself diverts, attempts are
        short, and the process does not check the backlog. With `state`, the next processes divert their first call.

        Example: `SendAvailabilityOptions.for_short_lived_processes(state="secondary")`.
        """
        usual: dict[str, Any] = {
            "failover_interval": timedelta(0),
            "try_timeout": 3 * _SECOND,
            "backlog_check_interval": timedelta(0),
        }
        return cls(**{**usual, **given})

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], prefix: str = "TWINBUS_", *, defaults: Self | None = None
    ) -> Self:
        """Read options from variables such as `TWINBUS_FAILOVER_INTERVAL=30s`. Other variables are ignored.

        `defaults` has the options that no variable sets, for instance from `from_file`.

        Example: `SendAvailabilityOptions.from_environment(os.environ)`.
        """
        names = {field.name: prefix + field.name.upper() for field in fields(cls)}
        found = {option: environment[name] for option, name in names.items() if name in environment}
        return replace(defaults or cls(), **{option: _read(option, text) for option, text in found.items()})

    @classmethod
    def from_file(cls, text: str) -> Self:
        """Read options from the table `[pairing]` of a TOML text. Raises OptionError for an unknown name.

        Example: `SendAvailabilityOptions.from_file(Path("twinbus.toml").read_text())`.
        """
        table = tomllib.loads(text).get("pairing", {})
        cls._refuse_unknown(table)
        return cls(**{option: _span(option, value) for option, value in table.items()})

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any], *, defaults: Self | None = None) -> Self:
        """Read options from names and values, each a text such as `30s` or a value of its type.

        `defaults` has the options that the table does not set. Raises OptionError for an unknown name.

        Example: `SendAvailabilityOptions.from_mapping({"failover_interval": "30s", "enable_syphon": True})`.
        """
        cls._refuse_unknown(table)
        read = {
            option: _read(option, value) if isinstance(value, str) else _span(option, value)
            for option, value in table.items()
        }
        return replace(defaults or cls(), **read)

    @classmethod
    def _refuse_unknown(cls, table: Mapping[str, Any]) -> None:
        known = [field.name for field in fields(cls)]
        for option, value in table.items():
            _check(option, value, option in known, f"left out: options are {', '.join(known)}")


# --- reading ---------------------------------------------------------------------------------------------------------

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)")
_UNITS: Final = {"ms": _SECOND / 1000, "s": _SECOND, "": _SECOND, "m": _MINUTE, "min": _MINUTE, "h": _HOUR}
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def chosen_options(
    options: SendAvailabilityOptions | None, state: str | os.PathLike[str] | None
) -> SendAvailabilityOptions:
    """Return the options of a pair: those given or the defaults, with `state` if it is given."""
    return (options or SendAvailabilityOptions()).with_state(state)


def clients_of(
    make: Callable[..., ClientT], primary: str, secondary: str, keywords: Mapping[str, Any]
) -> tuple[ClientT, ClientT]:
    """Return the clients of two namespaces. `make` makes a client from a connection string and the keywords.

    Raises OptionError for a keyword that two namespaces cannot share. Raises ValueError for a connection string that
    cannot be used, with its side.
    """
    endpoint = keywords.get("custom_endpoint_address")
    if endpoint is not None:
        allowed = "given to each client alone: make two clients, and pair them with pair_namespaces"
        raise OptionError("custom_endpoint_address", endpoint, allowed)

    def made(side: str, text: str) -> ClientT:
        try:
            return make(text, **keywords)
        except ValueError as error:
            raise ValueError(f"the {side}: {error}") from error

    return made("primary", primary), made("secondary", secondary)


def _read(option: str, text: str) -> Any:
    """Return an option read from a text. A text that cannot be read stays as it is, and fails the check."""
    plain = text.strip()
    if option in RANGES:
        return _span(option, plain)
    if option == "enable_syphon":
        return _BOOLEANS.get(plain.lower(), text)
    if option == "failover_on":
        return tuple(kind.strip() for kind in plain.split(",") if kind.strip())
    if option in {"backlog_queue_count", "ping_jitter"}:
        try:
            return int(plain) if option == "backlog_queue_count" else float(plain)
        except ValueError:
            return text
    return plain


def _span(option: str, value: Any) -> Any:
    """Return `30`, `30s`, `500ms`, `5m` or `1h` as a timedelta, if the option is one."""
    if option not in RANGES or isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    found = _SPAN.fullmatch(str(value).lower())
    return float(found[1]) * _UNITS[found[2]] if found else value


def _are_kinds(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Collection):
        return False
    try:
        counting_kinds(value)
    except (ValueError, AttributeError):
        return False
    return True


def _check(option: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise OptionError(option, value, allowed)


def _duration_text(span: timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"
