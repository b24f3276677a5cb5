"""The face of the room: every name that it lists exists, and names that need no codec load no codec."""

import subprocess
import sys

import pytest

import twinbus.connect


@pytest.mark.parametrize("name", twinbus.connect.__all__)
def test_every_name_of_the_face_exists(name: str) -> None:
    assert getattr(twinbus.connect, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        twinbus.connect.no_such_name  # type: ignore[attr-defined]  # noqa: B018 - the access is the test


def test_connection_strings_tokens_errors_and_timeouts_load_no_codec() -> None:
    program = (
        "import sys; from twinbus.connect import ConnectionString, SasTokenSource, ServiceBusError, deadline, "
        "bisect_refused; sys.exit(any(name.startswith('twinbus.amqp') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
