"""Errors of the codec and the AMQP core. The error conditions are in `twinbus.values.Condition`."""

from collections.abc import Mapping

from twinbus.values import Condition


class AmqpError(Exception):
    """A violation of AMQP by the peer or by the caller. `condition` is the error condition from the standard."""

    def __init__(self, condition: str, description: str, info: Mapping[object, object] | None = None) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = str(condition)
        self.description = description
        self.info = info


class DecodeError(AmqpError):
    """The bytes are not valid AMQP (amqp:decode-error)."""

    def __init__(self, description: str) -> None:
        super().__init__(Condition.DECODE_ERROR, description)


class EncodeError(ValueError):
    """The caller's value cannot be encoded as the AMQP type that it should have."""
