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


class OptionError(CallerError, ValueError):
    """An option is out of range, of a wrong type, or unknown (P2)."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}; it must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed
