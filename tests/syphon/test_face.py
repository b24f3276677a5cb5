"""The face of the room: its names load lazily, and the native path loads no azure-servicebus."""

from __future__ import annotations

import subprocess
import sys

import pytest

import twinbus.syphon


@pytest.mark.parametrize("name", twinbus.syphon.__all__)
def test_every_name_of_the_face_is_there(name: str) -> None:
    assert getattr(twinbus.syphon, name) is not None


def test_a_name_that_the_face_does_not_offer_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pumps'"):
        twinbus.syphon.Pumps  # type: ignore[attr-defined]  # noqa: B018


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after this statement."""
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_face_alone_loads_nothing_of_the_room() -> None:
    loaded = loaded_by("import twinbus.syphon")
    assert {name for name in loaded if name.startswith("twinbus.syphon.")} == set()
    assert "azure.servicebus" not in loaded


def test_a_native_syphon_loads_no_azure_servicebus() -> None:
    names = "Syphon, NativeTransport, SearchedDiscovery, ListedOrSearchedDiscovery, DeadLetters, count_backlog, Pump"
    loaded = loaded_by(f"from twinbus.syphon import {names}")
    assert {name for name in loaded if name.split(".")[0] in ("azure", "pyspark")} == set()
    assert "twinbus.namespace" not in loaded
