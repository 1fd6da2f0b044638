"""Samples of cost: what each request and each step of the engine took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from batchinfer.core.request import Pickled

# How the host launches a step on a GPU, from the least work to the most: as one CUDA graph; as graphs of the pieces
# between one layer's attention and the next one's; an operator at a time
LaunchMode = Literal["full_graph", "piecewise_graph", "eager"]
LAUNCH_MODES: tuple[LaunchMode, ...] = ("full_graph", "piecewise_graph", "eager")
# Where drafts come from: a row's prompt and answer so far; other answers of the job; the row's answer in the job's last
# result; a smaller model; heads that were trained for the model; what the model said behind wrong drafts
DraftName = Literal["prompt", "answers", "earlier", "model", "heads"]
ExpertTokens = Mapping[int, list[int]]  # layer → tokens that each of its experts was given


@dataclass(slots=True)
class ConstraintWork:
    """The time that constraints have taken so far."""

    compile_s: float = 0.0
    mask_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestSample:
    """The cost of a request, in seconds since the engine started. It depends on the schedule: never in the results."""

    key: bytes
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens served from a shared prefix
    preemptions: int
    queued_s: float  # when the engine got it
    scheduled_s: float  # its first step began
    first_token_s: float  # its first token was sampled (end of that step)
    finished_s: float  # its last token was sampled
    constrained: bool = False
    steered: bool = False  # its constraint kept it from its most likely token at least once
    # Tokens of the completion that were not sampled, because its constraint left no choice
    forced_tokens: int = 0
    unrun_tokens: int = 1  # the last tokens of the completion, which the model never ran
    cut: bool = False  # max_tokens or the model's context ended it: it might have become longer
    scored_positions: int = 0  # of its prompt, whose logits score the tokens that follow

    def __reduce__(self) -> Pickled:
        """Send the values only: processes send each other millions of samples."""
        return RequestSample, _SAMPLED(self)


_SAMPLED = attrgetter(*(field.name for field in fields(RequestSample)))


@dataclass(frozen=True, slots=True)
class StepSample:
    """The tokens of one engine step, and the work and bytes that they took by the operators' declared costs."""

    step: int
    started_s: float  # since the engine started
    duration_s: float
    model_s: float  # of that, inside the model and the sampler
    prefill_tokens: int  # all others: prompt tokens, and what is recomputed
    decode_tokens: int  # tokens run for the first time that lie behind their prompt
    recomputed_tokens: int  # of the prefill tokens, those that had been run before a preemption
    cached_tokens: int  # prompt tokens not run because a shared prefix held them
    sampled_tokens: int
    padded_tokens: int  # query positions computed for nothing: padding, rows that had ended, rejected drafts
    running: int  # sequences after scheduling
    waiting: int
    preemptions: int
    blocks_used: int
    blocks_total: int
    flops: int  # useful: without padding and recomputation
    bytes: int  # that had to move
    roofline_s: float | None  # sum over operators of max(flops/peak, bytes/bandwidth); None: peaks unknown
    forced_tokens: int = 0  # appended behind the step's, because a constraint left no choice
    mask_s: float = 0.0  # filling the masks of constrained rows
    compile_s: float = 0.0  # compiling constraints, since the step before
    scheduled_s: float = 0.0  # when its scheduling began: before `started_s` where steps overlap
    pairs: int = 0  # (query, key) pairs attended, summed over layers; useful ones, as FLOPs are
    kv_tokens: int = 0  # distinct cached tokens read, summed over layers
    copied_tokens: int = 0  # of the cached tokens, those copied out of the middle of a block
    metering_s: float = 0.0  # what counting all this took the engine
    launch: LaunchMode | None = None  # None: on a CPU, for which nothing is captured
    capture_s: float | None = None  # capturing graphs for it; None: likewise
    graph_bytes: int | None = None  # of the GPU's memory, that these graphs took; None: likewise
    drafted_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0  # of these, those that were right; part of the sampled tokens
    # The same of each source
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
    proposing_s: float = 0.0  # of duration_s, what a draft model beside took, or heads
    # Seconds of the step's tokens without drafts, less those of the step; None: not known
    drafts_saved_s: float | None = 0.0
    # Of model_s, the collectives of the rank that leads, with its waiting for other ranks; None: there are none, or the
    # host does not wait for them, as on a GPU
    collective_s: float | None = None
    launched_steps: int = 1  # that the host launched at once, of which this is one
    # Part of `sampled_tokens`: positions of prompts whose logits score given tokens; nothing is sampled there
    scored_positions: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that the step ran for the first time."""
        return self.prefill_tokens - self.recomputed_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens that the step appended to answers."""
        return self.sampled_tokens - self.scored_positions + self.forced_tokens


@dataclass(frozen=True, slots=True)
class RankUse:
    """A rank's use says what it had of the model, and what it took, as it measured it itself."""

    rank: int
    stage: int  # from 0, in the order of the layers
    weight_bytes: int
    kv_bytes: int
    read_bytes: int  # of the model's files
    before_rss_bytes: int | None  # in memory before it loaded anything; None: not known
    peak_rss_bytes: int
    collective_s: float | None  # as `StepSample` has it, over all steps
    stage_wait_s: float | None  # for steps and ranks of other stages; None: there are none
