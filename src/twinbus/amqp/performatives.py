"""Composite types of AMQP 1.0 as dataclasses: performatives, SASL frames, delivery states, termini, errors.

The fields have the names and the order of the standard. Their values are plain Python values. `fast_frames` has faster
codecs for Transfer, Disposition and Flow.
"""

from dataclasses import dataclass
from typing import Any, Final

from twinbus.amqp.described_types import (
    ANY,
    BINARY,
    BOOLEAN,
    MAP,
    STRING,
    SYMBOL,
    SYMBOLS,
    UBYTE,
    UINT,
    ULONG,
    USHORT,
    described_field,
    described_type,
)
from twinbus.amqp.errors import AmqpError
from twinbus.values import Described

SENDER: Final = False  # §2.8.1
RECEIVER: Final = True

SND_UNSETTLED, SND_SETTLED, SND_MIXED = 0, 1, 2
RCV_FIRST, RCV_SECOND = 0, 1

Fields = dict[Any, Any]


@described_type(0x1D, "amqp:error:list", condition=SYMBOL, description=STRING, info=MAP)
@dataclass(slots=True)
class Error:
    condition: str
    description: str | None = None
    info: Fields | None = None

    @classmethod
    def of(cls, fault: AmqpError) -> "Error":
        """Return the AMQP error that reports an exception to the peer."""
        return cls(fault.condition, fault.description, dict(fault.info) if fault.info else None)


_ERROR = described_field(Error)


@described_type(0x23, "amqp:received:list", section_number=UINT, section_offset=ULONG)
@dataclass(slots=True)
class Received:
    section_number: int
    section_offset: int


@described_type(0x24, "amqp:accepted:list")
@dataclass(slots=True)
class Accepted:
    pass


@described_type(0x25, "amqp:rejected:list", error=_ERROR)
@dataclass(slots=True)
class Rejected:
    error: Error | None = None


@described_type(0x26, "amqp:released:list")
@dataclass(slots=True)
class Released:
    pass


@described_type(
    0x27, "amqp:modified:list", delivery_failed=BOOLEAN, undeliverable_here=BOOLEAN, message_annotations=MAP
)
@dataclass(slots=True)
class Modified:
    delivery_failed: bool | None = None
    undeliverable_here: bool | None = None
    message_annotations: Fields | None = None


DeliveryState = Received | Accepted | Rejected | Released | Modified | Described
_STATE = described_field(Received, Accepted, Rejected, Released, Modified, Described)


@described_type(
    0x28,
    "amqp:source:list",
    address=ANY,
    durable=UINT,
    expiry_policy=SYMBOL,
    timeout=UINT,
    dynamic=BOOLEAN,
    dynamic_node_properties=MAP,
    distribution_mode=SYMBOL,
    filter=MAP,
    default_outcome=_STATE,
    outcomes=SYMBOLS,
    capabilities=SYMBOLS,
)
@dataclass(slots=True)
class Source:
    address: Any = None
    durable: int = 0
    expiry_policy: str = "session-end"
    timeout: int = 0
    dynamic: bool = False
    dynamic_node_properties: Fields | None = None
    distribution_mode: str | None = None
    filter: Fields | None = None
    default_outcome: DeliveryState | None = None
    outcomes: list[str] | None = None
    capabilities: list[str] | None = None


@described_type(
    0x29,
    "amqp:target:list",
    address=ANY,
    durable=UINT,
    expiry_policy=SYMBOL,
    timeout=UINT,
    dynamic=BOOLEAN,
    dynamic_node_properties=MAP,
    capabilities=SYMBOLS,
)
@dataclass(slots=True)
class Target:
    address: Any = None
    durable: int = 0
    expiry_policy: str = "session-end"
    timeout: int = 0
    dynamic: bool = False
    dynamic_node_properties: Fields | None = None
    capabilities: list[str] | None = None


@described_type(
    0x10,
    "amqp:open:list",
    container_id=STRING,
    hostname=STRING,
    max_frame_size=UINT,
    channel_max=USHORT,
    idle_time_out=UINT,
    outgoing_locales=SYMBOLS,
    incoming_locales=SYMBOLS,
    offered_capabilities=SYMBOLS,
    desired_capabilities=SYMBOLS,
    properties=MAP,
)
@dataclass(slots=True)
class Open:
    container_id: str
    hostname: str | None = None
    max_frame_size: int = 0xFFFFFFFF
    channel_max: int = 0xFFFF
    idle_time_out: int | None = None  # ms
    outgoing_locales: list[str] | None = None
    incoming_locales: list[str] | None = None
    offered_capabilities: list[str] | None = None
    desired_capabilities: list[str] | None = None
    properties: Fields | None = None


@described_type(
    0x11,
    "amqp:begin:list",
    remote_channel=USHORT,
    next_outgoing_id=UINT,
    incoming_window=UINT,
    outgoing_window=UINT,
    handle_max=UINT,
    offered_capabilities=SYMBOLS,
    desired_capabilities=SYMBOLS,
    properties=MAP,
)
@dataclass(slots=True, kw_only=True)
class Begin:
    remote_channel: int | None = None
    next_outgoing_id: int
    incoming_window: int
    outgoing_window: int
    handle_max: int = 0xFFFFFFFF
    offered_capabilities: list[str] | None = None
    desired_capabilities: list[str] | None = None
    properties: Fields | None = None


@described_type(
    0x12,
    "amqp:attach:list",
    name=STRING,
    handle=UINT,
    role=BOOLEAN,
    snd_settle_mode=UBYTE,
    rcv_settle_mode=UBYTE,
    source=described_field(Source, Described),
    target=described_field(Target, Described),
    unsettled=MAP,
    incomplete_unsettled=BOOLEAN,
    initial_delivery_count=UINT,
    max_message_size=ULONG,
    offered_capabilities=SYMBOLS,
    desired_capabilities=SYMBOLS,
    properties=MAP,
)
@dataclass(slots=True)
class Attach:
    name: str
    handle: int
    role: bool
    snd_settle_mode: int = SND_MIXED
    rcv_settle_mode: int = RCV_FIRST
    source: Source | Described | None = None
    target: Target | Described | None = None
    unsettled: Fields | None = None
    incomplete_unsettled: bool = False
    initial_delivery_count: int | None = None
    max_message_size: int | None = None
    offered_capabilities: list[str] | None = None
    desired_capabilities: list[str] | None = None
    properties: Fields | None = None


@described_type(
    0x13,
    "amqp:flow:list",
    next_incoming_id=UINT,
    incoming_window=UINT,
    next_outgoing_id=UINT,
    outgoing_window=UINT,
    handle=UINT,
    delivery_count=UINT,
    link_credit=UINT,
    available=UINT,
    drain=BOOLEAN,
    echo=BOOLEAN,
    properties=MAP,
)
@dataclass(slots=True, kw_only=True)
class Flow:
    next_incoming_id: int | None = None
    incoming_window: int
    next_outgoing_id: int
    outgoing_window: int
    handle: int | None = None
    delivery_count: int | None = None
    link_credit: int | None = None
    available: int | None = None
    drain: bool = False
    echo: bool = False
    properties: Fields | None = None


@described_type(
    0x14,
    "amqp:transfer:list",
    handle=UINT,
    delivery_id=UINT,
    delivery_tag=BINARY,
    message_format=UINT,
    settled=BOOLEAN,
    more=BOOLEAN,
    rcv_settle_mode=UBYTE,
    state=_STATE,
    resume=BOOLEAN,
    aborted=BOOLEAN,
    batchable=BOOLEAN,
)
@dataclass(slots=True)
class Transfer:
    handle: int
    delivery_id: int | None = None
    delivery_tag: bytes | None = None
    message_format: int | None = None
    settled: bool | None = None
    more: bool = False
    rcv_settle_mode: int | None = None
    state: DeliveryState | None = None
    resume: bool = False
    aborted: bool = False
    batchable: bool = False


@described_type(
    0x15,
    "amqp:disposition:list",
    role=BOOLEAN,
    first=UINT,
    last=UINT,
    settled=BOOLEAN,
    state=_STATE,
    batchable=BOOLEAN,
)
@dataclass(slots=True)
class Disposition:
    role: bool
    first: int
    last: int | None = None
    settled: bool = False
    state: DeliveryState | None = None
    batchable: bool = False


@described_type(0x16, "amqp:detach:list", handle=UINT, closed=BOOLEAN, error=_ERROR)
@dataclass(slots=True)
class Detach:
    handle: int
    closed: bool = False
    error: Error | None = None


@described_type(0x17, "amqp:end:list", error=_ERROR)
@dataclass(slots=True)
class End:
    error: Error | None = None


@described_type(0x18, "amqp:close:list", error=_ERROR)
@dataclass(slots=True)
class Close:
    error: Error | None = None


@described_type(0x40, "amqp:sasl-mechanisms:list", sasl_server_mechanisms=SYMBOLS)
@dataclass(slots=True)
class SaslMechanisms:
    sasl_server_mechanisms: list[str]


@described_type(0x41, "amqp:sasl-init:list", mechanism=SYMBOL, initial_response=BINARY, hostname=STRING)
@dataclass(slots=True)
class SaslInit:
    mechanism: str
    initial_response: bytes | None = None
    hostname: str | None = None


@described_type(0x44, "amqp:sasl-outcome:list", code=UBYTE, additional_data=BINARY)
@dataclass(slots=True)
class SaslOutcome:
    code: int
    additional_data: bytes | None = None


ACCEPTED: Final = Accepted()
RELEASED: Final = Released()
