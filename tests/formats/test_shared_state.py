"""A shared state of the first format (S16) is read by every later version. These texts never change."""

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    FailoverRecord,
    HoldRecord,
    ReleaseRecord,
    RestoreRecord,
    read_state,
)

VERSION_1 = """
{"version": 1, "changes": [
 {"what": "failed_over", "entity": "Orders/EU", "writer": "host:71:0f3a9c11", "cause": "connection_lost",
  "engaged_at": "2026-11-16T11:00:00.250+00:00", "next_ping_at": "2026-11-16T11:04:00.250+00:00",
  "ping_interval": 120.0, "failed_trials": 1, "written_at": "2026-11-16T11:02:00.250+00:00"},
 {"what": "restored", "entity": "bills", "writer": "host:71:0f3a9c11", "written_at": "2026-11-16T11:02:00.000+00:00"},
 {"what": "held", "entity": "*", "writer": "host:72:aa00bb11", "cause": "forced",
  "engaged_at": "2026-11-16T10:00:00.000+00:00"},
 {"what": "released", "entity": "bills", "writer": "host:72:aa00bb11", "written_at": "2026-11-16T10:30:00.000+00:00"}
]}
"""
ELEVEN = 1794826800.0
"""2026-11-16 11:00:00 UTC."""


def test_s16_a_state_of_version_1_is_read_as_it_was_written() -> None:
    assert read_state(VERSION_1) == (
        FailoverRecord(
            "Orders/EU",
            FailureKind.CONNECTION_LOST,
            engaged_at=ELEVEN + 0.25,
            next_ping_at=ELEVEN + 240.25,
            ping_interval=120.0,
            failed_trials=1,
            written_at=ELEVEN + 120.25,
            writer="host:71:0f3a9c11",
        ),
        RestoreRecord("bills", ELEVEN + 120.0, "host:71:0f3a9c11"),
        HoldRecord(EVERY_ENTITY, ELEVEN - 3600.0, "host:72:aa00bb11"),
        ReleaseRecord("bills", ELEVEN - 1800.0, "host:72:aa00bb11"),
    )
