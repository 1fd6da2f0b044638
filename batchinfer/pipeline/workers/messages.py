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
class EngineResources:
    """The part of a machine that one rank of an engine may use, if several ranks share the machine.

    Attributes:
        cores: Numbers of CPU cores. Empty: all cores that the process may use.
        gpu: Name of a GPU, as in CUDA_VISIBLE_DEVICES. None: all GPUs that the process may use.
    """

    cores: tuple[int, ...] = ()
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The part of a worker's configuration that is known before the plan of the run.

    Attributes:
        load: How the engine loads its weights.
        tokenizer: Folder of the tokenizer for stop strings and constraints. None: the engine supports neither.
        factory: "module:function" of a function like `load_weights`, which loads the weights.
        resources: The cores or GPU of the worker.
        division: How the model is sharded.
        others: The specifications of the engine's other ranks, from rank 1 on.
    """

    load: LoadConfig
    tokenizer: Path | None
    factory: str = ENGINE
    resources: EngineResources = EngineResources()
    division: Division = UNDIVIDED
    others: tuple[WorkerSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Message from a worker on a cluster: it has been started on this machine.

    Attributes:
        node: Address of the machine.
        machine_class: Class of the machine. Machines of the same class compute the same bits.
    """

    node: str
    machine_class: str


@dataclass(frozen=True, slots=True)
class Load:
    """Message to a worker or rank: load the weights."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Message from a worker or rank: its weights are loaded.

    Attributes:
        at: When they were loaded, a time of `time.perf_counter`. All processes of a machine share this clock.
    """

    at: float


@dataclass(frozen=True, slots=True)
class Configure:
    """Message to a worker or rank: build the engine as soon as the weights are loaded.

    Attributes:
        config: The configuration of the engine.
    """

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Add:
    """Message to a worker: queue these requests.

    Attributes:
        requests: The requests.
    """

    requests: Sequence[Request]


@dataclass(frozen=True, slots=True)
class Learn:
    """Message to a worker: answers of other workers, which its engine may use as a source of draft tokens.

    Attributes:
        tokens: Tokens of all answers, concatenated.
        sizes: Number of tokens of each answer.
    """

    # One array, because sending 50,000 arrays would take a tenth of a second
    tokens: TokenIds
    sizes: Sequence[int]

    @classmethod
    def of(cls, answers: Sequence[TokenIds]) -> Learn:
        """Create the message from separate answers.

        Args:
            answers: The tokens of each answer.
        """
        return cls(np.concatenate([np.empty(0, np.int32), *answers]), [*map(len, answers)])

    @property
    def answers(self) -> list[TokenIds]:
        """Return the answers of the message, each as an array of tokens."""
        ends = accumulate(self.sizes, initial=0)
        return [self.tokens[start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Finish:
    """Message to a worker or rank: drop waiting requests, finish running ones, and end.

    Attributes:
        within_s: Seconds that running requests may take.
    """

    within_s: float


@dataclass(frozen=True, slots=True)
class Ask:
    """Message from a worker that is loading: it waits for an `Answer` with the choice of kernels.

    All engines of a run use the same choice.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """Message to a worker that sent `Ask`.

    Attributes:
        chosen: The choice of kernels of another engine. None: this worker must choose, and send `Chosen`.
    """

    chosen: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Message from a worker: the choice of kernels that it has made for all engines of the run.

    Attributes:
        chosen: The choice.
    """

    chosen: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Message from a worker: its engine is ready for requests.

    Attributes:
        info: Description of the engine.
    """

    info: EngineInfo


@dataclass(slots=True)
class WorkDone:
    """Message from a worker: finished requests, and samples of steps.

    Attributes:
        completions: The answers and errors of the finished requests.
        requests: Counts and times of the finished requests.
        steps: Counts and times of steps.
        engine: Number of the engine's process in the order of starts. Set by the driver.
        replica: Number of the replica. Set by the driver.
    """

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    engine: int = 0
    replica: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatMessage:
    """Message from a worker or rank: it is still running (a heartbeat).

    Attributes:
        untimed: True if the next message may take any time, so the watchdog must not limit it.
        waits_for: Name of a rank that has sent nothing for a while, and for which the engine waits. "" if there is
            none.
    """

    untimed: bool = False
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """Message from a worker or rank: it failed and ends.

    Attributes:
        exit_code: Exit code of the error's class in core/errors.py.
        message: Text of the error.
        detail: The traceback.
        died: True if it failed because the process of another rank of the engine died.
    """

    exit_code: int
    message: str
    detail: str
    died: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """Last message from a worker or rank that ends as planned.

    Attributes:
        peak_rss: Peak memory in bytes.
        other_cores: Mean number of CPU cores that other processes used. None if unknown.
        expert_tokens: By index of the layer, the number of tokens that each expert has computed.
        ranks: Usage of each rank. Empty for an engine with one rank.
    """

    peak_rss: int
    other_cores: float | None = None
    expert_tokens: ExpertTokens = field(default_factory=dict)
    ranks: tuple[RankUse, ...] = ()
