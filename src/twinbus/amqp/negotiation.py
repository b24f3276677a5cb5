"""The start of a connection: protocol headers (amqp-core-transport §2.2) and SASL (amqp-core-security §5.3).

    client                     server
    SASL header      ------->
                     <-------  SASL header, sasl-mechanisms
    sasl-init        ------->
                     <-------  sasl-outcome
    AMQP header      ------->
                     <-------  AMQP header

Without SASL, both sides begin with the AMQP header. After the headers come AMQP frames, which `connection` handles.
SASL is limited to one sasl-init of the client, with at most one response, and one sasl-outcome of the server. The
application's verifier decides whether the response is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from twinbus.amqp.described_types import decode_described
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.frames import (
    AMQP_HEADER,
    MIN_MAX_FRAME_SIZE,
    SASL_FRAME,
    SASL_HEADER,
    frame_body,
    frame_size,
    performative_frame,
)
from twinbus.amqp.performatives import SaslInit, SaslMechanisms, SaslOutcome
from twinbus.values import Condition

SaslVerifier = Callable[[str, bytes], bool]
SaslCredential = Literal["ANONYMOUS", "EXTERNAL", "MSSBCBS"] | tuple[Literal["PLAIN"], str, str]

MECHANISMS = ("ANONYMOUS", "PLAIN", "EXTERNAL", "MSSBCBS")
OUTCOME_OK, OUTCOME_AUTH = 0, 1


@dataclass(slots=True)
class SaslReceived:
    """The client chose a SASL mechanism. The server may still refuse the client."""

    mechanism: str
    response: bytes
    hostname: str | None


class NegotiationPhase(Enum):
    HEADER = auto()  # waits for the peer's first protocol header
    SASL = auto()
    AMQP_HEADER = auto()  # SASL is done; waits for the AMQP header
    DONE = auto()
    REFUSED = auto()


class PeerRefusedError(AmqpError):
    """The negotiation failed: close the transport without an AMQP close."""


class Negotiation:
    """The exchange of headers and SASL frames at the start of a connection.

    `receive` takes the peer's bytes until `phase` is DONE or REFUSED. Bytes to send are appended to `output`.
    """

    def __init__(self, sasl: ServerSasl | ClientSasl | None, *, bare_allowed: bool) -> None:
        self.phase = NegotiationPhase.HEADER
        self.output: list[bytes] = []
        self._sasl = sasl
        self._bare_allowed = bare_allowed
        self.is_client = not isinstance(sasl, ServerSasl)
        self._header_sent = False

    def start_client(self) -> None:
        """Send the client's first protocol header."""
        if self._sasl is None:
            self.send_amqp_header()
        else:
            self.output.append(SASL_HEADER)

    def drop(self) -> None:
        """Drop the reference to the verifier, because the transport has ended."""
        self._sasl = None

    @property
    def is_done(self) -> bool:
        return self.phase is NegotiationPhase.DONE

    @property
    def amqp_header_sent(self) -> bool:
        return self._header_sent

    def send_amqp_header(self) -> None:
        if not self._header_sent:
            self._header_sent = True
            self.output.append(AMQP_HEADER)

    def receive(self, buf: bytes, pos: int, report: Callable[[SaslReceived], None]) -> tuple[int, int]:
        """Consume bytes from `pos` on. Returns the new position and the number of bytes needed to continue.

        `report` is called with the client's choice of mechanism. If the choice is refused, PeerRefusedError is raised
        after this call.
        """
        while self.phase not in (NegotiationPhase.DONE, NegotiationPhase.REFUSED):
            available = len(buf) - pos
            if self.phase is NegotiationPhase.SASL:
                if available < 4:
                    return pos, 8
                size = frame_size(buf, pos, MIN_MAX_FRAME_SIZE)
                if available < size:
                    return pos, size
                self._on_sasl_frame(buf, pos, size, report)
                pos += size
            else:
                if available < 8:
                    return pos, 8
                self._on_header(buf[pos : pos + 8])
                pos += 8
        return pos, 8

    def _on_header(self, header: bytes) -> None:
        if self.phase is NegotiationPhase.HEADER and header == SASL_HEADER and self._sasl is not None:
            self.phase = NegotiationPhase.SASL
            if isinstance(self._sasl, ServerSasl):
                self.output.append(SASL_HEADER)
                self.output.append(performative_frame(0, self._sasl.start(), SASL_FRAME))
            return
        bare = self.phase is NegotiationPhase.HEADER and (self._sasl is None or self._bare_allowed)
        if header == AMQP_HEADER and (self.phase is NegotiationPhase.AMQP_HEADER or bare):
            self.send_amqp_header()
            self.phase = NegotiationPhase.DONE
            return
        if not self.is_client:  # §2.2: answer with a header that is supported, and close.
            supported = SASL_HEADER
            if self.phase is NegotiationPhase.AMQP_HEADER or self._sasl is None:
                supported = AMQP_HEADER
            if not (supported == AMQP_HEADER and self._header_sent):
                self.output.append(supported)
        self.phase = NegotiationPhase.REFUSED
        raise PeerRefusedError(Condition.FRAMING_ERROR, f"the peer's protocol header is {header!r}")

    def _on_sasl_frame(self, buf: bytes, pos: int, size: int, report: Callable[[SaslReceived], None]) -> None:
        _, start = frame_body(buf, pos, size, SASL_FRAME)
        performative, end = decode_described(buf, start)
        if end != pos + size:
            raise DecodeError("the size of a SASL frame does not match its body")
        sasl = self._sasl
        assert sasl is not None
        if isinstance(sasl, ServerSasl):
            received, outcome = sasl.receive(performative)
            report(received)
            self.output.append(performative_frame(0, outcome, SASL_FRAME))
            if not sasl.outcome:
                self.phase = NegotiationPhase.REFUSED
                raise PeerRefusedError(Condition.UNAUTHORIZED_ACCESS, f"SASL {received.mechanism} was refused")
        else:
            answer = sasl.receive(performative)
            if answer is not None:
                self.output.append(performative_frame(0, answer, SASL_FRAME))
                return
            self.send_amqp_header()
        self.phase = NegotiationPhase.AMQP_HEADER


class ServerSasl:
    """The server's side of SASL: offers mechanisms and answers the client's choice with an outcome."""

    def __init__(self, mechanisms: tuple[str, ...], verifier: SaslVerifier | None) -> None:
        self._mechanisms = mechanisms
        self._verifier = verifier
        self.outcome: bool | None = None

    def start(self) -> SaslMechanisms:
        return SaslMechanisms(list(self._mechanisms))

    def receive(self, performative: Any) -> tuple[SaslReceived, SaslOutcome]:
        """Return the client's choice and the outcome. Raises AmqpError if the frame is not a first sasl-init."""
        if not isinstance(performative, SaslInit) or self.outcome is not None:
            raise AmqpError(Condition.ILLEGAL_STATE, f"{type(performative).__name__}; sasl-init is expected")
        response = performative.initial_response or b""
        mechanism = performative.mechanism
        accepted = mechanism in self._mechanisms and (self._verifier is None or self._verifier(mechanism, response))
        self.outcome = accepted
        received = SaslReceived(mechanism, response, performative.hostname)
        return received, SaslOutcome(OUTCOME_OK if accepted else OUTCOME_AUTH)


class ClientSasl:
    """The client's side of SASL: chooses the configured mechanism and waits for the outcome."""

    def __init__(self, credential: SaslCredential, hostname: str | None) -> None:
        if isinstance(credential, tuple):
            mechanism, user, password = credential
            self._init = SaslInit(mechanism, f"\0{user}\0{password}".encode(), hostname)
        else:
            self._init = SaslInit(credential, b"", hostname)
        self._sent = False
        self.outcome: bool | None = None

    def receive(self, performative: Any) -> SaslInit | None:
        """Return the frame to answer with, or None after a good outcome. Raises AmqpError if the server refuses."""
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
