"""Credentials whose token issuer may fail or never answer (S2). A failure of the issuer is no failure of a namespace.

Each sender or receiver (handler) gets its own credential object instead of its client's. The object records whether the
handler is waiting for a token. So the error of a timeout can name who did not answer: the issuer or the namespace. The
drivers' deadlines limit how long a handler waits (S12).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, Final

from azure.servicebus.exceptions import OperationTimeoutError

# The SDK's own credential classes sign with a key or contain a token, so they need no issuer.
_SDK_MODULES: Final = "azure.servicebus."


class TokenUnavailableError(Exception):
    """The issuer of a credential's tokens could not be reached."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"no token could be had from the credential's issuer: {error}")


class TokenTimeoutError(OperationTimeoutError):
    """The issuer of a credential's tokens did not answer in time, so nothing was sent to the namespace (S2)."""

    def __init__(self) -> None:
        super().__init__(message="the credential's issuer gave no token in time: the namespace was not asked")


class TokenIssuers:
    """Gives every handler of a sync pair a `SenderCredential`. Handlers of one client share their token requests."""

    def __init__(self, run: Callable[[Callable[[], object]], None]) -> None:
        """Make issuers that call `run(function)` to start a function in a worker thread."""
        self._run = run
        self._issuers: dict[int, TokenIssuer] = {}

    def attach(self, handler: Any) -> None:
        """Replace the credential of a sync handler, unless the credential needs no issuer."""
        credential = handler._credential
        if _has_issuer(credential):
            issuer = self._issuers.setdefault(id(credential), TokenIssuer(credential, self._run))
            handler._credential = SenderCredential(issuer)


class TokenIssuer:
    """Requests tokens from one sync credential in worker threads, for each scope one request at a time.

    A request that never ends occupies one worker thread only.
    """

    def __init__(self, credential: Any, run: Callable[[Callable[[], object]], None]) -> None:
        self.credential = credential
        self._run = run
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, ...], Future[Any]] = {}

    def request(self, scopes: tuple[str, ...]) -> Future[Any]:
        """Return the running request for these scopes; start a request if none is running."""
        with self._lock:
            running = self._requests.get(scopes)
            if running is None:
                started: Future[Any] = Future()
                self._run(lambda: self._get_token(scopes, started))
                self._requests[scopes] = running = started
        return running

    def _get_token(self, scopes: tuple[str, ...], answer: Future[Any]) -> None:
        try:
            token = self.credential.get_token(*scopes)
        except BaseException as error:
            self._forget(scopes)
            answer.set_exception(error)
        else:
            self._forget(scopes)
            answer.set_result(token)

    def _forget(self, scopes: tuple[str, ...]) -> None:
        with self._lock:
            self._requests.pop(scopes, None)


class SenderCredential:
    """The credential of one sync handler. Another thread can end its wait for a token (`give_up`)."""

    def __init__(self, issuer: TokenIssuer) -> None:
        self.waiting = False
        self._issuer = issuer
        self._given_up: Future[None] = Future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._issuer.credential, name)

    def get_token(self, *scopes: str) -> Any:
        """Return a token. Raises TokenTimeoutError after `give_up`, TokenUnavailableError if the network failed."""
        self.waiting = True
        given_up = self._given_up = Future()
        request = self._issuer.request(scopes)
        wait((request, given_up), return_when=FIRST_COMPLETED)
        if not request.done():
            raise TokenTimeoutError
        self.waiting = False
        try:
            return request.result()
        except OSError as error:
            raise TokenUnavailableError(error) from error

    def give_up(self) -> None:
        """End a running `get_token` with TokenTimeoutError."""
        with contextlib.suppress(InvalidStateError):
            self._given_up.set_result(None)


class AioSenderCredential:
    """The credential of one asyncio handler. It has no timeout: the caller cancels its task to end the wait."""

    def __init__(self, credential: Any) -> None:
        self.waiting = False
        self._credential = credential

    def __getattr__(self, name: str) -> Any:
        return getattr(self._credential, name)

    async def get_token(self, *scopes: str) -> Any:
        """Return a token. Raises TokenUnavailableError if the network failed."""
        # If the wait is cancelled, this remains true: `timeout_error` then names the issuer.
        self.waiting = True
        try:
            token = await self._credential.get_token(*scopes)
        except OSError as error:
            self.waiting = False
            raise TokenUnavailableError(error) from error
        except Exception:
            self.waiting = False
            raise
        self.waiting = False
        return token


def attach_aio_credential(handler: Any) -> None:
    """Replace the credential of an asyncio handler, unless the credential needs no issuer."""
    if _has_issuer(handler._credential):
        handler._credential = AioSenderCredential(handler._credential)


def waits_for_token(handler: Any) -> bool:
    """Return whether the handler has requested a token and not yet received it."""
    credential = handler._credential
    return isinstance(credential, SenderCredential | AioSenderCredential) and credential.waiting


def timeout_error(handler: Any, text: str) -> OperationTimeoutError:
    """Return the error for a call that ended at its deadline: TokenTimeoutError if the handler waits for a token."""
    return TokenTimeoutError() if waits_for_token(handler) else OperationTimeoutError(message=text)


def _has_issuer(credential: Any) -> bool:
    return not type(credential).__module__.startswith(_SDK_MODULES)
