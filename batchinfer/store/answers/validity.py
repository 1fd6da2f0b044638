"""Whether an answer is valid. One that is not is what the next rung of a job's ladder (`on_invalid`) is for."""

from __future__ import annotations

from batchinfer.core.request import Completion
from batchinfer.store.outputs.tokens import TEXT_IS_KEPT

_CUT = ("length", "repetition")
_CODES, _REASONS = (", ".join(f"'{name}'" for name in names) for names in (TEXT_IS_KEPT, _CUT))
# As SQL says it of a row of the store
INVALID = (
    f"coalesce(error_code IN ({_CODES}) OR (error_code IS NULL AND finish_reason IN ({_REASONS})), false)"
)


def is_invalid(completion: Completion) -> bool:
    """Whether an answer was cut, ran in circles, or does not fit its constraint. Other errors are not the answer's:
    with other parameters they would be the same, or they may pass."""
    if completion.error is not None:
        return completion.error.code in TEXT_IS_KEPT
    return completion.finish_reason in _CUT
