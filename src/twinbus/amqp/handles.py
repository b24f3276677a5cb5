"""Which link stands behind a handle or a name, within one session (amqp-core-transport §2.6.2).

Each peer numbers its links on its own; a link is found by either number, or by name and role.
"""

from itertools import count

from twinbus.amqp.link import Link


class Handles:
    def __init__(self) -> None:
        self._ours: dict[int, Link] = {}
        self._theirs: dict[int, Link] = {}
        self._by_name: dict[tuple[str, bool], Link] = {}
        self._past: set[int] = set()
        self.find = self._theirs.get  # by the peer's handle

    @property
    def links(self) -> list[Link]:
        return list(self._ours.values())

    def named(self, name: str, role: bool) -> Link | None:
        return self._by_name.get((name, role))

    def free(self, preferred: int) -> int:
        """The peer's own number where it is free: easier to follow in a trace."""
        if preferred not in self._ours:
            return preferred
        return next(handle for handle in count() if handle not in self._ours)

    def add(self, link: Link) -> None:
        self._ours[link.handle] = link
        self._by_name[link.name, link.role] = link

    def bind(self, link: Link, handle: int) -> None:
        """The peer attached the link under this handle."""
        link.remote_handle = handle
        self._theirs[handle] = link
        self._past.discard(handle)

    def unbind(self, handle: int) -> Link | None:
        """The peer detached this handle."""
        link = self._theirs.pop(handle, None)
        if link is not None:
            self._past.add(handle)
        return link

    def was_bound(self, handle: int) -> bool:
        return handle in self._past

    def remove(self, link: Link) -> bool:
        """Frees the link's numbers and name. False if that was done before."""
        if self._by_name.get((link.name, link.role)) is link:
            del self._by_name[link.name, link.role]
        if link.remote_handle is not None and self._theirs.get(link.remote_handle) is link:
            self.unbind(link.remote_handle)
        if self._ours.get(link.handle) is not link:
            return False
        del self._ours[link.handle]
        return True
