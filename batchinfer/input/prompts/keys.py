"""Work keys identify requests by everything that can change their answers."""

from __future__ import annotations

import hashlib

import numpy as np

from batchinfer.core.request import TokenIds
from batchinfer.core.sampling import CONSTRAINTS

# The version of how constraints are read: generated_schema.py and what it imports, and grammar.py. Raise it with a
# change after which an answer that was stored before may not follow its constraint, or not be what the documentation
# says. A release of llguidance alone is no such change: answers that it let through follow the constraint, and stay.
CONSTRAINT_RULES = 2
KEY_BYTES = 32
TOKEN_BYTES = 4
# As a parameter's name stands in JSON; within a text its quotes would be escaped
_CONSTRAINED = tuple(f'"{name}":' for name in CONSTRAINTS)


class WorkKeys:
    """The keys of work with the same context and parameters.

    What is at its default is absent: from `context` and `params_json`, and the occurrence 0. An option that is added
    later then moves no key of work that does not use it. CONSTRAINT_RULES count for work under a constraint alone.
    Every part is preceded by its length, so that no two different works give the same bytes to hash.
    """

    def __init__(self, context: bytes, params_json: str) -> None:
        self._before = _part(context) + _part(params_json.encode())
        constrained = any(name in params_json for name in _CONSTRAINED)
        self._behind = _part(f"constraint rules {CONSTRAINT_RULES}".encode()) if constrained else b""

    def key(self, tokens: bytes, occurrence: int = 0) -> bytes:
        """32 bytes: equal only for work with equal answers. `tokens` are little-endian int32."""
        occurred = _part(f"occurrence {occurrence}".encode()) if occurrence else b""
        size = len(tokens).to_bytes(8, "little")
        return hashlib.sha256(b"".join((self._before, size, tokens, occurred, self._behind))).digest()


def work_key(context: bytes, params_json: str, tokens: bytes, occurrence: int = 0) -> bytes:
    """The key of one piece of work, as WorkKeys makes it."""
    return WorkKeys(context, params_json).key(tokens, occurrence)


def _part(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def token_bytes(ids: TokenIds) -> bytes:
    """Little-endian int32, as the token store keeps them."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()
