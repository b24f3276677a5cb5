"""The face of the room: every name that it offers exists, and a client loads no server."""

import subprocess
import sys

import pytest

import twinbus.namespace
from twinbus.namespace import store

SERVER = ("apsw", "uvloop", "twinbus.namespace.engine", "twinbus.namespace.front", "twinbus.namespace.store")


@pytest.mark.parametrize("face", [twinbus.namespace, store])
def test_every_name_of_a_face_exists(face: object) -> None:
    names = getattr(face, "__all__")  # noqa: B009  # the type of a module does not say that it has one
    assert [name for name in names if not hasattr(face, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        twinbus.namespace.Unknown  # noqa: B018


@pytest.mark.parametrize("name", ["FaultClient", "find_free_port", "configure_logging"])
def test_a_client_loads_no_part_of_the_server(name: str) -> None:
    code = f"import sys; from twinbus.namespace import {name}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = found.stdout.split()
    assert [module for module in SERVER if module in loaded] == []
