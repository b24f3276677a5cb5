"""A new message takes its place: in memory if it can be given out soon, and before those who wait for its session."""

from __future__ import annotations

from collections.abc import Iterable

from twinbus.namespace.engine.effects import Step
from twinbus.namespace.engine.rows import Row
from twinbus.namespace.engine.seating import seat_for
from twinbus.namespace.engine.shelf import Shelf


def shelve(shelf: Shelf, rows: Iterable[Row], now: int, step: Step) -> None:
    """Rows new at the tail of the active lane, in order."""
    if shelf.settings.requires_session:
        _shelve_by_session(shelf, rows, now, step)
        return
    append = shelf.main.window.append
    for row in rows:
        append(row)
        if row.expires is not None:
            shelf.expires_at(row.expires)
    shelf.wake(shelf.main)


def _shelve_by_session(shelf: Shelf, rows: Iterable[Row], now: int, step: Step) -> None:
    sessions = shelf.sessions
    for row in rows:
        shelf.expires_at(row.expires)
        session = row.session or ""
        held = sessions.held.get(session)
        if held is not None:
            held.feed.window.append(row)
            shelf.wake(held.feed)
        elif sessions.waiting:
            seat_for(shelf, session, now, step)
