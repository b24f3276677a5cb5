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
        # One bit for each handle: a set of 8,192 numbers would take 700 KB.
        self._past = 0  # bound once
        self._refused = 0  # refused and forgotten; the peer's detach is still to come
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
        self._past |= 1 << handle
        self._forget_refused(handle)

    def unbind(self, handle: int) -> Link | None:
        """The peer detached this handle."""
        self._forget_refused(handle)
        return self._theirs.pop(handle, None)

    def was_bound(self, handle: int) -> bool:
        """Whether a link had this handle, and none has it now."""
        return bool(self._past >> handle & 1) and handle not in self._theirs

    def mark_refused(self, handle: int) -> None:
        """The link of this handle was refused and forgotten: what still comes for it is ignored."""
        self._refused |= 1 << handle

    def was_refused(self, handle: int) -> bool:
        return bool(self._refused >> handle & 1)

    def _forget_refused(self, handle: int) -> None:
        if self.was_refused(handle):
            self._refused ^= 1 << handle

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
