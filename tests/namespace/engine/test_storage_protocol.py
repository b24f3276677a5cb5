"""Rows: the constructor for new messages, expiry, and overlays."""

from __future__ import annotations

from twinbus.namespace.engine.storage_protocol import (
    COPY_BYTES,
    QueueLane,
    Row,
    forward_count,
    forward_count_overlay,
    merge_overlay,
    overlay_properties,
)

ROW = Row.new(
    queue=1,
    lane=QueueLane.DEFERRED,
    seq=2,
    origin_seq=3,
    enqueued=4,
    expires=5,
    due=6,
    session="session",
    overlay=b"overlay",
    body=7,
    raw=b"message",
)


def test_the_constructor_puts_every_value_into_its_own_field() -> None:
    assert ROW._asdict() == {
        "queue": 1,
        "lane": QueueLane.DEFERRED,
        "seq": 2,
        "origin_seq": 3,
        "enqueued": 4,
        "expires": 5,
        "due": 6,
        "session": "session",
        "delivery_count": 0,
        "size": 7,
        "overlay": b"overlay",
        "body": 7,
        "raw": b"message",
    }


def test_a_row_without_its_message_keeps_all_other_fields() -> None:
    assert ROW.without_raw() == ROW._replace(raw=b"")


def test_only_an_active_message_expires_without_a_request() -> None:
    assert ROW.is_overdue(5)
    assert not ROW.is_overdue(4)
    assert not ROW.is_expired(5)
    assert ROW._replace(lane=QueueLane.ACTIVE).is_expired(5)


def test_a_row_with_a_shared_body_is_charged_for_the_copy_only() -> None:
    assert ROW.charge == COPY_BYTES
    assert ROW._replace(body=None).charge == ROW.size


def test_the_forward_count_of_an_overlay_is_no_application_property() -> None:
    overlay = merge_overlay(forward_count_overlay(3), {"reason": "late"})
    assert forward_count(overlay) == 3
    assert overlay_properties(overlay) == {"reason": "late"}
    assert overlay_properties(forward_count_overlay(1)) is None
