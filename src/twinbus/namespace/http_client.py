"""Blocking HTTP client of a running namespace: requests its JSON pages (not the management API), and sets its faults.

All pages need a key with the Manage claim, or a credential with the role Data Owner.
"""

from __future__ import annotations

import html
import http.client
import json
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from twinbus.clock import Clock, SystemClock
from twinbus.connect import (
    ENTRA_SCOPE,
    ConnectionString,
    credential_failure,
    make_sas_token,
    named_credential,
)
from twinbus.errors import OperatorError
from twinbus.extras import MissingExtraError

FAULTS_PATH: Final = "/$faults"
_TOKEN_SECONDS: Final = 300
_DETAIL: Final = re.compile(r"<Detail>(.*?)</Detail>", re.DOTALL)


class NamespaceRequestError(OperatorError):
    """The namespace did not answer or refused the request. `status` is the HTTP status, 0 if there was no answer."""

    def __init__(self, text: str, hint: str = "", status: int = 0) -> None:
        super().__init__(text, hint)
        self.status = status


class NamespaceHttpClient:
    """Requests JSON pages of one namespace."""

    def __init__(
        self,
        connection_string: str,
        *,
        ca: Path | None = None,
        timeout: float = 10.0,
        clock: Clock | None = None,
        credential: str | None = None,
    ) -> None:
        """`connection_string` may be a host. Then `credential` names the credential to use (`named_credential`)."""
        self._at = ConnectionString.of(connection_string)
        self._at.require_credential(credential)
        self._credential = credential
        self._ca = ca
        self._timeout = timeout
        self._clock = clock or SystemClock()

    def request(self, method: str, path: str, body: dict[str, Any] | None = None, *, may_vanish: bool = False) -> Any:
        """Send a request and return the JSON answer. Raises NamespaceRequestError.

        With `may_vanish`, the request may end the server. If the connection breaks in this case, the result is an empty
        answer and not an error.
        """
        connection = self._connection()
        headers = {"Authorization": self._token(), "Accept": "application/json"}
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
            try:
                connection.request(method, path, content, headers)
                response = connection.getresponse()
                status, answer = response.status, response.read()
            except (ConnectionError, http.client.HTTPException):
                if may_vanish:
                    return {}
                raise
        except (OSError, http.client.HTTPException) as error:
            raise NamespaceRequestError(
                f"The namespace at {self._at.authority} did not answer: {str(error) or type(error).__name__}",
                "Check that it is running and that this is its connection string.",
            ) from error
        finally:
            connection.close()
        return self._read(status, answer)

    def _read(self, status: int, answer: bytes) -> Any:
        try:
            value = json.loads(answer)
        except ValueError:
            value = None
        if status < 300 and isinstance(value, dict):
            return value
        reason = value.get("error") if isinstance(value, dict) else _detail(answer)
        if status == 401:
            raise NamespaceRequestError(
                f"The namespace at {self._at.authority} refused {self._authorized_by}: {reason}",
                "This needs a key with the Manage claim, or the role Azure Service Bus Data Owner.",
                status,
            )
        raise NamespaceRequestError(f"{reason or http.client.responses.get(status, 'no explanation')}", status=status)

    def _connection(self) -> http.client.HTTPConnection:
        if not self._at.tls:
            return http.client.HTTPConnection(self._at.host, self._at.port, timeout=self._timeout)
        context = ssl.create_default_context(cafile=self._ca)
        return http.client.HTTPSConnection(self._at.host, self._at.port, timeout=self._timeout, context=context)

    @property
    def _authorized_by(self) -> str:
        return f"the key {self._at.key_name!r}" if self._at.has_key else f"the credential {self._credential!r}"

    def _token(self) -> str:
        if not self._at.has_key:
            assert self._credential is not None
            try:
                return f"Bearer {named_credential(self._credential).get_token(ENTRA_SCOPE).token}"
            except MissingExtraError:
                raise
            except Exception as error:
                raise credential_failure(error) from error
        expires_at = self._clock.now() // 1000 + _TOKEN_SECONDS
        return make_sas_token(self._at.resource(), self._at.key_name, self._at.key, expires_at)


def _detail(answer: bytes) -> str:
    """Return the text of an error answer that is not JSON: the <Detail> element, or the start of the answer."""
    text = answer.decode(errors="replace")
    found = _DETAIL.search(text)
    return html.unescape(found[1]) if found else text[:500].strip()


_Fault = dict[str, Any]
_Faults = list[dict[str, Any]]  # inside FaultClient, `list` is the method


class FaultClient(NamespaceHttpClient):
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
    ) -> _Fault:
        """Set a fault. Returns the fault as a JSON object with its id and its seed.

        A crash without points ends the server before it can answer. The result is then empty.
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
        answer: _Fault = self.request("POST", FAULTS_PATH, body, may_vanish=crashes)
        return answer

    def clear(self, id: str | None = None) -> int:
        """Clear one fault, or all faults. Returns the number of cleared faults. Faults that are over do not count."""
        try:
            return int(
                self.request("DELETE", FAULTS_PATH if id is None else f"{FAULTS_PATH}/{quote(id, safe='')}")["cleared"]
            )
        except NamespaceRequestError as error:
            if error.status == http.client.NOT_FOUND:
                return 0
            raise

    def list(self) -> _Faults:
        """Return the active faults."""
        found: _Faults = self.request("GET", FAULTS_PATH)["faults"]
        return found
