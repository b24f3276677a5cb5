"""The table of errors: every condition has an error, and the error's family says who must act."""

import pytest

from twinbus.connect import errors
from twinbus.connect.errors import ERRORS, error_for, error_for_status, error_for_token
from twinbus.errors import CallerError, OperatorError, RetryError
from twinbus.values import Condition

FAMILIES = (CallerError, RetryError, OperatorError)


@pytest.mark.parametrize("condition", list(Condition))
def test_every_condition_has_an_error_of_exactly_one_family(condition: Condition) -> None:
    kind = ERRORS[condition]
    assert sum(issubclass(kind, family) for family in FAMILIES) == 1


def test_the_text_of_an_error_has_condition_description_and_entity() -> None:
    error = error_for(Condition.MESSAGE_LOCK_LOST, "gone", entity="orders")
    assert type(error) is errors.MessageLockLostError
    assert (error.condition, error.description, error.entity) == ("com.microsoft:message-lock-lost", "gone", "orders")
    assert str(error) == "com.microsoft:message-lock-lost: gone (entity orders)"


def test_an_unknown_condition_is_retryable() -> None:
    error = error_for("com.example:unknown", None)
    assert isinstance(error, RetryError)
    assert error.condition == "com.example:unknown"


def test_every_operator_error_has_a_hint() -> None:
    kinds = [kind for kind in ERRORS.values() if issubclass(kind, OperatorError)]
    assert kinds
    assert all(kind("text").hint in str(kind("text")) and kind("text").hint for kind in kinds)


def test_every_waiter_gets_its_own_copy_of_an_error() -> None:
    error = error_for(Condition.SERVER_BUSY, "busy")
    again = error.copy("orders", failed=["one"])
    assert again is not error
    assert (type(again), again.description, again.entity, again.failed) == (type(error), "busy", "orders", ("one",))


@pytest.mark.parametrize(
    ("status", "condition", "kind"),
    [
        (410, Condition.SESSION_LOCK_LOST, errors.SessionLockLostError),
        (410, None, errors.MessageLockLostError),
        (404, None, errors.MessagingEntityNotFoundError),
        (404, Condition.MESSAGE_NOT_FOUND, errors.MessageNotFoundError),
        (503, None, errors.ServiceBusServerBusyError),
        (599, None, errors.ServiceBusInternalError),
    ],
)
def test_a_refused_request_is_mapped_by_its_condition_or_else_its_status(
    status: int, condition: str | None, kind: type[errors.ServiceBusError]
) -> None:
    assert type(error_for_status(status, condition, None, "orders")) is kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, errors.ServiceBusAuthenticationError),
        (403, errors.ServiceBusAuthenticationError),
        (404, errors.MessagingEntityNotFoundError),
        (503, errors.ServiceBusServerBusyError),
    ],
)
def test_a_refused_token_is_the_credential_unless_the_entity_is_missing_or_the_service_busy(
    status: int, kind: type[errors.ServiceBusError]
) -> None:
    assert type(error_for_token(status, None, "orders")) is kind
