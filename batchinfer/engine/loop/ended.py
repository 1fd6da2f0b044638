"""A sequence that has ended leaves its completion and its sample."""

from __future__ import annotations

import numpy as np

from batchinfer.core.request import Completion, RowError, Tokens
from batchinfer.core.samples import RequestSample
from batchinfer.engine.loop.in_flight import End
from batchinfer.engine.schedule.sequence import Sequence


def prompt_end(sequence: Sequence) -> End:
    """Say how a sequence ends that gets no tokens, once its prompt has run."""
    if sequence.pooling is None:
        return End("length")
    if sequence.vector is not None:
        return End("stop")
    text = "the model's hidden states are not finite numbers"
    return End("error", error=RowError("nan_vector", "engine", text, retryable=True))


def completion(sequence: Sequence, end: End) -> Completion:
    """Return what a sequence answers."""
    if sequence.pooling is not None:
        return Completion(sequence.request.key, sequence.vector, end.reason, end.error)
    ids = np.array(sequence.tokens[sequence.prompt_length :], np.int32)
    logprobs = sequence.logprobs.all() if sequence.logprobs is not None else None
    output = Tokens(ids, end.text_length, logprobs)
    return Completion(sequence.request.key, output, end.reason, end.error)


def request_sample(sequence: Sequence, end: End, now: float) -> RequestSample:
    """Return the measurements of a request that ends now."""
    ran = max(0, min(sequence.computed, len(sequence) - 1) - sequence.prompt_length)
    return RequestSample(
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
    )
