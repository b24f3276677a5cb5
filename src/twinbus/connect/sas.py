"""Shared access signatures: how a token is signed and written. Whether one is believed is decided by the namespace."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final
from urllib.parse import quote

SCHEME: Final = "SharedAccessSignature"


def signature(key: str, encoded_resource: str, expires_at: str) -> str:
    """The key is used as text, never base64-decoded; resource and expiry exactly as they stand in the token."""
    signed = f"{encoded_resource}\n{expires_at}".encode()
    return base64.b64encode(hmac.digest(key.encode(), signed, hashlib.sha256)).decode()


def make_token(resource: str, key_name: str, key: str, expires_at: int) -> str:
    """A token for a resource such as `sb://host/entity` and all below it, until `expires_at` (epoch seconds)."""
    encoded = quote(resource, safe="")
    signed = quote(signature(key, encoded, str(expires_at)), safe="")
    return f"{SCHEME} sr={encoded}&sig={signed}&se={expires_at}&skn={quote(key_name, safe='')}"
