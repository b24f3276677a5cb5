"""One session with the links of one purpose on it: attached, used, and gone exactly once.

A session of its own keeps its delivery ids consecutive, so that they settle in runs. What the links carry is said by
the subclasses; whatever waits on a link that is gone fails there.
"""

from __future__ import annotations

import asyncio
from typing import Any

from twinbus.amqp.events import Delivered, Disposed
from twinbus.amqp.link import Link
from twinbus.amqp.performatives import Error
from twinbus.connect.errors import ConnectionClosedError, ServiceBusError
from twinbus.connect.wire import Wire, error_of


class Attachment:
    """Open from `attached` until `error` is set."""

    def __init__(self, wire: Wire, entity: str) -> None:
        if wire.error is not None:
            raise wire.error.again(entity)
        self.wire = wire
        self.entity = entity
        self.error: ServiceBusError | None = None
        self.session = wire.core.begin()
        self.session.context = self
        self._awaited: set[Link] = set()
        self._attached: asyncio.Future[None] = wire.loop.create_future()
        self._gone: asyncio.Future[None] = wire.loop.create_future()
        wire.add(self)

    @property
    def is_open(self) -> bool:
        return self.error is None

    def attach(self, name: str, role: bool, **arguments: Any) -> Link:
        link = self.session.attach(name, role, **arguments)
        self._awaited.add(link)
        self.wire.flush_soon()
        return link

    async def attached(self) -> None:
        """Waits until the peer took every link; the caller bounds the wait. Given up or refused, nothing is left."""
        try:
            await self._attached
        except asyncio.CancelledError:
            self.fail(ConnectionClosedError("the attach was given up", entity=self.entity))
            raise
        except ServiceBusError as error:
            raise error.again(self.entity) from None

    async def close(self) -> None:
        """Detaches and waits for the peer's answer; the caller bounds the wait."""
        if self.error is None:
            for link in self.session.links:
                link.detach()
            self.wire.flush_soon()
            self._finish(ConnectionClosedError("closed by its owner", entity=self.entity), end=False)
            try:
                await self._gone
            finally:
                self._end()

    def fail(self, error: ServiceBusError) -> None:
        """Ends it at once, with the reason for everything that waits."""
        if self.error is None:
            self._finish(error, end=True)
        else:
            self._set_gone()

    # --- from the wire -----------------------------------------------------------------------------------------

    def accepted(self, link: Link) -> None:
        self._awaited.discard(link)
        self.link_accepted(link)
        if not self._awaited and not self._attached.done():
            self._attached.set_result(None)

    def detached(self, link: Link, error: Error | None) -> None:
        self.fail(error_of(error, f"the link to {self.entity} was detached", self.entity))

    def ended(self, error: Error | None) -> None:
        self.fail(error_of(error, f"the session to {self.entity} was ended", self.entity))

    # --- for the subclasses ------------------------------------------------------------------------------------

    def link_accepted(self, link: Link) -> None:
        """A link can be used from now on."""

    def flowed(self, link: Link) -> None:
        """Credit came, or was used up."""

    def delivered(self, event: Delivered) -> None:
        """A message came."""

    def disposed(self, event: Disposed) -> None:
        """The peer told the state of deliveries."""

    def failed(self, error: ServiceBusError) -> None:
        """The links are gone: fail what waits."""

    # --- the end -----------------------------------------------------------------------------------------------

    def _finish(self, error: ServiceBusError, *, end: bool) -> None:
        self.error = error.again()
        self.error.cut_off = True
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()  # whoever waited for it may have given up
        self.failed(self.error)
        if end:
            self._end()

    def _end(self) -> None:
        self.wire.remove(self)
        self._set_gone()
        if self.wire.error is None:
            self.session.end()
            self.wire.flush_soon()

    def _set_gone(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
