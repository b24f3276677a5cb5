"""Only `twinbus.sdk` touches private parts of azure-servicebus."""

from __future__ import annotations

import pytest

from .measure import private_accesses, private_sdk_names
from .source import PACKAGE, Source, sources


def test_no_module_outside_sdk_uses_a_private_part() -> None:
    names = private_sdk_names()
    outside = [source for source in sources(PACKAGE) if PACKAGE / "sdk" not in source.path.parents]
    assert {source.name: count for source in outside if (count := private_accesses(source, names))} == {}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("sender._handler", 1),
        ("getattr(sender, '_handler', None)", 1),
        ("from azure.servicebus._pyamqp import error", 1),
        ("self._handler", 0),
        ("sender.send_messages", 0),
    ],
)
def test_a_private_access_is_counted(line: str, count: int) -> None:
    source = Source(PACKAGE / "a_module_without_a_file.py")
    vars(source)["text"] = f"import azure.servicebus\n{line}\n"
    assert private_accesses(source, private_sdk_names()) == count
