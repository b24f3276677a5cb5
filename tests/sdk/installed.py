"""Which azure-servicebus is installed, and tests that need a later one (`python -m tests.sdk.versions`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import azure.servicebus
import pytest

Test = TypeVar("Test", bound=Callable[..., Any])

VERSION: Final = tuple(int(part) for part in azure.servicebus.__version__.split(".")[:2])


def is_since(version: str) -> bool:
    return tuple(map(int, version.split("."))) <= VERSION


def marks_since(version: str, reason: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that needs this version. `reason` says what earlier versions do not do."""
    skip = pytest.mark.skip(reason=f"azure-servicebus before {version} {reason}")
    return [] if is_since(version) else [skip]


def since(version: str, reason: str) -> Callable[[Test], Test]:
    """`marks_since` as a decorator."""

    def marked(test: Test) -> Test:
        for mark in marks_since(version, reason):
            test = mark(test)
        return test

    return marked
