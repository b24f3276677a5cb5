"""Base classes of Twinbus's errors, in three families: the caller changes the call, retry, the operator acts."""

from __future__ import annotations


class TwinbusError(Exception):
    """Base class of all errors that Twinbus itself defines and raises.

    Example: `except TwinbusError as error: log.error("%s", error)`.
    """


class CallerError(TwinbusError):
    """The caller must change the call. The same call would fail again.

    Example: `except CallerError: raise` — repeating the call would not help.
    """


class RetryError(TwinbusError):
    """The call failed for a temporary reason. If the caller repeats it, the same call may succeed.

    Example: `except RetryError: keep(message)` — and send it again later.
    """


class OperatorError(TwinbusError):
    """A person must change the configuration or the service first. `text` names the problem, `hint` the remedy.

    Example: `except OperatorError as error: print(error.text, error.hint)`.
    """

    def __init__(self, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.text}. {self.hint}" if self.hint else self.text


class OptionError(CallerError, ValueError):
    """An option is out of range, of a wrong type, or unknown.

    Example: `except OptionError as error: print(error.option, error.value, error.allowed)`.
    """

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} is {value!r}; it must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed
