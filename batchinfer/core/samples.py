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
DraftName = Literal["prompt", "answers", "earlier", "model", "heads"]
ExpertTokens = Mapping[int, list[int]]  # layer → tokens routed to each of its experts


@dataclass(slots=True)
class ConstraintWork:
    """The time spent on constraints so far."""

    compile_s: float = 0.0
    mask_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestSample:
    """The cost of a request, with times since the start of the engine. It is never part of results."""

    key: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens taken from the prefix cache
    preemptions: int
    queued_s: float  # when the engine received the request
    scheduled_s: float  # when its first step began
    first_token_s: float  # when the step ended that sampled its first token
    finished_s: float  # when its last token was sampled
    constrained: bool = False
    steered: bool = False  # the constraint forbade the most likely token at least once
    forced_tokens: int = 0  # tokens that were not sampled because the constraint allowed only one
    unrun_tokens: int = 1  # the last tokens of the completion, which the model never ran
    cut: bool = False  # ended by max_tokens or the model's context
    scored_positions: int = 0  # prompt positions whose logits score the following tokens

    def __reduce__(self) -> Pickled:
        """Pickle only the values: processes send each other millions of samples."""
        return RequestSample, _SAMPLED(self)


_SAMPLED = attrgetter(*(field.name for field in fields(RequestSample)))


@dataclass(frozen=True, slots=True)
class StepSample:
    """The tokens of one engine step, its time, and its FLOPs and bytes by the operators' cost models."""

    step: int
    started_s: float  # since the engine started
    duration_s: float
    model_s: float  # part of duration_s: in the model and the sampler
    prefill_tokens: int  # prompt tokens and recomputed tokens
    decode_tokens: int  # generated tokens that run for the first time
    recomputed_tokens: int  # part of prefill_tokens: tokens that had run before a preemption
    cached_tokens: int  # prompt tokens not run because they were in the prefix cache
    sampled_tokens: int
    padded_tokens: int  # wasted query positions: padding, rows that had ended, rejected drafts
    running: int  # sequences after scheduling
    waiting: int
    preemptions: int
    blocks_used: int
    blocks_total: int
    flops: int  # useful FLOPs, without padding and recomputation
    bytes: int  # bytes that must be moved
    roofline_s: float | None  # sum over operators of max(flops/peak, bytes/bandwidth); None: peaks unknown
    forced_tokens: int = 0  # appended after the step because constraints allowed only one token
    mask_s: float = 0.0  # filling the masks of constrained rows
    compile_s: float = 0.0  # compiling constraints since the previous step
    scheduled_s: float = 0.0  # when its scheduling began: before `started_s` if steps overlap
    pairs: int = 0  # useful (query, key) pairs of attention, summed over layers
    kv_tokens: int = 0  # distinct cached tokens read, summed over layers
    copied_tokens: int = 0  # part of cached_tokens: copied from partial blocks
    metering_s: float = 0.0  # time spent computing this sample
    launch: LaunchMode | None = None  # None on a CPU
    capture_s: float | None = None  # capturing graphs for the step; None on a CPU
    graph_bytes: int | None = None  # GPU memory of these graphs; None on a CPU
    drafted_tokens: int = 0  # verified draft tokens
    accepted_tokens: int = 0  # accepted draft tokens, part of sampled_tokens
    # The same per draft source
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
    proposing_s: float = 0.0  # part of duration_s: the draft model or draft heads
    # Estimated time of the same tokens without drafts, minus the step's time; None: unknown
    drafts_saved_s: float | None = 0.0
    # Part of model_s: collectives of the leading rank, including waiting for other ranks; None: there are none, or they
    # are not timed, as on a GPU
    collective_s: float | None = None
    launched_steps: int = 1  # steps that the host launched together with this one, this one included
    scored_positions: int = 0  # part of sampled_tokens: positions whose logits score given tokens

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens that ran for the first time."""
        return self.prefill_tokens - self.recomputed_tokens

    @property
    def output_tokens(self) -> int:
        """Return the tokens that the step appended to answers."""
        return self.sampled_tokens - self.scored_positions + self.forced_tokens


@dataclass(frozen=True, slots=True)
class RankUse:
    """The memory and communication time of a rank, as measured by the rank."""

    rank: int
    stage: int  # from 0, in the order of the layers
    weight_bytes: int
    kv_bytes: int
    read_bytes: int  # read from the model's files
    before_rss_bytes: int | None  # resident memory before loading; None: unknown
    peak_rss_bytes: int
    collective_s: float | None  # see `StepSample`; the sum over all steps
    stage_wait_s: float | None  # waiting for steps and for other stages; None: one stage, or not timed
