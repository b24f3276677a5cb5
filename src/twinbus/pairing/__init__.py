"""Two Service Bus namespaces used as one: senders divert to the secondary while the primary cannot be reached.

    decide/   the decisions, without I/O: failover, rotation of backlog queues, send flow, watching the backlog
    sync/     the driver of `twinbus`: threads
    aio/      the driver of `twinbus.aio`: tasks
    the rest  what both drivers share

Other rooms use the names below. The first access to a name loads its module, so that `import twinbus` loads no SDK. If
both drivers define a name, the name of the asyncio driver has the prefix `Aio` or `aio_` here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twinbus.pairing.administration import (
        ALL_ENTITIES,
        Administration,
        AioAdministration,
        management_credential,
        management_failure,
        provision_state_queue,
        service_text,
    )
    from twinbus.pairing.aio.pair import Pair as AioPair
    from twinbus.pairing.aio.pair import PairSide as AioPairSide
    from twinbus.pairing.aio.pair import pair_connection_strings as aio_pair_connection_strings
    from twinbus.pairing.aio.pair import pair_namespaces as aio_pair_namespaces
    from twinbus.pairing.aio.sender import PairedSender as AioPairedSender
    from twinbus.pairing.aio.state_access import SharedState
    from twinbus.pairing.decide.failover import EntityMode
    from twinbus.pairing.decide.failover_events import (
        FailoverEngaged,
        FailoverHeld,
        FailoverTakenOver,
        PrimaryUnusable,
        Restored,
        TrialFailed,
        TrialPassed,
    )
    from twinbus.pairing.decide.known_state import EVERY_ENTITY, LONGEST_PATH, HoldRecord, KnownState, StateReading
    from twinbus.pairing.decide.rotation import QueueLeft, QueueReturned
    from twinbus.pairing.decide.send_flow import BacklogHandle
    from twinbus.pairing.drill import Drill, DrillMoment, run_drill
    from twinbus.pairing.errors import (
        BacklogUnavailableError,
        MessageTooLargeForBacklogError,
        PartialSendError,
        PrimaryUnusableError,
        ScheduledInBacklogError,
        TimeToLiveError,
    )
    from twinbus.pairing.events import (
        EVENTS,
        BacklogDrained,
        BacklogQueueGone,
        BacklogQueueUnsafe,
        BacklogUnattended,
        SecondaryUnreachable,
        SideClosed,
        SideFaulted,
        UnknownEventError,
    )
    from twinbus.pairing.findings import (
        CheckFailure,
        EntityProperties,
        Finding,
        LedgerFolderFacts,
        PrimaryFacts,
        QueueLook,
        SecondaryFacts,
        Severity,
        StateFacts,
        findings_of,
        overall,
    )
    from twinbus.pairing.inspection import (
        Depth,
        FoundQueue,
        Inspection,
        PingCheck,
        Visibility,
        check_pings,
        clean_extra,
        clock_of_refusal,
        clock_offset,
        entity_properties,
        inspect_backlog,
    )
    from twinbus.pairing.message_copies import PING_CONTENT_TYPE
    from twinbus.pairing.metrics import PING_SUCCEEDED
    from twinbus.pairing.options import CHOICES, RANGES, SendAvailabilityOptions
    from twinbus.pairing.pair_sides import (
        NotPairedError,
        PairClosedError,
        PairFaultedError,
        PairForkedError,
        PairingRefusedError,
        PairLoopError,
        SideState,
    )
    from twinbus.pairing.pair_state import EntityState, PairState, PairSyphon
    from twinbus.pairing.provisioning import Provisioned, ProvisioningError, provisioning_steps
    from twinbus.pairing.receivers import AioQuietReceiver, QuietReceiver
    from twinbus.pairing.recording import OperationRecorder
    from twinbus.pairing.state_sharing import IN_SECONDARY, StateLocation
    from twinbus.pairing.sync.pair import Pair, PairSide, pair_connection_strings, pair_namespaces
    from twinbus.pairing.sync.sender import PairedSender

__all__ = [
    "ALL_ENTITIES",
    "CHOICES",
    "EVENTS",
    "EVERY_ENTITY",
    "IN_SECONDARY",
    "LONGEST_PATH",
    "PING_CONTENT_TYPE",
    "PING_SUCCEEDED",
    "RANGES",
    "Administration",
    "AioAdministration",
    "AioPair",
    "AioPairSide",
    "AioPairedSender",
    "AioQuietReceiver",
    "BacklogDrained",
    "BacklogHandle",
    "BacklogQueueGone",
    "BacklogQueueUnsafe",
    "BacklogUnattended",
    "BacklogUnavailableError",
    "CheckFailure",
    "Depth",
    "Drill",
    "DrillMoment",
    "EntityMode",
    "EntityProperties",
    "EntityState",
    "FailoverEngaged",
    "FailoverHeld",
    "FailoverTakenOver",
    "Finding",
    "FoundQueue",
    "HoldRecord",
    "Inspection",
    "KnownState",
    "LedgerFolderFacts",
    "MessageTooLargeForBacklogError",
    "NotPairedError",
    "OperationRecorder",
    "Pair",
    "PairClosedError",
    "PairFaultedError",
    "PairForkedError",
    "PairLoopError",
    "PairSide",
    "PairState",
    "PairSyphon",
    "PairedSender",
    "PairingRefusedError",
    "PartialSendError",
    "PingCheck",
    "PrimaryFacts",
    "PrimaryUnusable",
    "PrimaryUnusableError",
    "Provisioned",
    "ProvisioningError",
    "QueueLeft",
    "QueueLook",
    "QueueReturned",
    "QuietReceiver",
    "Restored",
    "ScheduledInBacklogError",
    "SecondaryFacts",
    "SecondaryUnreachable",
    "SendAvailabilityOptions",
    "Severity",
    "SharedState",
    "SideClosed",
    "SideFaulted",
    "SideState",
    "StateFacts",
    "StateLocation",
    "StateReading",
    "TimeToLiveError",
    "TrialFailed",
    "TrialPassed",
    "UnknownEventError",
    "Visibility",
    "aio_pair_connection_strings",
    "aio_pair_namespaces",
    "check_pings",
    "clean_extra",
    "clock_of_refusal",
    "clock_offset",
    "entity_properties",
    "findings_of",
    "inspect_backlog",
    "management_credential",
    "management_failure",
    "overall",
    "pair_connection_strings",
    "pair_namespaces",
    "provision_state_queue",
    "provisioning_steps",
    "run_drill",
    "service_text",
]

# If a name is offered under another name, the offered name follows after a colon.
_NAMES_BY_MODULE: Final = {
    "administration": "ALL_ENTITIES Administration AioAdministration management_credential management_failure "
    "provision_state_queue service_text",
    "aio.pair": (
        "Pair:AioPair PairSide:AioPairSide pair_connection_strings:aio_pair_connection_strings "
        "pair_namespaces:aio_pair_namespaces"
    ),
    "aio.sender": "PairedSender:AioPairedSender",
    "aio.state_access": "SharedState",
    "decide.failover": "EntityMode",
    "decide.failover_events": (
        "FailoverEngaged FailoverHeld FailoverTakenOver PrimaryUnusable Restored TrialFailed TrialPassed"
    ),
    "decide.known_state": "EVERY_ENTITY HoldRecord KnownState LONGEST_PATH StateReading",
    "decide.rotation": "QueueLeft QueueReturned",
    "decide.send_flow": "BacklogHandle",
    "drill": "Drill DrillMoment run_drill",
    "errors": (
        "BacklogUnavailableError MessageTooLargeForBacklogError PartialSendError PrimaryUnusableError "
        "ScheduledInBacklogError TimeToLiveError"
    ),
    "events": (
        "EVENTS BacklogDrained BacklogQueueGone BacklogQueueUnsafe BacklogUnattended SecondaryUnreachable SideClosed "
        "SideFaulted UnknownEventError"
    ),
    "findings": (
        "CheckFailure EntityProperties Finding LedgerFolderFacts PrimaryFacts QueueLook SecondaryFacts Severity "
        "StateFacts findings_of overall"
    ),
    "inspection": (
        "Depth FoundQueue Inspection PingCheck Visibility check_pings clean_extra clock_of_refusal clock_offset "
        "entity_properties inspect_backlog"
    ),
    "message_copies": "PING_CONTENT_TYPE",
    "metrics": "PING_SUCCEEDED",
    "options": "CHOICES RANGES SendAvailabilityOptions",
    "pair_sides": (
        "NotPairedError PairClosedError PairFaultedError PairForkedError PairLoopError PairingRefusedError SideState"
    ),
    "pair_state": "EntityState PairState PairSyphon",
    "provisioning": "Provisioned ProvisioningError provisioning_steps",
    "receivers": "AioQuietReceiver QuietReceiver",
    "recording": "OperationRecorder",
    "state_sharing": "IN_SECONDARY StateLocation",
    "sync.pair": "Pair PairSide pair_connection_strings pair_namespaces",
    "sync.sender": "PairedSender",
}
_HOMES: Final = {
    offered or name: (module, name)
    for module, names in _NAMES_BY_MODULE.items()
    for name, _, offered in (entry.partition(":") for entry in names.split())
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _HOMES[name]
    return getattr(import_module(f"{__name__}.{module}"), original)
