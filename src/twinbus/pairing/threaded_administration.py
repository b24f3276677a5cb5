"""The SDK's sync administration client, used from asyncio in threads: where aiohttp is not installed.

The SDK's asyncio administration client cannot even be imported without aiohttp. A pair needs only a few requests of it:
at pairing, and when a backlog queue is gone. So aiohttp and its seven packages are not required.

A request that is cancelled ends in its thread, at the latest after the timeouts that the request was made with.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final

from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.pairing.daemon_thread import in_daemon_thread

_TOKEN_SECONDS: Final = 60.0


class ThreadedAdministrationClient:
    """Has the methods of the SDK's asyncio administration client; each runs the sync client's method in a thread."""

    def __init__(self, client: ServiceBusAdministrationClient, credential: LoopCredential | None = None) -> None:
        self._client = client
        self._credential = credential

    @property
    def fully_qualified_namespace(self) -> str:
        return str(self._client.fully_qualified_namespace)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return partial(self._listed if name.startswith("list_") else self._called, method)

    async def close(self) -> None:
        """Close the sync client. Threads whose requests were cancelled end by themselves."""
        await self._called(self._client.close)

    async def _called(self, method: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
        if self._credential is not None:
            self._credential.loop = asyncio.get_running_loop()
        return await in_daemon_thread(partial(method, *arguments, **keywords))

    async def _listed(
        self, method: Callable[..., Iterable[Any]], *arguments: object, **keywords: object
    ) -> AsyncIterator[Any]:
        for found in await self._called(lambda: list(method(*arguments, **keywords))):
            yield found


class LoopCredential:
    """A credential for the sync client whose tokens come from an asyncio credential, in the event loop of the pair."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential
        self.loop: asyncio.AbstractEventLoop | None = None

    def get_token(self, *scopes: str, **keywords: Any) -> Any:
        """Return a token. Called in a thread, while the event loop runs."""
        assert self.loop is not None
        token: Awaitable[Any] = self._credential.get_token(*scopes, **keywords)
        return asyncio.run_coroutine_threadsafe(_awaited(token), self.loop).result(_TOKEN_SECONDS)

    @classmethod
    def of(cls, credential: Any) -> Any:
        """Return a credential of the sync client as it is, and one of the asyncio client wrapped."""
        return cls(credential) if inspect.iscoroutinefunction(credential.get_token) else credential


async def _awaited(token: Awaitable[Any]) -> Any:
    return await token
