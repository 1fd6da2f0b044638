"""Computes work keys, which identify requests by everything that determines their answers."""

from __future__ import annotations

import hashlib

import numpy as np

from batchinfer.core.request import TokenIds
from batchinfer.core.sampling import CONSTRAINTS

# The version of generated_schema.py with its imports, and of grammar.py. Increase it with a change after which stored
# answers may not match their constraints, or not have the documented form. An update of llguidance does not need it:
# answers under the earlier version match their constraints, and remain valid
CONSTRAINT_RULES = 2
KEY_BYTES = 32
TOKEN_BYTES = 4
# The keys of constraints in JSON; within a JSON string the quotes would be escaped
_CONSTRAINED = tuple(f'"{name}":' for name in CONSTRAINTS)


class WorkKeys:
    """Computes the work keys of requests that have the same settings and sampling parameters.

    Args:
        context: The settings of the job that determine answers: model, dtype and so on.
        params_json: The sampling parameters as JSON, without values at their default.
    """

    def __init__(self, context: bytes, params_json: str) -> None:
        self._before = _part(context) + _part(params_json.encode())
        # An option that a request does not set stays out of its hash, so new options leave old keys unchanged
        constrained = any(name in params_json for name in _CONSTRAINED)
        self._behind = _part(f"constraint rules {CONSTRAINT_RULES}".encode()) if constrained else b""

    def key(self, tokens: bytes, occurrence: int = 0) -> bytes:
        """Return the 32-byte work key of a request. It identifies the answer in the store, so that it is computed once.

        Args:
            tokens: The prompt as little-endian int32.
            occurrence: The number of this answer among the answers to equal requests, such as samples of a row, from 0.
                Each gets its own key.
        """
        occurred = _part(f"occurrence {occurrence}".encode()) if occurrence else b""
        size = len(tokens).to_bytes(8, "little")
        return hashlib.sha256(b"".join((self._before, size, tokens, occurred, self._behind))).digest()


def work_key(context: bytes, params_json: str, tokens: bytes, occurrence: int = 0) -> bytes:
    """Return the 32-byte work key of one request.

    Args:
        context: The settings of the job that determine answers: model, dtype and so on.
        params_json: The sampling parameters as JSON, without defaults.
        tokens: The prompt as little-endian int32.
        occurrence: The number of this answer among the answers to equal requests, such as samples of a row, from 0.
    """
    return WorkKeys(context, params_json).key(tokens, occurrence)


def _part(data: bytes) -> bytes:
    # Each part is preceded by its length, so different requests never hash the same bytes
    return len(data).to_bytes(8, "little") + data


def token_bytes(ids: TokenIds) -> bytes:
    """Return token ids as little-endian int32, the format of stored tokens."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()
