"""The messages between the parent and an engine's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from batchinfer.core.request import Completion, Request, TokenIds
from batchinfer.core.samples import ExpertTokens, RankUse, RequestSample, StepSample
from batchinfer.engine.config import EngineConfig, EngineInfo, LoadConfig
from batchinfer.engine.ranks.division import UNDIVIDED, Division
from batchinfer.pipeline.workers.engine_entry import ENGINE


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """An engine's place is the part of the machine that its worker may use beside other workers."""

    cores: tuple[int, ...] = ()  # empty: all that this process may use
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it; None: all that CUDA may use


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker's specification says how it loads its engine, as far as that is known before the plan: `factory` names a
    function "module:function" like `load_weights`."""

    load: LoadConfig
    tokenizer: Path | None  # the folder whose tokenizer looks for stop strings and follows constraints
    factory: str = ENGINE
    place: EnginePlace = EnginePlace()
    division: Division = UNDIVIDED
    # How the other ranks load their parts of the same engine, from rank 1 on, where it has any
    others: tuple[WorkerSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker on a cluster reports that it runs, and on which machine."""

    node: str
    machine_class: str


@dataclass(frozen=True, slots=True)
class Load:
    """The parent tells a worker, which has imported all that it needs, to load the weights."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker reports that its weights are loaded, since the moment `at` of `time.perf_counter`, a clock that all
    processes share."""

    at: float


@dataclass(frozen=True, slots=True)
class Configure:
    """The parent tells a worker whose weights are loaded, or being loaded, to make its engine of them."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Add:
    """The parent tells the worker to queue these requests."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Learn:
    """The parent tells a worker of answers that other workers finished, from which drafts may come: their tokens end to
    end, and how many each has. One by one, fifty thousand would take a tenth of a second on their way."""

    tokens: TokenIds
    sizes: Sequence[int]

    @classmethod
    def of(cls, answers: Sequence[TokenIds]) -> Learn:
        """Return what tells of these answers."""
        return cls(np.concatenate([np.empty(0, np.int32), *answers]), [*map(len, answers)])

    @property
    def answers(self) -> list[TokenIds]:
        """Return the answers."""
        ends = accumulate(self.sizes, initial=0)
        return [self.tokens[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Finish:
    """The parent tells the worker to forget waiting requests, to finish running ones within `within_s` seconds, then to
    leave."""

    within_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker that loads asks for the choice that the engines of this run share, and waits for `Answer`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The parent tells a worker what another engine chose; None: this worker is to choose, and to report it."""

    chosen: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A worker reports what it chose for all engines."""

    chosen: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker reports that its engine can work."""

    info: EngineInfo


@dataclass(slots=True)
class WorkDone:
    """A worker reports what some steps finished and cost. The pool adds which engine it was: the `engine`-th that was
    started in this run, in the place `replica`."""

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    engine: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Pulse:
    """A worker, or a rank, reports that it is at work. `untimed`: there is no limit on the time until its next message.
    `waits_for`: a rank of it that has said nothing for a while, by which the engine cannot become ready."""

    untimed: bool = False
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker reports that it cannot go on. `exit_code` is one of the exception tree's; `detail` holds the
    traceback. `died`: it has lost a process of its own, as the parent may lose a worker."""

    exit_code: int
    message: str
    detail: str
    died: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """A worker reports that it is done and leaves."""

    peak_rss: int  # the most memory that it held, in bytes
    # CPU cores that other processes used meanwhile, on average; None: unknown
    other_cores: float | None = None
    expert_tokens: ExpertTokens = field(default_factory=dict)  # of its model's layers that have experts
    ranks: tuple[RankUse, ...] = ()  # what each of its ranks had and took; none where it is one alone
