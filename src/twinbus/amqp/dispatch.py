"""Frames of a session to the handler of the session that answers them.

Transfer, disposition and flow have a way of their own because they come with every message.
"""

from typing import NamedTuple

from twinbus.amqp.performatives import Attach, Detach, Disposition, End, Flow, Transfer
from twinbus.amqp.session import Session
from twinbus.amqp.transfers import FlowFields, TransferFields, read_disposition, read_flow, read_transfer

SessionFrame = Attach | Flow | Transfer | Disposition | Detach | End

_FLOW, _TRANSFER, _DISPOSITION = 0x13, 0x14, 0x15


class Place(NamedTuple):
    """Where a frame body lies in the bytes that were read."""

    buf: bytes
    start: int
    payload: int
    end: int


def hand_over_quickly(session: Session, buf: bytes, pos: int, end: int) -> bool:
    """True if the body at `pos` was one of the three, written in the usual way."""
    code = buf[pos + 2]
    if code == _TRANSFER:
        session.on_transfer(read_transfer(buf, pos + 3, end), buf, end)
    elif code == _DISPOSITION:
        session.on_disposition(*read_disposition(buf, pos + 3, end))
    elif code == _FLOW:
        session.on_flow(read_flow(buf, pos + 3, end))
    else:
        return False
    return True


def hand_over(session: Session, performative: SessionFrame, place: Place) -> None:
    match performative:
        case Attach():
            session.on_attach(performative, place.end - place.start)
        case Detach():
            session.on_detach(performative)
        case End():
            session.on_end(performative)
        case Transfer() as t:
            fields = TransferFields(
                t.handle, t.delivery_id, t.delivery_tag, t.message_format, t.settled, t.more, t.state, t.resume,
                t.aborted, place.payload,
            )  # fmt: skip
            session.on_transfer(fields, place.buf, place.end)
        case Disposition() as d:
            session.on_disposition(d.role, d.first, d.first if d.last is None else d.last, d.settled, d.state)
        case Flow() as f:
            session.on_flow(
                FlowFields(
                    f.next_incoming_id, f.incoming_window, f.next_outgoing_id, f.outgoing_window, f.handle,
                    f.delivery_count, f.link_credit, f.available, f.drain, f.echo, f.properties,
                )
            )  # fmt: skip
