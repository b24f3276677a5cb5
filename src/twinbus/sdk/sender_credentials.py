"""Tokens of credentials whose issuer may fail or never answer (S2): neither says anything about a namespace.

Each sender asks through an object of its own, which knows whether it waits. How long: the drivers' deadlines (S12).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, Final

from azure.servicebus.exceptions import OperationTimeoutError

# Those of the SDK itself, which sign with a key or hold a token: they ask nobody.
_OWN: Final = "azure.servicebus."


class TokenUnavailableError(Exception):
    """The issuer of a credential's tokens could not be reached."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"no token could be had from the credential's issuer: {error}")


class TokenTimeoutError(OperationTimeoutError):
    """The issuer of a credential's tokens did not answer in time: the namespace was not asked (S2)."""

    def __init__(self) -> None:
        super().__init__(message="the credential's issuer gave no token in time: the namespace was not asked")


class TokenIssuer:
    """A credential of a sync pair, asked in workers: for one scope by one at a time, however many wait.

    A request that never ends holds that worker, and no other.
    """

    def __init__(self, credential: Any, run: Callable[[Callable[[], object]], None]) -> None:
        self.credential = credential
        self._run = run
        self._asking = threading.Lock()
        self._asked: dict[tuple[str, ...], Future[Any]] = {}

    def asked(self, scopes: tuple[str, ...]) -> Future[Any]:
        with self._asking:
            found = self._asked.get(scopes)
            if found is None:
                made: Future[Any] = Future()
                self._run(lambda: self._ask(scopes, made))
                self._asked[scopes] = found = made
        return found

    def _ask(self, scopes: tuple[str, ...], answer: Future[Any]) -> None:
        try:
            token = self.credential.get_token(*scopes)
        except BaseException as error:
            self._forget(scopes)
            answer.set_exception(error)
        else:
            self._forget(scopes)
            answer.set_result(token)

    def _forget(self, scopes: tuple[str, ...]) -> None:
        with self._asking:
            self._asked.pop(scopes, None)


class SenderCredential:
    """In place of the credential of one sync sender."""

    def __init__(self, issuer: TokenIssuer) -> None:
        self.waiting = False
        self._issuer = issuer
        self._given_up: Future[None] = Future()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._issuer.credential, name)

    def get_token(self, *scopes: str) -> Any:
        self.waiting = True
        given_up = self._given_up = Future()
        asked = self._issuer.asked(scopes)
        wait((asked, given_up), return_when=FIRST_COMPLETED)
        if not asked.done():
            raise TokenTimeoutError
        self.waiting = False
        try:
            return asked.result()
        except OSError as error:
            raise TokenUnavailableError(error) from error

    def give_up(self) -> None:
        """Whoever waits for one goes on without."""
        with contextlib.suppress(InvalidStateError):
            self._given_up.set_result(None)


class AioSenderCredential:
    """In place of the credential of one aio sender: deadlines cancel it."""

    def __init__(self, credential: Any) -> None:
        self.waiting = False
        self._credential = credential

    def __getattr__(self, name: str) -> Any:
        return getattr(self._credential, name)

    async def get_token(self, *scopes: str) -> Any:
        # Still true when it is cancelled here: a time-out that follows is the issuer's.
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


def uses_token_issuer(credential: Any) -> bool:
    return not type(credential).__module__.startswith(_OWN)


def timeout_error(sender: Any, otherwise: str) -> OperationTimeoutError:
    """What a call on this sender is told that was given up: who did not answer."""
    return TokenTimeoutError() if waits_for_token(sender) else OperationTimeoutError(message=otherwise)


def waits_for_token(sender: Any) -> bool:
    """Whether it asked for a token that has not come."""
    return isinstance(sender._credential, SenderCredential | AioSenderCredential) and sender._credential.waiting
