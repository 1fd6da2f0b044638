"""Measurements of the engine: one sample per request and per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from batchinfer.core.request import Pickled

# How the host launches a step on a GPU, in ascending order of host work: one CUDA graph; CUDA graphs of the pieces
# between attention layers; operator by operator
LaunchMode = Literal["full_graph", "piecewise_graph", "eager"]
LAUNCH_MODES: tuple[LaunchMode, ...] = ("full_graph", "piecewise_graph", "eager")
# Draft sources: the row's own prompt and answer; other answers of the job; the row's answer in the previous result; a
# draft model; draft heads
DraftSourceName = Literal["prompt", "answers", "earlier", "model", "heads"]
ExpertTokens = Mapping[int, list[int]]  # layer → tokens routed to each of its experts


@dataclass(slots=True)
class ConstraintWork:
    """The seconds that an engine has spent on constraints so far.

    Args:
        compile_s: Seconds of compiling constraints.
        mask_s: Seconds of filling token masks, the tokens that constraints allow next.
    """

    compile_s: float = 0.0
    mask_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestSample:
    """The times and token counts of one request in an engine, for reports. They are never part of results.

    Times are seconds since the start of the engine.

    Args:
        key: The work key of the request.
        prompt_tokens: Number of tokens of the prompt.
        completion_tokens: Number of generated tokens.
        cached_tokens: Number of prompt tokens that were taken from the prefix cache.
        preemptions: Number of times the request was preempted.
        queued_s: When the engine received the request.
        scheduled_s: When the request's first step began.
        first_token_s: When the step ended that sampled the request's first token.
        finished_s: When the request's last token was sampled.
        constrained: True if the request has a constraint.
        steered: True if the constraint forbade the most likely token at least once.
        forced_tokens: Number of tokens that were not sampled because the constraint allowed only one.
        unrun_tokens: Number of tokens at the end of the answer that the model never ran as input.
        cut: True if max_tokens or the model's context ended the answer.
        scored_positions: Number of prompt positions whose logits score the following tokens.
    """

    key: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    preemptions: int
    queued_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    constrained: bool = False
    steered: bool = False
    forced_tokens: int = 0
    unrun_tokens: int = 1
    cut: bool = False
    scored_positions: int = 0

    def __reduce__(self) -> Pickled:
        # Several times faster than the default, and processes exchange millions of samples
        return RequestSample, _SAMPLED(self)


_SAMPLED = attrgetter(*(field.name for field in fields(RequestSample)))


@dataclass(frozen=True, slots=True)
class StepSample:
    """The token counts of one engine step, its times, and its FLOPs and bytes by the operators' cost models.

    Args:
        step: The number of the step.
        started_s: When the step started, in seconds since the start of the engine.
        duration_s: Seconds from start to end of the step.
        model_s: The part of duration_s in the model and the sampler.
        prefill_tokens: Number of prompt tokens and recomputed tokens.
        decode_tokens: Number of generated tokens that were run for the first time.
        recomputed_tokens: The part of prefill_tokens that had been run before a preemption.
        cached_tokens: Number of prompt tokens that were not run because they were in the prefix cache.
        sampled_tokens: Number of sampled tokens, scored positions included.
        padded_tokens: Number of wasted query positions: padding, rows that had ended, rejected drafts.
        running: Number of running sequences after scheduling.
        waiting: Number of waiting requests after scheduling.
        preemptions: Number of sequences that the step preempted.
        blocks_used: Number of used blocks of the KV cache.
        blocks_total: Number of all blocks of the KV cache.
        flops: Useful FLOPs, without padding and recomputation.
        bytes: Bytes that must be read or written.
        roofline_s: The sum over operators of max(flops / peak, bytes / bandwidth). None: the peaks are unknown.
        forced_tokens: Number of tokens that were appended after the step because constraints allowed only one token.
        mask_s: Seconds of filling token masks, the tokens that constraints allow next.
        compile_s: Seconds of compiling constraints since the previous step.
        scheduled_s: When scheduling of the step began, in seconds since the start of the engine. It is before started_s
            if steps overlap.
        pairs: Number of useful (query, key) pairs of attention, summed over layers.
        kv_tokens: Number of distinct cached tokens that were read, summed over layers.
        copied_tokens: The part of cached_tokens that was copied from partial blocks.
        metering_s: Seconds of computing this sample.
        launch: How the host launched the step on a GPU. None on a CPU.
        capture_s: Seconds of capturing CUDA graphs for the step. None on a CPU.
        graph_bytes: GPU memory of the CUDA graphs, in bytes. None on a CPU.
        drafted_tokens: Number of verified draft tokens.
        accepted_tokens: Number of accepted draft tokens, a part of sampled_tokens.
        prompt_drafted: Number of verified draft tokens from the draft source "prompt".
        prompt_accepted: Number of accepted draft tokens from the draft source "prompt".
        answers_drafted: Number of verified draft tokens from the draft source "answers".
        answers_accepted: Number of accepted draft tokens from the draft source "answers".
        earlier_drafted: Number of verified draft tokens from the draft source "earlier".
        earlier_accepted: Number of accepted draft tokens from the draft source "earlier".
        model_drafted: Number of verified draft tokens from the draft source "model".
        model_accepted: Number of accepted draft tokens from the draft source "model".
        heads_drafted: Number of verified draft tokens from the draft source "heads".
        heads_accepted: Number of accepted draft tokens from the draft source "heads".
        proposing_s: The part of duration_s in the draft model or draft heads.
        drafts_saved_s: Estimated time of the same tokens without drafts, minus the step's time. None: unknown.
        collective_s: The part of model_s in collectives of the leading rank, waiting for other ranks included. None:
            there are none, or they are not timed, as on a GPU.
        launched_steps: Number of steps that the host launched together, this one included.
        scored_positions: The part of sampled_tokens that are positions whose logits score given tokens.
    """

    step: int
    started_s: float
    duration_s: float
    model_s: float
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    cached_tokens: int
    sampled_tokens: int
    padded_tokens: int
    running: int
    waiting: int
    preemptions: int
    blocks_used: int
    blocks_total: int
    flops: int
    bytes: int
    roofline_s: float | None
    forced_tokens: int = 0
    mask_s: float = 0.0
    compile_s: float = 0.0
    scheduled_s: float = 0.0
    pairs: int = 0
    kv_tokens: int = 0
    copied_tokens: int = 0
    metering_s: float = 0.0
    launch: LaunchMode | None = None
    capture_s: float | None = None
    graph_bytes: int | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_drafted: int = 0
    prompt_accepted: int = 0
    answers_drafted: int = 0
    answers_accepted: int = 0
    earlier_drafted: int = 0
    earlier_accepted: int = 0
    model_drafted: int = 0
    model_accepted: int = 0
    heads_drafted: int = 0
    heads_accepted: int = 0
    proposing_s: float = 0.0
    drafts_saved_s: float | None = 0.0
    collective_s: float | None = None
    launched_steps: int = 1
    scored_positions: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens that the step ran for the first time."""
        return self.prefill_tokens - self.recomputed_tokens

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens that the step appended to answers."""
        return self.sampled_tokens - self.scored_positions + self.forced_tokens


@dataclass(frozen=True, slots=True)
class RankUse:
    """The memory and communication time of a rank, as measured by the rank.

    Args:
        rank: The number of the rank.
        stage: The number of its pipeline stage, from 0 in the order of the layers.
        weight_bytes: Bytes of the loaded weights.
        kv_bytes: Bytes of the rank's KV cache.
        read_bytes: Bytes that the rank read from the model's files.
        before_rss_bytes: Resident memory before loading, in bytes. None: unknown.
        peak_rss_bytes: Peak resident memory, in bytes.
        collective_s: Seconds in collectives, waiting for other ranks included, over all steps. None: not timed.
        stage_wait_s: Seconds of waiting for steps and for other stages. None: there is one stage, or it is not timed.
    """

    rank: int
    stage: int
    weight_bytes: int
    kv_bytes: int
    read_bytes: int
    before_rss_bytes: int | None
    peak_rss_bytes: int
    collective_s: float | None
    stage_wait_s: float | None
