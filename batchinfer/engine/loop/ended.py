"""A sequence that has ended leaves its completion and its sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchinfer.core.request import Completion, FinishReason, RowError, Tokens
from batchinfer.core.samples import RequestSample
from batchinfer.engine.loop.in_flight import End
from batchinfer.engine.schedule.scored_branches import RequestScores
from batchinfer.engine.schedule.sequence import Sequence

_NAN_LOGITS = RowError("nan_logits", "engine", "the model's logits are not finite numbers", retryable=True)


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
