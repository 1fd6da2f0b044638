"""What the parent and the engine's process say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.core.request import Completion, Request
from batchinfer.core.samples import ExpertTokens, RequestSample, StepSample
from batchinfer.engine.config import EngineConfig, EngineInfo


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What a worker may use of a machine that it shares with other workers."""

    cores: tuple[int, ...] = ()  # empty: all that this process may use
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it; None: all that CUDA may use


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a worker makes its engine: `factory` names a function "module:function" like `build_engine`."""

    config: EngineConfig
    tokenizer: Path | None  # the folder whose tokenizer looks for stop strings and follows constraints
    factory: str = "batchinfer.engine.load.build:build_engine"
    place: EnginePlace = EnginePlace()


@dataclass(frozen=True, slots=True)
class Add:
    """To the worker: queue these."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Finish:
    """To the worker: forget what waits, finish what runs within so many seconds, then leave."""

    within_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """From the worker, while it loads: which choice do the engines of this run share? It waits for `Answer`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """To the worker: what another engine chose; None: it is to choose, and to say what."""

    chosen: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """From the worker: what it chose for all engines."""

    chosen: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From the worker: the model is loaded."""

    info: EngineInfo


@dataclass(slots=True)
class WorkDone:
    """From the worker: what some steps finished and cost. The pool says which engine it was: the `engine`-th that was
    started in this run, in the place `replica`."""

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    engine: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class Pulse:
    """From the worker: it is at work. `untimed`: what it does until its next message takes as long as it takes."""

    untimed: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """From the worker: it cannot go on. `exit_code` is that of the exception tree; `detail` holds the traceback."""

    exit_code: int
    message: str
    detail: str


@dataclass(frozen=True, slots=True)
class Left:
    """From the worker: it is done and leaves."""

    peak_rss: int  # the most memory that it held, in bytes
    # CPU cores that other processes used meanwhile, on average; None: unknown
    other_cores: float | None = None
    expert_tokens: ExpertTokens = field(default_factory=dict)  # of its model's layers that have experts
