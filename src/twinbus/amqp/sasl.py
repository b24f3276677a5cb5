"""SASL (amqp-core-security §5.3) for both roles: one choice, at most one response, one outcome.

Frames go in as performatives and come out as performatives. Whether a credential is good is the verifier's word.
"""

from collections.abc import Callable
from typing import Any, Literal

from twinbus.amqp.errors import AmqpError
from twinbus.amqp.events import SaslReceived
from twinbus.amqp.performatives import SaslInit, SaslMechanisms, SaslOutcome
from twinbus.values import Condition

Verifier = Callable[[str, bytes], bool]
Credential = Literal["ANONYMOUS", "EXTERNAL", "MSSBCBS"] | tuple[Literal["PLAIN"], str, str]

MECHANISMS = ("ANONYMOUS", "PLAIN", "EXTERNAL", "MSSBCBS")
OUTCOME_OK, OUTCOME_AUTH = 0, 1


class ServerSasl:
    """Offers mechanisms, reports the client's choice, gives the outcome."""

    def __init__(self, mechanisms: tuple[str, ...], verifier: Verifier | None) -> None:
        self._mechanisms = mechanisms
        self._verifier = verifier
        self.outcome: bool | None = None

    def start(self) -> SaslMechanisms:
        return SaslMechanisms(list(self._mechanisms))

    def receive(self, performative: Any) -> tuple[SaslReceived, SaslOutcome]:
        if not isinstance(performative, SaslInit) or self.outcome is not None:
            raise AmqpError(Condition.ILLEGAL_STATE, f"{type(performative).__name__} where sasl-init belongs")
        response = performative.initial_response or b""
        chosen = performative.mechanism
        taken = chosen in self._mechanisms and (self._verifier is None or self._verifier(chosen, response))
        self.outcome = taken
        received = SaslReceived(chosen, response, performative.hostname)
        return received, SaslOutcome(OUTCOME_OK if taken else OUTCOME_AUTH)


class ClientSasl:
    """Chooses the configured mechanism and waits for the outcome."""

    def __init__(self, credential: Credential, hostname: str | None) -> None:
        if isinstance(credential, tuple):
            mechanism, user, password = credential
            self._init = SaslInit(mechanism, f"\0{user}\0{password}".encode(), hostname)
        else:
            self._init = SaslInit(credential, b"", hostname)
        self._sent = False
        self.outcome: bool | None = None

    def receive(self, performative: Any) -> SaslInit | None:
        if isinstance(performative, SaslMechanisms) and not self._sent:
            self._sent = True
            if self._init.mechanism not in performative.sasl_server_mechanisms:
                offered = ", ".join(performative.sasl_server_mechanisms)
                raise AmqpError(Condition.UNAUTHORIZED_ACCESS, f"the peer offers {offered}, not {self._init.mechanism}")
            return self._init
        if isinstance(performative, SaslOutcome) and self._sent and self.outcome is None:
            self.outcome = performative.code == OUTCOME_OK
            if not self.outcome:
                raise AmqpError(
                    Condition.UNAUTHORIZED_ACCESS, f"the peer refused the credential (outcome {performative.code})"
                )
            return None
        raise AmqpError(Condition.ILLEGAL_STATE, f"{type(performative).__name__} is not expected in SASL now")
