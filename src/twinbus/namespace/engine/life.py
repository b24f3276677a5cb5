"""The life of an entity: its record, when it was made and changed, when it was idle for too long, and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinbus.namespace.engine.counters import Counters
from twinbus.namespace.engine.descriptions import Description
from twinbus.namespace.engine.effects import Answer, DetachReceiver, Step
from twinbus.namespace.engine.events import Deleted, DescriptionChanged, Event, SessionReceiverAttached
from twinbus.namespace.engine.records import kind_of, write_description
from twinbus.namespace.engine.refusals import not_found
from twinbus.namespace.engine.rows import Lane, PutEntity


class Life:
    """One entity from its creation to its end."""

    __slots__ = ("_forget", "_reopened", "counters", "created", "ended", "updated")

    def __init__(
        self, counters: Counters, created: int, updated: int, forget: Callable[[str], None], *, reopened: bool
    ) -> None:
        self.counters = counters
        self.created = created
        self.updated = updated
        self.ended = False
        self._forget = forget
        self._reopened = reopened

    def record(self, description: Description) -> PutEntity:
        text = write_description(description)
        queue = self.counters.queue
        return PutEntity(queue, kind_of(description), description.path, text, self.created, self.updated)

    def end(self, path: str) -> None:
        """From now on nobody finds the entity; who still has it in hand is told that it is gone."""
        self.ended = True
        self.counters.changed = False
        self._forget(path)

    def idle_at(self, idle: int | None) -> int | None:
        """When the entity will have been idle for so long that it is deleted."""
        return None if idle is None else self.counters.accessed + idle

    def is_idle(self, idle: int | None, in_use: bool, now: int) -> bool:
        at = self.idle_at(idle)
        if at is None or at > now:
            return False
        # A restart counts as an access: who was attached before it needs time to come back.
        if in_use or self._reopened or self.counters.lanes[Lane.SCHEDULED]:
            self._reopened = False
            self.counters.accessed = now
            self.counters.changed = True
            return False
        return True


def confirm(event: DescriptionChanged | Deleted, step: Step) -> None:
    if event.reply is not None:
        step.effects.append(Answer(event.reply, None))


def refuse_as_gone(event: Event, path: str) -> Step:
    """Whatever is asked of an entity that has ended."""
    reply: Any = getattr(event, "reply", None)
    if isinstance(event, SessionReceiverAttached):
        return Step(effects=[DetachReceiver(event.receiver, not_found(path))])
    return Step(effects=[Answer(reply, not_found(path))] if reply is not None else [])
