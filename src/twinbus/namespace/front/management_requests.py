"""The `$management` node of a connection: checks a request, and passes it to the engine as an event.

`management_operations` defines the operations. The steps for a request, in this order: apply a fault that hits the
request; wait if too many requests run whose replies carry messages; check the claim, the entity and the session lock;
pass the event to the engine.
"""

from __future__ import annotations

from dataclasses import replace

from twinbus.namespace.engine.effects import Refusal, session_lock_lost
from twinbus.namespace.engine.registry import Entity
from twinbus.namespace.engine.topic import Topic
from twinbus.namespace.faults import Fault, FaultPoint
from twinbus.namespace.front import refusals
from twinbus.namespace.front.context import LinkContext
from twinbus.namespace.front.fault_effects import FaultableOperation
from twinbus.namespace.front.management_operations import reads_messages, translate
from twinbus.namespace.front.outgoing_link import OutgoingLink
from twinbus.namespace.front.request_response import NodeReply, NodeRequest


class ManagementNode:
    """Handles the `$management` requests of one connection."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context

    def handle(self, request: NodeRequest) -> None:
        """Carry out a request, and answer it."""
        fault = self._context.faults.trigger(FaultPoint.REQUEST, request.address.entity, request.link.name)
        if fault is not None:
            self._apply_fault(fault, request)
        elif reads_messages(request):
            self._context.replies.reads.submit(request, self._carry_out)
        else:
            self._carry_out(request)

    def _apply_fault(self, fault: Fault, request: NodeRequest) -> None:
        operation = FaultableOperation(
            proceed=lambda: self._carry_out(request),
            refuse=lambda refusal: request.answer(NodeReply.refused(refusal)),
            detach=lambda refusal: self._context.links.detach(request.link, refusal),
            proceed_without_answer=lambda call: self._carry_out(replace(request, answer=lambda _: call())),
        )
        self._context.faults.apply(fault, operation)

    def _carry_out(self, request: NodeRequest) -> None:
        name, runtime = request.address.entity, self._context.runtime
        call = translate(request)
        if isinstance(call, Refusal):
            request.answer(NodeReply.refused(call))
        elif not self._context.claims.allow(call.claim, request.address.path, runtime.now()):
            request.answer(NodeReply.refused(refusals.unauthorized(call.claim, name)))
        elif (entity := runtime.namespace.find(name)) is None:
            request.answer(NodeReply.refused(refusals.not_found(name)))
        elif call.session is not None and not self._holds_session(entity, call.session):
            request.answer(NodeReply.refused(session_lock_lost(call.session)))
        else:
            respond, delivers = call.respond, call.delivers

            def answered(result: object) -> None:
                reply = NodeReply.refused(result) if isinstance(result, Refusal) else respond(result)
                if delivers is not None:
                    runtime.count_units(entity, delivers, reply.more_units)
                request.answer(reply)

            runtime.submit(entity, call.event(answered))

    def _holds_session(self, entity: Entity, session: str) -> bool:
        """Return whether a link of this connection holds the session.

        Returns True for an entity without sessions: the engine refuses the event in that case.
        """
        if isinstance(entity, Topic) or not entity.description.requires_session:
            return True
        return any(
            isinstance(attached, OutgoingLink) and attached.entity is entity and attached.session == session
            for attached in self._context.links.values()
        )
