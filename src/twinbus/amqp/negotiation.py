"""What comes before AMQP frames: protocol headers and SASL (amqp-core-transport §2.2, amqp-core-security §5.3).

Decides whether the two peers speak the same protocol and whether the client may go on. Open is the connection's.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Literal

from twinbus.amqp.described_types import decode_described
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.events import ConnectionEvent, SaslReceived
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


class NegotiationPhase(Enum):
    HEADER = auto()  # the peer's first protocol header is awaited
    SASL = auto()
    AMQP_HEADER = auto()  # SASL is done; the AMQP header is awaited
    DONE = auto()
    REFUSED = auto()


class PeerRefusedError(AmqpError):
    """The peer will not be spoken to: no AMQP close can be sent, the transport is just closed."""


class Negotiation:
    """Bytes in; bytes out in `wire`. `phase` says where it stands."""

    def __init__(self, sasl: ServerSasl | ClientSasl | None, *, bare_allowed: bool) -> None:
        self.phase = NegotiationPhase.HEADER
        self.wire: list[bytes] = []
        self._sasl = sasl
        self._bare_allowed = bare_allowed
        self.is_client = not isinstance(sasl, ServerSasl)
        self._header_sent = False

    def start_client(self) -> None:
        """The client speaks first."""
        if self._sasl is None:
            self.send_amqp_header()
        else:
            self.wire.append(SASL_HEADER)

    def drop(self) -> None:
        """The transport is gone: lets go of the verifier."""
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
            self.wire.append(AMQP_HEADER)

    def receive(self, buf: bytes, pos: int, events: list[ConnectionEvent]) -> tuple[int, int]:
        """Consumes from `pos` while not done. Returns the new position and how many bytes it needs to go on."""
        while self.phase not in (NegotiationPhase.DONE, NegotiationPhase.REFUSED):
            left = len(buf) - pos
            if self.phase is NegotiationPhase.SASL:
                if left < 4:
                    return pos, 8
                size = frame_size(buf, pos, MIN_MAX_FRAME_SIZE)
                if left < size:
                    return pos, size
                self._on_sasl_frame(buf, pos, size, events)
                pos += size
            else:
                if left < 8:
                    return pos, 8
                self._on_header(buf[pos : pos + 8])
                pos += 8
        return pos, 8

    def _on_header(self, header: bytes) -> None:
        if self.phase is NegotiationPhase.HEADER and header == SASL_HEADER and self._sasl is not None:
            self.phase = NegotiationPhase.SASL
            if isinstance(self._sasl, ServerSasl):
                self.wire.append(SASL_HEADER)
                self.wire.append(performative_frame(0, self._sasl.start(), SASL_FRAME))
            return
        bare = self.phase is NegotiationPhase.HEADER and (self._sasl is None or self._bare_allowed)
        if header == AMQP_HEADER and (self.phase is NegotiationPhase.AMQP_HEADER or bare):
            self.send_amqp_header()
            self.phase = NegotiationPhase.DONE
            return
        if not self.is_client:  # §2.2: answer with the header that would do, and close
            wanted = AMQP_HEADER if self.phase is NegotiationPhase.AMQP_HEADER or self._sasl is None else SASL_HEADER
            if not (wanted == AMQP_HEADER and self._header_sent):
                self.wire.append(wanted)
        self.phase = NegotiationPhase.REFUSED
        raise PeerRefusedError(Condition.FRAMING_ERROR, f"the peer's protocol header is {header!r}")

    def _on_sasl_frame(self, buf: bytes, pos: int, size: int, events: list[ConnectionEvent]) -> None:
        _, start = frame_body(buf, pos, size, SASL_FRAME)
        performative, end = decode_described(buf, start)
        if end != pos + size:
            raise DecodeError("a SASL frame does not end where it says")
        sasl = self._sasl
        assert sasl is not None
        if isinstance(sasl, ServerSasl):
            received, outcome = sasl.receive(performative)
            events.append(received)
            self.wire.append(performative_frame(0, outcome, SASL_FRAME))
            if not sasl.outcome:
                self.phase = NegotiationPhase.REFUSED
                raise PeerRefusedError(Condition.UNAUTHORIZED_ACCESS, f"SASL {received.mechanism} was refused")
        else:
            answer = sasl.receive(performative)
            if answer is not None:
                self.wire.append(performative_frame(0, answer, SASL_FRAME))
                return
            self.send_amqp_header()
        self.phase = NegotiationPhase.AMQP_HEADER


SaslVerifier = Callable[[str, bytes], bool]
SaslCredential = Literal["ANONYMOUS", "EXTERNAL", "MSSBCBS"] | tuple[Literal["PLAIN"], str, str]

MECHANISMS = ("ANONYMOUS", "PLAIN", "EXTERNAL", "MSSBCBS")
OUTCOME_OK, OUTCOME_AUTH = 0, 1


class ServerSasl:
    """Offers mechanisms, reports the client's choice, gives the outcome."""

    def __init__(self, mechanisms: tuple[str, ...], verifier: SaslVerifier | None) -> None:
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

    def __init__(self, credential: SaslCredential, hostname: str | None) -> None:
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
