"""`$cbs`: a client puts tokens; a good one opens its audience, a bad one is refused with a text that helps."""

from __future__ import annotations

import logging

from twinbus.connect.sas import SCHEME
from twinbus.namespace.front.claims import Claims
from twinbus.namespace.front.requests import Reply, Request
from twinbus.namespace.front.sas import TokenFault, TokenRefusedError

_log = logging.getLogger(__name__)


def put_token(request: Request, claims: Claims, now: int) -> Reply:
    """Answer one put-token request."""
    audience, token = request.properties.get("name"), request.body
    if isinstance(token, bytes):
        token = token.decode("utf-8", "replace")
    if request.operation != "put-token" or not isinstance(audience, str) or not isinstance(token, str):
        return Reply(400, "A put-token request needs the property 'name' and a token as text in its body.")
    # By the text alone: Python's client gives a SAS token the type jwt.
    if not token.startswith(SCHEME):
        return Reply(401, "This namespace has no identity provider: it takes SAS tokens only.")
    try:
        refusal = claims.put(audience, token, now)
    except TokenRefusedError as refused:
        if refused.fault is TokenFault.FOREIGN_NAME:
            # Python's client leaves the text of the refusal out of its error.
            _log.warning("token refused: %s", refused.text)
            return Reply(401, refused.text, condition="amqp:unauthorized-access")
        return Reply(401, f"InvalidSignature: {refused.text}", condition="amqp:unauthorized-access")
    return Reply(202, "Accepted") if refusal is None else Reply.refused(refusal)
