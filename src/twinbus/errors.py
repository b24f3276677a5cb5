"""The errors of Twinbus, in families by who acts next. What a condition on the wire becomes is decided elsewhere."""

from __future__ import annotations


class TwinbusError(Exception):
    """Everything Twinbus raises on purpose."""


class CallerError(TwinbusError):
    """The caller mends the call; repeated as it is, it fails again."""


class RetryError(TwinbusError):
    """Time mends it: the same call may succeed later."""


class OperatorError(TwinbusError):
    """A person has to mend something first. The text says what is wrong, the hint what to do about it."""

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.text}. {self.hint}" if self.hint else self.text
