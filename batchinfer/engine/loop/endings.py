"""The answer that a request asks for, how its sequence ends, and the completion and sample that it leaves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from batchinfer.core.request import Completion, ConstraintFailed, FinishReason, RowError, Tokens
from batchinfer.core.samples import RequestSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.loop.in_flight import End
from batchinfer.engine.schedule.constraints import Constraint, ConstraintMasks
from batchinfer.engine.schedule.sampling_writer import bans_of
from batchinfer.engine.schedule.scored_branches import RequestScores
from batchinfer.engine.schedule.sequence import Sequence

TOKENS, SCORES, VECTORS = "tokens", "scores", "vectors"
_WORDS = 1 << 14  # of a mask: 524,288 tokens, more than models have
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
_NAN_LOGITS = RowError("nan_logits", "engine", "the model's logits are not finite numbers", retryable=True)


def answer_of(params: SamplingParams) -> str:
    """Say what a request with these parameters asks for."""
    if params.scored:
        return SCORES
    if params.pooling is None:
        return TOKENS
    return f"{'logits' if params.classified else VECTORS} ({params.pooling})"


def go_together(answers: Collection[str]) -> bool:
    """Say whether requests for all of these may be unfinished at once: a step makes vectors in one way only."""
    others = [one for one in answers if one != TOKENS]
    return len(answers) == 1 or (len(others) == 1 and others[0].startswith(VECTORS))


def leaves_none(sequence: Sequence, eos: frozenset[int], masks: ConstraintMasks | None) -> bool:
    """Whether there is no token that a sequence may get next. `eos`: of the model; `masks`: those of constraints."""
    allowed: set[int] | None = set(sequence.request.params.allowed_token_ids) or None
    if sequence.mask is not None and masks is not None:
        followed = _unmasked(sequence.mask, masks)
        allowed = followed if allowed is None else allowed & followed
    said = sequence.known_length - sequence.prompt_length
    if allowed is None:
        return False
    return not allowed.difference(bans_of(sequence, eos, np.frombuffer(sequence.tokens, np.int32), said))


def _unmasked(mask: int, masks: ConstraintMasks) -> set[int]:
    bits = np.full((1, _WORDS), -1, np.int32)
    masks.fill([mask], bits)
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return set(found)


def without_token(sequence: Sequence, eos: frozenset[int], masks: ConstraintMasks | None) -> End:
    """Say how a sequence ends for which no token was found. `eos`: of the model; `masks`: those of constraints."""
    constraint = sequence.constraint
    if constraint is not None and constraint.failure is not None:
        return End("error", error=constraint.failure)
    if sequence.request.params.narrowed and leaves_none(sequence, eos, masks):
        return End("error", error=_NONE_LEFT if constraint is None else _NONE_LEFT_BY_CONSTRAINT)
    return End("error", error=_NAN_LOGITS)


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


def prompt_end(sequence: Sequence) -> End:
    """Say how a sequence ends that gets no tokens, once its prompt has run."""
    if sequence.scored is not None:
        return End("stop")
    if sequence.pooling is None:
        return End("length")
    if sequence.vector is not None:
        return End("stop")
    text = "the model's hidden states are not finite numbers"
    return End("error", error=RowError("nan_vector", "engine", text, retryable=True))


def ends_request(sequence: Sequence, end: End) -> bool:
    """Whether a request is done with this end of a sequence: scored ones may have several, one for each branch. To be
    asked once of each sequence."""
    return sequence.scored is None or sequence.scored.ended(end.error, sequence.cached_tokens)


def completion(sequence: Sequence, end: End) -> Completion:
    """Return what a sequence answers, or all sequences of a request of which it is the last."""
    if sequence.scored is not None:
        return _scored(sequence.scored.scores)
    if sequence.pooling is not None:
        return Completion(sequence.request.key, sequence.vector, end.reason, end.error)
    ids = np.array(sequence.tokens[sequence.prompt_length :], np.int32)
    logprobs = sequence.logprobs.all() if sequence.logprobs is not None else None
    output = Tokens(ids, end.text_length, logprobs)
    if sequence.prompt_scores is None or end.error is not None:
        return Completion(sequence.request.key, output, end.reason, end.error)
    prompt = sequence.prompt_scores.output
    if prompt is None:
        return Completion(sequence.request.key, None, "error", _NAN_LOGITS)
    return Completion(sequence.request.key, replace(output, prompt=prompt), end.reason, None)


def _scored(scores: RequestScores) -> Completion:
    error, output = scores.error, scores.output
    if error is None and output is None:
        error = _NAN_LOGITS
    reason: FinishReason = "stop" if error is None else "error"
    return Completion(scores.request.key, output, reason, error)


def request_sample(sequence: Sequence, end: End, now: float) -> RequestSample:
    """Return the measurements of a request that ends now. Of one that had several sequences these are the tokens of its
    context and of the trie of its continuations, and what the first sequence found in the cache."""
    ran = max(0, min(sequence.computed, len(sequence) - 1) - sequence.prompt_length)
    sample = RequestSample(
        key=sequence.request.key,
        prompt_tokens=sequence.prompt_length,
        completion_tokens=sequence.output_length,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
        queued_s=sequence.queued_s,
        scheduled_s=sequence.scheduled_s if sequence.scheduled_s is not None else now,
        first_token_s=sequence.first_token_s if sequence.first_token_s is not None else now,
        finished_s=now,
        constrained=sequence.request.params.constraint is not None,
        steered=sequence.masking.ever_steered,
        forced_tokens=sequence.jump_forward_tokens,
        unrun_tokens=sequence.output_length - ran,
        cut=end.for_length,
        scored_positions=0 if sequence.prompt_scores is None else sequence.prompt_scores.taken,
    )
    if sequence.scored is None:
        return sample
    scores = sequence.scored.scores
    return replace(
        sample,
        prompt_tokens=scores.tokens,
        cached_tokens=scores.cached_tokens,
        scored_positions=scores.positions,
    )
