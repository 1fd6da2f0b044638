"""Profile run and warm-up of an encoder, with dummy prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.load.dummy_steps import MemoryMeter, sizes_between
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, SchedulerConfig, Step
from batchinfer.engine.schedule.sequence import Sequence

# Mean pooling takes the most memory: it needs the states of all tokens
_MEAN = SamplingParams.vector("mean")


@dataclass(frozen=True, slots=True)
class DummyPrompts:
    """Runs steps of dummy prompts on an encoder, to measure memory and to warm up.

    Attributes:
        runner: The runner of the encoder.
        limits: The maximum sizes of its steps.
        longest: The number of tokens of the longest prompt.
        scratch: The number of the cache block that all dummy tokens write to.
    """

    runner: DeviceRunner
    limits: SchedulerConfig
    longest: int
    scratch: int

    @property
    def _most(self) -> tuple[int, int]:
        tokens = self.limits.max_num_batched_tokens
        return tokens, min(self.limits.max_num_seqs, tokens)

    def profile(self, meter: MemoryMeter) -> int:
        """Run the largest steps, and return their peak memory use in bytes, without weights and KV cache.

        Two steps are measured: one with the longest prompts, and one with the maximum number of prompts.

        Args:
            meter: Measures device memory.

        Raises:
            torch.OutOfMemoryError: There is no memory for a single prompt.
        """
        peaks, (tokens, rows) = [0], self._most
        for least in (1, rows):
            meter.restart()
            self._run(tokens, least)
            peaks.append(meter.peak())
        return max(peaks)

    def warm_up(self) -> None:
        """Run steps of all sizes before the job, so that kernels are compiled."""
        tokens, rows = self._most
        # Largest step first: smaller steps reuse its memory
        for size in (tokens, *sizes_between(1, tokens)):
            self._run(size, 1)
        # Prompts of one token use other kernels
        for size in {rows, 1}:
            self._run(size, size)

    def _run(self, tokens: int, rows: int) -> None:
        plan = PlanWriter(self.runner.sampler.eos_token_ids).of(Step(self.chunks(tokens, rows)), [])
        self.runner.launch(plan).states()

    def chunks(self, tokens: int, rows: int) -> list[Chunk]:
        """Return the dummy prompts of a step. The first prompts have the maximum length.

        Args:
            tokens: The total number of tokens. There are fewer if the maximum number of prompts is reached.
            rows: The minimum number of prompts.
        """
        lengths, left = list[int](), tokens
        while left > 0 and len(lengths) < self._most[1]:
            lengths.append(max(1, min(self.longest, left - (rows - len(lengths) - 1))))
            left -= lengths[-1]
        return [Chunk(self._sequence(row, length), 0, length) for row, length in enumerate(lengths)]

    def _sequence(self, row: int, tokens: int) -> Sequence:
        request = Request(row.to_bytes(32, "little"), np.zeros(tokens, np.int32), _MEAN)
        sequence = Sequence.of(request, ContentRoots(tokens + 1), None, 0.0)
        layout = self.runner.layout
        sequence.tables = [[self.scratch] * -(-tokens // layout.block_size) for _ in layout.groups]
        return sequence
