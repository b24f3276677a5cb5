"""The client's side of transactions: what a peer sends to a coordinator, and how it reads the answer."""

from twinbus.amqp import DeliveryState
from twinbus.amqp.transactions import COORDINATOR, DECLARE, DECLARED, DISCHARGE
from twinbus.values import Described, ULong


def coordinator() -> Described:
    return Described(ULong(COORDINATOR), [])


def declare() -> Described:
    return Described(ULong(DECLARE), [])


def discharge(transaction: bytes, *, fail: bool) -> Described:
    return Described(ULong(DISCHARGE), [transaction, fail])


def transaction_of(state: DeliveryState | None) -> bytes | None:
    """Return the transaction that a coordinator's answer declares; None for any other answer."""
    if not isinstance(state, Described) or state.descriptor != DECLARED or not isinstance(state.value, list):
        return None
    found = state.value[0] if len(state.value) == 1 else None
    return found if type(found) is bytes else None
