"""Decoded frames of a session to the handler of the session that answers them."""

from typing import NamedTuple

from twinbus.amqp.performatives import Attach, Detach, Disposition, End, Flow, Transfer
from twinbus.amqp.session import Session
from twinbus.amqp.transfers import Extras, FlowFields

SessionFrame = Attach | Flow | Transfer | Disposition | Detach | End


class Place(NamedTuple):
    """Where a frame body lies in the bytes that were read."""

    buf: bytes
    start: int
    payload: int
    end: int


def hand_over(session: Session, performative: SessionFrame, place: Place) -> None:
    match performative:
        case Attach():
            session.on_attach(performative)
        case Detach():
            session.on_detach(performative)
        case End():
            session.on_end(performative)
        case Transfer() as t:
            extras = Extras(t.state, t.resume, t.aborted)
            fields = (t.handle, t.delivery_id, t.delivery_tag, t.message_format, t.settled, t.more, extras)
            session.on_transfer((*fields, place.payload), place.buf, place.end)
        case Disposition() as d:
            session.on_disposition(d.role, d.first, d.first if d.last is None else d.last, d.settled, d.state)
        case Flow() as f:
            session.on_flow(
                FlowFields(
                    f.next_incoming_id, f.incoming_window, f.next_outgoing_id, f.outgoing_window, f.handle,
                    f.delivery_count, f.link_credit, f.available, f.drain, f.echo, f.properties,
                )
            )  # fmt: skip
