"""A message on its way from one entity to another by auto-forward: what goes with it, and which of many are taken.

Where it is taken from is decided in `forwarding`, where it is put by the entity that takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.effects import Refusal


class ForwardedMessage(NamedTuple):
    """A message as its next entity gets it."""

    envelope: RoutingFields
    origin_seq: int
    ttl: int | None
    """What is left of its lifecycle."""
    overlay: bytes
    """Tells how often it was forwarded."""


def admit(
    passed: Sequence[ForwardedMessage], size: int, refusal_of: Callable[[RoutingFields, int], Refusal | None]
) -> tuple[list[ForwardedMessage], list[Refusal | None]]:
    """Each by itself, unlike a transfer: those that are taken, and for all of them why not. `size` is held already."""
    kept: list[ForwardedMessage] = []
    results: list[Refusal | None] = []
    for each in passed:
        refusal = refusal_of(each.envelope, size)
        results.append(refusal)
        if refusal is None:
            kept.append(each)
            size += len(each.envelope.raw)
    return kept, results


def life_of(ttl: int | None, default: int | None) -> int | None:
    """The shorter of two lives; None is for ever."""
    return default if ttl is None else ttl if default is None else min(ttl, default)
