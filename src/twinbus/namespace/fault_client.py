"""Faults of a running namespace, set from outside: a small blocking client of `/$faults` on its port.

It needs a key with the Manage claim. What a fault does is decided by the namespace.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import quote

from twinbus.namespace.page_client import PageClient, PageRequestError

PATH: Final = "/$faults"
_Shown = dict[str, Any]
_ShownAll = list[dict[str, Any]]


FaultRequestError = PageRequestError


class FaultClient(PageClient):
    """Sets, clears and lists the faults of one namespace."""

    def set(
        self,
        kind: str,
        *,
        entity: str | None = None,
        link: str | None = None,
        points: Iterable[str] = (),
        probability: float | None = None,
        count: int | None = None,
        duration: float | None = None,
        delay: float | None = None,
        seed: int | None = None,
        after: bool = False,
    ) -> _Shown:
        """Put a fault in force and return it as the namespace tells it: with its id and its seed.

        Of a crash without points there is nothing to tell: the answer is empty.
        """
        spec = {
            "kind": kind,
            "entity": entity,
            "link": link,
            "points": list(points) or None,
            "probability": probability,
            "count": count,
            "duration": duration,
            "delay": delay,
            "seed": seed,
            "after": after or None,
        }
        body = {name: value for name, value in spec.items() if value is not None}
        crashes = kind == "crash" and "points" not in body
        answer: _Shown = self.ask("POST", PATH, body, may_vanish=crashes)
        return answer

    def clear(self, id: str | None = None) -> int:
        """Lift one fault, or all; how many were lifted. One that is over by itself counts as none."""
        try:
            return int(self.ask("DELETE", PATH if id is None else f"{PATH}/{quote(id, safe='')}")["cleared"])
        except FaultRequestError as error:
            if error.status == http.client.NOT_FOUND:
                return 0
            raise

    def list(self) -> _ShownAll:
        """What is in force."""
        found: _ShownAll = self.ask("GET", PATH)["faults"]
        return found
