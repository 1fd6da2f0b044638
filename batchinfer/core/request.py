"""What travels between the rooms: a row to do, how to sample it, its answer, and what it cost.

No torch, no files: every room may import this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from operator import attrgetter
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Truncate = Literal["error", "left", "right"]  # what is done with a prompt too long for the model
FinishReason = Literal["stop", "length", "error"]
ErrorClass = Literal["input", "policy", "resource", "engine"]
# How the host launches a step on a GPU, from the least work to the most: as one CUDA graph; as graphs of the pieces
# between one layer's attention and the next one's; an operator at a time
LaunchMode = Literal["full_graph", "piecewise_graph", "eager"]
LAUNCH_MODES: tuple[LaunchMode, ...] = ("full_graph", "piecewise_graph", "eager")
TokenIds = NDArray[np.int32]
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]  # what makes an object again, and of what


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Tokens that both begin with."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row became an error row. `message` is at most 2 KiB and holds no prompt text."""

    code: str  # e.g. "bad_json", "prompt_too_long"
    error_class: ErrorClass
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row's tokens are chosen. `temperature == 0` means greedy, where only limits and stops matter."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # None: no log-probabilities; n: of each token, and of the n most likely ones
    # What an answer has to look like; one of them at most
    json_schema: str | None = None  # JSON text of a JSON Schema
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None  # Lark, or GBNF

    @property
    def constraint(self) -> str | None:
        """Which of the constraints an answer has to follow."""
        return next((name for name in CONSTRAINTS if getattr(self, name)), None)

    @property
    def has_known_length(self) -> bool:
        """Whether nothing but max_tokens, or the model's context, can end an answer."""
        return self.ignore_eos and not (self.stop or self.stop_token_ids or self.constraint)

    @property
    def constraint_digest(self) -> bytes:
        """What a constraint is remembered by: itself it may take a megabyte."""
        name = self.constraint
        said = (name, None if name is None else getattr(self, name))
        return sha256(repr(said).encode()).digest()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def canonical(self) -> Self:
        """The same answer, fewer spellings: stops in order, and greedy work ignores what only shapes random draws."""
        stops, ids = tuple(sorted(set(self.stop))), tuple(sorted(set(self.stop_token_ids)))
        ordered = replace(self, stop=stops, stop_token_ids=ids, choice=tuple(sorted(set(self.choice))))
        return replace(ordered, top_p=1.0, top_k=0, min_p=0.0, seed=0) if self.greedy else ordered

    def to_json(self) -> str:
        """Canonical JSON (sorted keys, no spaces): equal parameters give equal text.

        A parameter at its default is left out, so that one which is added later changes no stored text and no key.
        The defaults therefore never change: a stored text without the parameter would then mean another value.
        """
        said = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values)


class ConstraintFailed(Exception):
    """A constraint that cannot be followed any further, as the error of its row."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class ConstraintWork:
    """What constraints took so far."""

    compile_s: float = 0.0
    mask_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be: from `low` to `high`, or with `above` from just above `low`."""

    low: float
    high: float
    above: bool = False


INT32_MAX = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_SCHEMA_BYTES = 1 << 20  # of a JSON Schema as text
JSON_CONSTRAINTS = ("json_schema", "json_object")
CONSTRAINTS = (*JSON_CONSTRAINTS, "regex", "choice", "grammar")
# What the numbers of SamplingParams may be, wherever they come from: job file, column, OpenAI request
BOUNDS: Mapping[str, Bounds] = {
    "max_tokens": Bounds(1, INT32_MAX),
    "min_tokens": Bounds(0, INT32_MAX),
    "temperature": Bounds(0, 100),
    "top_p": Bounds(0, 1, above=True),
    "top_k": Bounds(0, INT32_MAX),
    "min_p": Bounds(0, 1),
    "seed": Bounds(-(2**63), 2**63 - 1),
    "repetition_penalty": Bounds(0, 100, above=True),
    "presence_penalty": Bounds(-100, 100),
    "frequency_penalty": Bounds(-100, 100),
    "logprobs": Bounds(0, MAX_LOGPROBS),
}


ExpertTokens = Mapping[int, list[int]]  # layer → tokens that each of its experts was given


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One piece of work: what is computed once, however many rows ask for it."""

    key: bytes  # the WorkKey, 32 bytes
    prompt: TokenIds  # (n,) int32, n >= 1
    params: SamplingParams
    shares_next: int = 0  # prompt tokens that the plan's next request begins with too; 0: unknown

    def __reduce__(self) -> Pickled:
        """Processes send each other millions: what `dataclasses` and numpy do of themselves takes several times as
        long."""
        return _remade, (Request, self.key, _data(self.prompt), *_BEHIND_PROMPT(self))


_BEHIND_PROMPT = attrgetter(*(field.name for field in fields(Request)[2:]))


def _data(token_ids: TokenIds) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()


def _remade(kind: type[Any], key: bytes, token_ids: bytes, *more: Any) -> Any:
    """With an array that can be written to, as the one that was sent."""
    return kind(key, np.frombuffer(bytearray(token_ids), np.int32), *more)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of m tokens, and of the `most` likeliest ones at the place of each.

    They are of the model's logits as they are, before penalties, masks, temperature and filters.
    """

    chosen: NDArray[np.float32]  # (m,)
    top: NDArray[np.float32]  # (m, most), in descending order
    top_ids: TokenIds  # (m, most)

    def __len__(self) -> int:
        return len(self.chosen)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The answer to a Request. Output token ids include the EOS or stop token that ended them."""

    key: bytes
    token_ids: TokenIds  # (m,) int32
    finish_reason: FinishReason
    text_length: int | None = None  # characters to keep, where a stop string cut the text; None: all
    error: RowError | None = None
    logprobs: TokenLogprobs | None = None  # of all token_ids, where the request asks for them

    def __reduce__(self) -> Pickled:
        """As Request's."""
        return _remade, (Completion, self.key, _data(self.token_ids), *_BEHIND_TOKENS(self))


_BEHIND_TOKENS = attrgetter(*(field.name for field in fields(Completion)[2:]))


@dataclass(frozen=True, slots=True)
class RequestSample:
    """What a request cost, in seconds since the engine started. Depends on the schedule: never in the results."""

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
    forced_tokens: int = (
        0  # of the completion, those that its constraint left no choice of: they were not sampled
    )
    unrun_tokens: int = 1  # of the completion, those that the model never ran: its end
    cut: bool = False  # max_tokens or the model's context ended it, so that it might have become longer

    def __reduce__(self) -> Pickled:
        """As Request's."""
        return RequestSample, _SAMPLED(self)


_SAMPLED = attrgetter(*(field.name for field in fields(RequestSample)))


@dataclass(frozen=True, slots=True)
class StepSample:
    """What one engine step ran and what it had to move, by the operators' declared costs."""

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
