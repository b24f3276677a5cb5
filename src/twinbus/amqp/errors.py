"""The error conditions of AMQP 1.0 and of Service Bus, and the error that carries one.

Which condition belongs to which violation is decided where the violation is found; what a client makes of a
condition is decided by the client.
"""

from collections.abc import Mapping

from twinbus.values import Condition


class AmqpError(Exception):
    """Something the peer, or the caller, did that AMQP has a condition for."""

    def __init__(self, condition: str, description: str, info: Mapping[object, object] | None = None) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = str(condition)
        self.description = description
        self.info = info


class DecodeError(AmqpError):
    """The bytes are not AMQP (§2.8.15, amqp:decode-error)."""

    def __init__(self, description: str) -> None:
        super().__init__(Condition.DECODE_ERROR, description)


class EncodeError(ValueError):
    """The value cannot be written as the AMQP type it claims to be: the caller's fault."""
