"""Everything done to the sections of an encoded message: finding, reading, splicing, composing.

A message stays the bytes it arrived as; nothing here knows links or queues.
"""

from twinbus.amqp.composing import batch_payload, message, with_sections
from twinbus.amqp.envelope import Envelope, read_envelope
from twinbus.amqp.layout import Header, Properties, Sections, batch_messages, split
from twinbus.amqp.splicing import (
    NO_ITEMS,
    Items,
    broker_annotations,
    delivered,
    delivered_under_lock,
    items,
    lock_token,
    with_message_id,
)

BATCH_FORMAT = 0x80013700  # message-format of a transfer whose data sections are messages

__all__ = [
    "BATCH_FORMAT",
    "NO_ITEMS",
    "Envelope",
    "Header",
    "Items",
    "Properties",
    "Sections",
    "batch_messages",
    "batch_payload",
    "broker_annotations",
    "delivered",
    "delivered_under_lock",
    "items",
    "lock_token",
    "message",
    "read_envelope",
    "split",
    "with_message_id",
    "with_sections",
]
