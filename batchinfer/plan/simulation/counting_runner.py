"""A runner that computes nothing: it gives each sequence the length that it is said to have, and moves a clock on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.runner.runner import StepLaunch
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_shape import step_shape
from batchinfer.plan.simulation.launching import Launching
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, StepShape

END, WORD = 0, 1  # the only tokens there are; END ends an answer


@dataclass(slots=True)
class Clock:
    """The time of a simulated run, in seconds: of the host, and until when the device is busy."""

    host: float = 0.0
    device: float = 0.0
    most_taken: int = 0  # bytes of the KV cache that were ever taken

    def launch(self, host_s: float, launch_s: float, device_s: float) -> float:
        """The host makes a step ready and launches its layers, while the device is at the first ones; when the device
        will have done it."""
        self.host += host_s
        began = max(self.host, self.device)
        self.host += launch_s
        self.device = max(began + device_s, self.host)
        return self.device


@dataclass(frozen=True, slots=True)
class CountedStep:
    """A simulated step, in the place of `batchinfer.engine.runner.runner.Launched`."""

    sampling: list[Sequence]
    outputs: Mapping[bytes, int]
    clock: Clock
    done_s: float
    launch: StepLaunch | None
    padded_tokens: int = 0

    def tokens(self) -> list[list[int]]:
        """Waits for the simulated device."""
        self.clock.host = max(self.clock.host, self.done_s)
        return [[self._next(sequence)] for sequence in self.sampling]

    def _next(self, sequence: Sequence) -> int:
        said = sequence.known_length - sequence.prompt_length + 1
        return END if said >= self.outputs[sequence.request.key] else WORD

    def logprobs(self) -> Mapping[Sequence, TokenLogprobs]:
        """Nobody asks a simulation for them."""
        return {}


@dataclass(frozen=True, slots=True)
class CountingRunner:
    """A `Runner` that counts. `outputs`: by work key, how many tokens the answer has; `shared_blocks`: of
    the engine's scheduler; `taken_bytes`: of the KV cache, in use or kept for later rows; `launching`: of a GPU's host,
    None on a CPU."""

    cost: ModelCost
    layout: CacheLayout
    time: StepTime
    outputs: Mapping[bytes, int]
    looks_ahead: bool
    shared_blocks: Callable[[list[Chunk]], int]
    taken_bytes: Callable[[], int]
    launching: Launching | None = None
    clock: Clock = field(default_factory=Clock)

    @property
    def most_tokens(self) -> int | None:
        return None

    def needs_tokens(self, sequence: Sequence) -> bool:
        """No row is masked: what answers say is not simulated."""
        return False

    def launch(self, chunks: list[Chunk], copies: Seq[Copy] = ()) -> CountedStep:
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        copied = sum(copy.end - copy.first for copy in copies if copy.group == 0)
        shared = self.shared_blocks(chunks)
        shape = self.step_shape(chunks, len(sampling), shared, copied)
        launch = None
        if self.launching is not None:
            decodes = shape.tokens == len(sampling) == len(chunks) and not copies
            launch = StepLaunch(self.launching.mode(chunks, decodes, shared > 0))
        rows, launch_s = len(chunks), self.time.launch_s(self.cost.layers, launch.mode if launch else None)
        device_s = self.time.device_s(shape, self.cost, rows) + self._first_use_s()
        done = self.clock.launch(self.time.host_s(rows), launch_s, device_s)
        return CountedStep(sampling, self.outputs, self.clock, done, launch)

    def _first_use_s(self) -> float:
        """Return the seconds for memory that this step is the first to use. Blocks that were freed are used again
        first."""
        before, self.clock.most_taken = self.clock.most_taken, max(self.clock.most_taken, self.taken_bytes())
        return (self.clock.most_taken - before) * self.time.first_use_s

    def step_shape(self, chunks: list[Chunk], sampled: int, shared: int, copied: int = 0) -> StepShape:
        return step_shape(chunks, sampled, shared, self.layout, copied)
