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
# As a parameter's name stands in JSON; within a text its quotes would be escaped
_CONSTRAINED = tuple(f'"{name}":' for name in CONSTRAINTS)


def work_key(context: bytes, params_json: str, tokens: bytes, occurrence: int = 0) -> bytes:
    """32 bytes: equal only for work with equal answers. `tokens` are little-endian int32.

    What is at its default is absent: from `context` and `params_json`, and the occurrence 0. An option that is added
    later then moves no key of work that does not use it. CONSTRAINT_RULES count for work under a constraint alone.
    Every part is preceded by its length, so that no two different works give the same bytes to hash.
    """
    parts = [context, params_json.encode(), tokens]
    if occurrence:
        parts.append(f"occurrence {occurrence}".encode())
    if any(name in params_json for name in _CONSTRAINED):
        parts.append(f"constraint rules {CONSTRAINT_RULES}".encode())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def token_bytes(ids: TokenIds) -> bytes:
    """Little-endian int32, as the token store keeps them."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()
