"""The messages between the driver and a worker."""

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
    """The cores or the GPU of a worker that shares its machine with other workers."""

    cores: tuple[int, ...] = ()  # empty: all cores of this process
    gpu: str | None = None  # as in CUDA_VISIBLE_DEVICES; None: all GPUs of this process


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The part of a worker's configuration that is known before the plan."""

    load: LoadConfig
    tokenizer: Path | None  # the folder of the tokenizer for stop strings and constraints
    factory: str = ENGINE  # "module:function" of a function like `load_weights`
    place: EnginePlace = EnginePlace()
    division: Division = UNDIVIDED
    others: tuple[WorkerSpec, ...] = ()  # the other ranks of the engine, from rank 1 on


@dataclass(frozen=True, slots=True)
class Placed:
    """Message from a worker on a cluster: the machine on which it runs."""

    node: str
    machine_class: str


@dataclass(frozen=True, slots=True)
class Load:
    """Message to a worker: load the weights."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Message from a worker or rank: its weights are loaded."""

    at: float  # a time of `time.perf_counter`, which all processes of a machine share


@dataclass(frozen=True, slots=True)
class Configure:
    """Message to a worker: build the engine with this configuration, once the weights are loaded."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Add:
    """Message to a worker: queue these requests."""

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Learn:
    """Message to a worker: answers of other workers, from which it may draft.

    They are sent as one array, because sending 50,000 arrays would take a tenth of a second.
    """

    tokens: TokenIds  # of all answers, concatenated
    sizes: Sequence[int]  # tokens of each answer

    @classmethod
    def of(cls, answers: Sequence[TokenIds]) -> Learn:
        """Return the message with these answers."""
        return cls(np.concatenate([np.empty(0, np.int32), *answers]), [*map(len, answers)])

    @property
    def answers(self) -> list[TokenIds]:
        """Return the answers."""
        ends = accumulate(self.sizes, initial=0)
        return [self.tokens[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Finish:
    """Message to a worker: drop waiting requests, finish running ones, and leave."""

    within_s: float  # seconds that running requests may take


@dataclass(frozen=True, slots=True)
class Ask:
    """Message from a loading worker: it waits for `Answer` with the choice that all engines of the run share."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Message to a worker: the choice of another engine, or None if this worker must choose and send `Chosen`."""

    chosen: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Message from a worker: its choice for all engines."""

    chosen: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Message from a worker: its engine is ready for requests."""

    info: EngineInfo


@dataclass(slots=True)
class WorkDone:
    """Message from a worker: finished requests, and samples of steps."""

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    engine: int = 0  # set by the pool: the number of the engine in the order of starts
    replica: int = 0  # set by the pool: the number of the replica


@dataclass(frozen=True, slots=True)
class Pulse:
    """Heartbeat of a worker or rank."""

    untimed: bool = False  # the watchdog waits without limit for the next message
    waits_for: str = ""  # the name of a rank that has sent nothing for a while, for which the engine waits


@dataclass(frozen=True, slots=True)
class Failed:
    """Message from a worker or rank: it failed and ends."""

    exit_code: int  # of the exception in core/errors.py
    message: str
    detail: str  # the traceback
    died: bool = False  # a process of one of its ranks died


@dataclass(frozen=True, slots=True)
class Left:
    """Last message from a worker or rank that ends as planned."""

    peak_rss: int  # peak memory in bytes
    other_cores: float | None = None  # CPU cores that other processes used on average, or None if unknown
    expert_tokens: ExpertTokens = field(default_factory=dict)  # by layer with experts
    ranks: tuple[RankUse, ...] = ()  # usage of each rank; empty for an engine with one rank
