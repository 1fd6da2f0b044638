"""How sequences end: reasons and errors, and the completion and sample of a finished request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from batchinfer.core.request import Completion, ConstraintFailed, FinishReason, RowError, Tokens
from batchinfer.core.samples import RequestSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.loop.in_flight import End
from batchinfer.engine.schedule.constraints import Constraint, ConstraintMasks
from batchinfer.engine.schedule.sampling_writer import banned_tokens
from batchinfer.engine.schedule.scored_branches import RequestScores
from batchinfer.engine.schedule.sequence import Sequence

TOKENS, SCORES, VECTORS = "tokens", "scores", "vectors"
_WORDS = 1 << 14  # 32-bit words of a mask: enough for 524,288 tokens, more than any vocabulary
_ENDED_BY: Mapping[FinishReason, str] = {
    "length": "max_tokens or the model's context ended",
    "repetition": "a loop (sampling.repetition_stop) ended",
    "stop": "a stop string or token ended",
}

_NONE_LEFT = RowError(
    "no_token_left", "policy", "allowed_token_ids, min_tokens and bad_words leave no token that may come next"
)
_NONE_LEFT_BY_CONSTRAINT = RowError(
    "no_token_left",
    "policy",
    "allowed_token_ids and bad_words exclude all tokens that the constraint allows next",
)
_NAN_LOGITS = RowError("nan_logits", "engine", "the model's logits are not finite numbers", retryable=True)


def output_kind(params: SamplingParams) -> str:
    """Return the kind of output that a request with given sampling parameters asks for.

    It is "tokens", "scores" (log-probabilities of given continuations), or, for example, "vectors (mean)" or "logits
    (cls)". The word in brackets says how hidden states are pooled.
    """
    if params.scored:
        return SCORES
    if params.pooling is None:
        return TOKENS
    return f"{'logits' if params.classified else VECTORS} ({params.pooling})"


def can_run_together(answers: Collection[str]) -> bool:
    """Return True if an engine can run requests for several kinds of output at the same time.

    It can if all requests have the same kind, or if they have tokens and one kind of vectors.

    Args:
        answers: The different kinds of output of the requests, as `output_kind` returns them.
    """
    others = [one for one in answers if one != TOKENS]
    return len(answers) == 1 or (len(others) == 1 and others[0].startswith(VECTORS))


def has_no_token_left(sequence: Sequence, eos: frozenset[int], masks: ConstraintMasks | None) -> bool:
    """Return True if the sampling parameters and the constraint of a sequence together exclude every token.

    Args:
        sequence: The sequence.
        eos: The end-of-sequence tokens of the model.
        masks: The token masks of constraints. None: no sequence has a constraint.
    """
    allowed: set[int] | None = set(sequence.request.params.allowed_token_ids) or None
    if sequence.mask is not None and masks is not None:
        unmasked = _unmasked(sequence.mask, masks)
        allowed = unmasked if allowed is None else allowed & unmasked
    length = sequence.known_length - sequence.prompt_length
    if allowed is None:
        return False
    return not allowed.difference(
        banned_tokens(sequence, eos, np.frombuffer(sequence.tokens, np.int32), length)
    )


def _unmasked(mask: int, masks: ConstraintMasks) -> set[int]:
    bits = np.full((1, _WORDS), -1, np.int32)
    masks.fill([mask], bits)
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return set(found)


def end_without_token(sequence: Sequence, eos: frozenset[int], masks: ConstraintMasks | None) -> End:
    """Return the error that ends a sequence for which a step sampled no token.

    The error says that the constraint failed, that no token is allowed, or that the logits are not finite.

    Args:
        sequence: The sequence.
        eos: The end-of-sequence tokens of the model.
        masks: The token masks of constraints. None: no sequence has a constraint.
    """
    constraint = sequence.constraint
    if constraint is not None and constraint.failure is not None:
        return End("error", error=constraint.failure)
    if sequence.request.params.forbids_tokens and has_no_token_left(sequence, eos, masks):
        return End("error", error=_NONE_LEFT if constraint is None else _NONE_LEFT_BY_CONSTRAINT)
    return End("error", error=_NAN_LOGITS)


def constrained_end(
    constraint: Constraint, token: int, reason: FinishReason | None, kept: int | None
) -> End | None:
    """Advance the constraint of an answer by a token, and return how the token ends the answer.

    Args:
        constraint: The constraint of the answer.
        token: The newest token.
        reason: Why the answer ends after this token for other reasons than the constraint, such as max_tokens. None:
            it does not end.
        kept: The number of characters of the text before a stop string, or None if there is no stop string.

    Returns:
        The end of the answer, or None if the answer continues. It is an error if the constraint forbids the token, or
        if the answer ends before the constraint is complete.
    """
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
    return End("error", kept, RowError("incomplete_output", "policy", text), truncated=reason == "length")


def prompt_end(sequence: Sequence) -> End:
    """Return how a sequence that generates no tokens ends after its prompt has run.

    The end is an error if the requested vector has values that are not finite.
    """
    if sequence.scored is not None:
        return End("stop")
    if sequence.pooling is None:
        return End("length")
    if sequence.vector is not None:
        return End("stop")
    text = "the model's hidden states are not finite numbers"
    return End("error", error=RowError("nan_vector", "engine", text, retryable=True))


def ends_request(sequence: Sequence, end: End) -> bool:
    """Record that a sequence has ended, and return True if its request is finished.

    A request that scores continuations may have several sequences and is finished when all have ended. Call the
    function once per sequence.

    Args:
        sequence: The sequence.
        end: How it ended.
    """
    return sequence.scored is None or sequence.scored.finish(end.error, sequence.cached_tokens)


def completion(sequence: Sequence, end: End) -> Completion:
    """Return the output of a finished request.

    Args:
        sequence: The sequence of the request. If the request has several, the one that ended last.
        end: How the sequence ended.
    """
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
    """Return the measurements of a request that ends now.

    Args:
        sequence: The sequence of the request. If the request has several, the one that ended last.
        end: How the sequence ended.
        now: The current time in seconds since the engine's start.
    """
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
        scored_positions=0 if sequence.prompt_scores is None else sequence.prompt_scores.scored,
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
