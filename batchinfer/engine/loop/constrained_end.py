"""How an answer ends that follows a constraint, or for which no token was found."""

from __future__ import annotations

from collections.abc import Mapping

from batchinfer.core.request import ConstraintFailed, FinishReason, RowError
from batchinfer.engine.loop.in_flight import End
from batchinfer.engine.loop.narrowed import leaves_none
from batchinfer.engine.schedule.constraints import Constraint, ConstraintMasks
from batchinfer.engine.schedule.sequence import Sequence

_ENDED_BY: Mapping[FinishReason, str] = {
    "length": "max_tokens or the model's context ended",
    "repetition": "a loop (sampling.repetition_stop) ended",
    "stop": "a stop string or token ended",
}

_NONE_LEFT = RowError(
    "no_token_left", "policy", "allowed_token_ids and what is banned (min_tokens, bad_words) leave no token"
)
_NONE_LEFT_BY_CONSTRAINT = RowError(
    "no_token_left",
    "policy",
    "none of the tokens that the constraint allows next is left by allowed_token_ids and bad_words",
)


def without_token(sequence: Sequence, eos: frozenset[int], masks: ConstraintMasks | None) -> End:
    """Say how a sequence ends for which no token was found. `eos`: of the model; `masks`: those of constraints."""
    constraint = sequence.constraint
    if constraint is not None and constraint.failure is not None:
        return End("error", error=constraint.failure)
    if sequence.request.params.narrowed and leaves_none(sequence, eos, masks):
        return End("error", error=_NONE_LEFT if constraint is None else _NONE_LEFT_BY_CONSTRAINT)
    text = "the model's logits are not finite numbers"
    return End("error", error=RowError("nan_logits", "engine", text, retryable=True))


def constrained_end(
    constraint: Constraint, token: int, reason: FinishReason | None, kept: int | None
) -> End | None:
    """Say how a token ends an answer with a constraint: whole, or as an error."""
    try:
        constraint.take(token)
    except ConstraintFailed as failed:
        return End("error", error=failed.error)
    if constraint.ended and kept is None:
        return End("stop")
    if reason is None:
        return None
    if not constraint.needs_end:
        return End(reason, kept)
    text = f"{_ENDED_BY[reason]} the answer before it was complete under its constraint"
    return End("error", kept, RowError("incomplete_output", "policy", text), cut=reason == "length")
