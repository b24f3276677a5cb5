"""`twinbus.toml`: connection strings and default options, read from a file.

This module finds the file and maps each value in the file to an option of a verb. Options on the command line and
environment variables override the file. Each verb defines what its options mean.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup, TyperOption

from twinbus.cli.errors import WrongUsageError
from twinbus.cli.network import PROXY_CREDENTIALS
from twinbus.printable import printable

NAME: Final = "twinbus.toml"
_PRIVATE: Final = 0o077
# Values for every verb: table and key in the file, and the environment variable with the same meaning.
_SHARED: Final = {
    ("connections", "primary"): "TWINBUS_PRIMARY_CONNECTION_STRING",
    ("connections", "secondary"): "TWINBUS_SECONDARY_CONNECTION_STRING",
    ("connections", "namespace"): "TWINBUS_CONNECTION_STRING",
    ("connections", "credential"): "TWINBUS_CREDENTIAL",
    ("connections", "ca"): "TWINBUS_CA",
    ("connections", "transport_type"): "TWINBUS_TRANSPORT_TYPE",
    ("connections", "proxy"): "TWINBUS_PROXY",
    ("connections", "proxy_credentials"): PROXY_CREDENTIALS,
    ("connections", "endpoint"): "TWINBUS_ENDPOINT",
    ("connections", "primary_endpoint"): "TWINBUS_PRIMARY_ENDPOINT",
    ("connections", "secondary_endpoint"): "TWINBUS_SECONDARY_ENDPOINT",
    ("pairing", "backlog_queue_count"): "TWINBUS_BACKLOG_QUEUE_COUNT",
    ("pairing", "primary_name"): "TWINBUS_PRIMARY_NAME",
}

_TABLES: Final = ("connections", "pairing")


def find(given: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the settings file: the given file, or twinbus.toml in this directory, or in the user's ~/.config/twinbus.

    Returns None if there is no file.
    """
    if given is not None:
        return given
    home = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "/")) / ".config"
    return next((path for path in (Path(NAME), Path(home) / "twinbus" / NAME) if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    """Return whether there is such a file. Warns of a folder that this user may not read, and goes on without it."""
    try:
        return path.is_file()
    except OSError as error:
        sys.stderr.write(printable(f"warning: {path} cannot be read: {error.strerror}. It is not used.") + "\n")
        return False


def apply(context: typer.Context, path: Path) -> None:
    """Make the file's values the defaults of all verbs, and store the file's path in `context.obj`."""
    context.obj = path
    table = _read(path)
    _warn_if_open(path, table)
    verbs = context.command
    assert isinstance(verbs, TyperGroup)
    given = {name: _table(path, name, table.pop(name, {})) for name in _TABLES}
    # SendAvailabilityOptions.from_file reads the other keys of [pairing], for applications.
    known = [key for name, key in _SHARED if name == "connections"]
    _refuse_unknown(path, "[connections]", given["connections"], known)
    shared = {variable: given[name][key] for (name, key), variable in _SHARED.items() if key in given[name]}
    if PROXY_CREDENTIALS in shared:  # no verb has an option for it: others can read a command line
        os.environ.setdefault(PROXY_CREDENTIALS, str(shared[PROXY_CREDENTIALS]))
    context.default_map = _defaults(_Reader(context, path, shared), verbs, table, ())


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongUsageError(f"{path} cannot be read: {error.strerror}", "--settings selects another file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongUsageError(f"{path} is not TOML: {error}", "docs/guides/settings.md has an example.") from None


def _warn_if_open(path: Path, table: Mapping[str, Any]) -> None:
    held = table.get("connections")
    if not isinstance(held, dict) or not path.stat().st_mode & _PRIVATE:
        return
    if "sharedaccesskey=" in str(held).lower() or "proxy_credentials" in held:
        sys.stderr.write(printable(f"warning: {path} holds keys and others may read it: chmod 600 {path}") + "\n")


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WrongUsageError(f"{path}: {name} is not a table", f"Write [{name}] on a line, values below it.")
    return value


def _refuse_unknown(path: Path, where: str, values: Mapping[str, Any], known: list[str]) -> None:
    for key in values:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"Is it {near[0]}?" if near else f"Known there: {', '.join(sorted(known))}."
            raise WrongUsageError(f"{path}: {where} has no {key!r}", hint)


@dataclass(frozen=True, slots=True)
class _Reader:
    context: typer.Context
    path: Path
    shared: Mapping[str, Any]

    def checked(self, where: str, option: TyperOption, value: Any) -> Any:
        """Return the value if the option accepts the value. Otherwise raise an error with the place in the file."""
        try:
            option.type_cast_value(self.context, value)
        except typer.BadParameter as error:
            raise WrongUsageError(f"{self.path}: {where}: {error.message}") from None
        return value


def _defaults(reader: _Reader, verbs: TyperGroup, table: Mapping[str, Any], above: tuple[str, ...]) -> dict[str, Any]:
    """Return the default values by verb and parameter, in the form of click's `default_map`: a dict of dicts."""
    path, shared = reader.path, reader.shared
    _refuse_unknown(path, f"[{'.'.join(above)}]" if above else "the file", table, [*verbs.commands, *_TABLES])
    made: dict[str, Any] = {}
    for name, verb in verbs.commands.items():
        here = ".".join((*above, name))
        own = _table(path, here, table.get(name, {}))
        if isinstance(verb, TyperGroup):
            made[name] = _defaults(reader, verb, own, (*above, name))
            continue
        # In the file, an option has the same name as on the command line, without the leading dashes.
        options = {one.opts[0].lstrip("-"): one for one in verb.params if isinstance(one, TyperOption)}
        options.pop("help", None)
        _refuse_unknown(path, f"[{here}]", own, list(options))
        made[name] = {
            one.name: reader.checked(str(one.envvar), one, shared[one.envvar])
            for one in options.values()
            if isinstance(one.envvar, str) and one.envvar in shared
        } | {options[key].name: reader.checked(f"[{here}] {key}", options[key], value) for key, value in own.items()}
    return made
