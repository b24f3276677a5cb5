"""Base classes of Twinbus's errors, in families by who acts next: the caller, time (retry), or the operator."""

from __future__ import annotations


class TwinbusError(Exception):
    """Base of all errors that Twinbus raises on purpose."""


class CallerError(TwinbusError):
    """The caller must change the call. The same call fails again."""


class RetryError(TwinbusError):
    """The same call may succeed later."""


class OperatorError(TwinbusError):
    """A person must change something first. `text` says what is wrong, `hint` what to do about it."""

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
