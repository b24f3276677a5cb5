"""The message format and the queues of the backlog, and the kinds of failure. Pairs and syphons share all of them.

    queue_paths        the paths of the backlog queues, and normalized namespace endpoints
    message_format     how the properties of a diverted message become aliases, and how they are restored
    body_compression   compression of a body that would be too large for the backlog
    batch_split        which messages share a batch
    failures           the kind of failure of an exception, whether it counts towards failover, who must act

The modules are pure: they use no I/O, no clock and no SDK.
"""

from __future__ import annotations

from twinbus.backlog.batch_split import BATCH_ENVELOPE_BYTES, LONG_SECTION_BYTES, split_batch
from twinbus.backlog.body_compression import DEFLATE, compress_body, decompress_body
from twinbus.backlog.failures import (
    CALLER_FAILURES,
    COUNTING_FAILURES,
    CREDENTIAL_REFUSED,
    EVICTING_FAILURES,
    FAILURE_RULES,
    REFUSED_FAILURES,
    UNUSABLE_FAILURES,
    FailureEvidence,
    FailureKind,
    classify,
    counting_kinds,
    evidence_of,
    failure_kind,
    was_refused,
)
from twinbus.backlog.message_format import (
    COMPRESSION_PROPERTY,
    PATH_PROPERTY,
    RESERVED_PROPERTIES,
    SCHEDULED_TIME_PROPERTY,
    SESSION_ID_PROPERTY,
    TIME_TO_LIVE_PROPERTY,
    AliasError,
    AliasInUseError,
    MessageFields,
    RestoredMessage,
    divert,
    restore,
)
from twinbus.backlog.queue_paths import (
    PRIMARY_NAME_PATTERN,
    STATE_SEGMENT,
    TRANSFER_SEGMENT,
    Endpoint,
    backlog_queue_index,
    backlog_queue_path,
    backlog_queue_paths,
    extra_backlog_queues,
    primary_name,
    state_queue_path,
)

__all__ = [
    "BATCH_ENVELOPE_BYTES",
    "CALLER_FAILURES",
    "COMPRESSION_PROPERTY",
    "COUNTING_FAILURES",
    "CREDENTIAL_REFUSED",
    "DEFLATE",
    "EVICTING_FAILURES",
    "FAILURE_RULES",
    "LONG_SECTION_BYTES",
    "PATH_PROPERTY",
    "PRIMARY_NAME_PATTERN",
    "REFUSED_FAILURES",
    "RESERVED_PROPERTIES",
    "SCHEDULED_TIME_PROPERTY",
    "SESSION_ID_PROPERTY",
    "STATE_SEGMENT",
    "TIME_TO_LIVE_PROPERTY",
    "TRANSFER_SEGMENT",
    "UNUSABLE_FAILURES",
    "AliasError",
    "AliasInUseError",
    "Endpoint",
    "FailureEvidence",
    "FailureKind",
    "MessageFields",
    "RestoredMessage",
    "backlog_queue_index",
    "backlog_queue_path",
    "backlog_queue_paths",
    "classify",
    "compress_body",
    "counting_kinds",
    "decompress_body",
    "divert",
    "evidence_of",
    "extra_backlog_queues",
    "failure_kind",
    "primary_name",
    "restore",
    "split_batch",
    "state_queue_path",
    "was_refused",
]
