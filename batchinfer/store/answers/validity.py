"""Decides if an answer is valid. An invalid one leads to the next rung of the job's ladder (`on_invalid`)."""

from __future__ import annotations

from batchinfer.core.request import Completion
from batchinfer.store.outputs.tokens import TEXT_IS_KEPT

_CUT = ("length", "repetition")
_CODES, _REASONS = (", ".join(f"'{name}'" for name in names) for names in (TEXT_IS_KEPT, _CUT))
# The same condition as `is_invalid`, in SQL for rows of the store
INVALID = (
    f"coalesce(error_code IN ({_CODES}) OR (error_code IS NULL AND finish_reason IN ({_REASONS})), false)"
)


def is_invalid(completion: Completion) -> bool:
    """Return True if an answer was truncated, repeated itself, or does not match its constraint.

    Such a row gets another attempt if the job defines one. Other errors are not invalid answers.
    """
    if completion.error is not None:
        return completion.error.code in TEXT_IS_KEPT
    return completion.finish_reason in _CUT
