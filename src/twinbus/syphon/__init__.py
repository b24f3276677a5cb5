"""Moves messages from the backlog queues to the entities that the messages were meant for (Y).

Other packages of Twinbus use only the names below. The first access to a name loads the module of that name: a process
that uses only the native transport never loads azure-servicebus, and a pair without a syphon never loads `pump`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twinbus.syphon.audit import (
        BACKLOG_LOCK,
        LISTED_WORDS,
        Audit,
        AuditedQueues,
        AuditResult,
        AuditSummary,
        ListedMessages,
        WritersHere,
        find_audited_queues,
        primaries_of,
        record_audit,
    )
    from twinbus.syphon.context import EmptiedListener, MoveStep, StepListener, SyphonContext, SyphonOptions
    from twinbus.syphon.credentials import NamespaceAccess
    from twinbus.syphon.dead_letters import DeadLetter, DeadLetterCensus, DeadLetters, NotResubmittedError
    from twinbus.syphon.discovery import (
        Discovery,
        ListedDiscovery,
        ListedOrSearchedDiscovery,
        RemainingMessages,
        SearchedDiscovery,
    )
    from twinbus.syphon.dry_run import DestinationBacklog, DryRunResult, count_backlog
    from twinbus.syphon.embedded import AioPairSyphon, ThreadPairSyphon
    from twinbus.syphon.left_messages import LeftMessages, QueueCounts, left_by_destination
    from twinbus.syphon.native_transport import NativeTransport
    from twinbus.syphon.plan import (
        SCAN_INTERVAL,
        DestinationMemory,
        DestinationStatus,
        DrainEnd,
        HeldEntities,
        QueueSearches,
        Readiness,
        RetryPolicy,
        WaitingDestination,
        destination_key,
    )
    from twinbus.syphon.progress import MessageCounts, Progress, ProgressCounter, messages_that_can_move
    from twinbus.syphon.pump import Pump
    from twinbus.syphon.sdk_transport import SdkTransport
    from twinbus.syphon.shared_holds import SharedHolds
    from twinbus.syphon.syphon import SecondaryAwayError, Syphon, SyphonBrokenError, SyphonState
    from twinbus.syphon.syphon_ledger import NOT_TRIED, SyphonLedger
    from twinbus.syphon.translation import destination_of
    from twinbus.syphon.transport import PEEK_PAGE_SIZE, BacklogFailedError, HeldMessage, TimeToLive, Transport

__all__ = [
    "BACKLOG_LOCK",
    "LISTED_WORDS",
    "NOT_TRIED",
    "PEEK_PAGE_SIZE",
    "SCAN_INTERVAL",
    "AioPairSyphon",
    "Audit",
    "AuditResult",
    "AuditSummary",
    "AuditedQueues",
    "BacklogFailedError",
    "DeadLetter",
    "DeadLetterCensus",
    "DeadLetters",
    "DestinationBacklog",
    "DestinationMemory",
    "DestinationStatus",
    "Discovery",
    "DrainEnd",
    "DryRunResult",
    "EmptiedListener",
    "HeldEntities",
    "HeldMessage",
    "LeftMessages",
    "ListedDiscovery",
    "ListedMessages",
    "ListedOrSearchedDiscovery",
    "MessageCounts",
    "MoveStep",
    "NamespaceAccess",
    "NativeTransport",
    "NotResubmittedError",
    "Progress",
    "ProgressCounter",
    "Pump",
    "QueueCounts",
    "QueueSearches",
    "Readiness",
    "RemainingMessages",
    "RetryPolicy",
    "SdkTransport",
    "SearchedDiscovery",
    "SecondaryAwayError",
    "SharedHolds",
    "StepListener",
    "Syphon",
    "SyphonBrokenError",
    "SyphonContext",
    "SyphonLedger",
    "SyphonOptions",
    "SyphonState",
    "ThreadPairSyphon",
    "TimeToLive",
    "Transport",
    "WaitingDestination",
    "WritersHere",
    "count_backlog",
    "destination_key",
    "destination_of",
    "find_audited_queues",
    "left_by_destination",
    "messages_that_can_move",
    "primaries_of",
    "record_audit",
]

_NAMES_BY_MODULE: Final = {
    "audit": "BACKLOG_LOCK LISTED_WORDS Audit AuditResult AuditSummary AuditedQueues "
    "ListedMessages WritersHere find_audited_queues primaries_of record_audit",
    "context": "EmptiedListener MoveStep StepListener SyphonContext SyphonOptions",
    "credentials": "NamespaceAccess",
    "dead_letters": "DeadLetter DeadLetterCensus DeadLetters NotResubmittedError",
    "discovery": "Discovery ListedDiscovery ListedOrSearchedDiscovery RemainingMessages SearchedDiscovery",
    "dry_run": "DestinationBacklog DryRunResult count_backlog",
    "embedded": "AioPairSyphon ThreadPairSyphon",
    "left_messages": "LeftMessages QueueCounts left_by_destination",
    "native_transport": "NativeTransport",
    "plan": "DestinationMemory DestinationStatus DrainEnd HeldEntities QueueSearches Readiness RetryPolicy "
    "SCAN_INTERVAL WaitingDestination destination_key",
    "progress": "MessageCounts Progress ProgressCounter messages_that_can_move",
    "pump": "Pump",
    "sdk_transport": "SdkTransport",
    "shared_holds": "SharedHolds",
    "syphon": "SecondaryAwayError Syphon SyphonBrokenError SyphonState",
    "syphon_ledger": "NOT_TRIED SyphonLedger",
    "translation": "destination_of",
    "transport": "PEEK_PAGE_SIZE BacklogFailedError HeldMessage TimeToLive Transport",
}
_MODULES: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

if not TYPE_CHECKING:  # if a type checker saw this function, it would accept every name from this package

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
