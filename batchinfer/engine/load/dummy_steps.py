"""Profile run and warm-up with dummy tokens: measures the memory of steps, compiles kernels and captures graphs.

Dummy tokens write their K and V to the block for padding rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, SchedulerConfig, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.graph_sizes import DRAFT_QUERIES, MIN_CONTEXT_BOUND

MIN_TREE_DRAFTS = 2  # one draft is a chain
SHORT_PROMPT = 8  # tokens; operators treat no prompt of this length as a long one
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)
# Takes the most memory: logits, the sampler's scratch memory, token counts, and all previous tokens
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)


class MemoryMeter(Protocol):
    """Measures the peak and the free memory of a device."""

    def restart(self) -> None:
        """Start a new measurement of the peak memory use."""

    def peak(self) -> int:
        """Return the peak number of bytes in use since `restart`, minus the bytes in use at `restart`."""

    def free(self) -> int:
        """Return the number of free bytes of the device at present."""


class GpuMeter:
    """Measures GPU memory as reserved by torch's allocator, so that the gaps between tensors are included."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def restart(self) -> None:
        """Release the unused memory of torch's allocator, and start a new measurement of the peak memory use."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Return the peak number of reserved bytes since `restart`, minus the bytes reserved at `restart`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._before

    def free(self) -> int:
        """Return the number of free bytes of the GPU at present."""
        return int(torch.cuda.mem_get_info(self._device)[0])


def sizes_between(rows: int, tokens: int) -> list[int]:
    """Return the step sizes, in tokens, with which the warm-up uses all kernels for sizes between two limits.

    Args:
        rows: The lower limit, which is excluded.
        tokens: The upper limit, which is excluded.

    Returns:
        Numbers of tokens, in descending order.
    """
    sizes, size = [], tokens - 1
    while size > rows:
        # Halving uses every tile size of the matrix products. Triton compiles separate kernels for multiples of 16
        sizes += [size, size // 16 * 16] if size // 16 * 16 > rows else [size]
        size //= 2
    return sizes


class _EveryToken:
    def allowed(self, masks: Seq[int], tokens: Seq[int]) -> list[bool]:
        return [True] * len(masks)

    def fill(self, masks: Seq[int], bits: NDArray[np.int32]) -> None:
        pass  # all bits are set already


@dataclass(frozen=True, slots=True)
class DummySteps:
    """Runs steps of dummy tokens on a GPU, to measure memory, compile kernels and capture CUDA graphs.

    Attributes:
        runner: The runner.
        limits: The maximum sizes of its steps.
        longest: The number of tokens of the longest sequence.
        scratch: The number of the cache block that dummy tokens write to. They read the blocks with smaller numbers.
        logprobs: The highest number of log-probabilities per token that a row requests. None: no row requests any.
        masked: True if rows may have token masks of constraints.
        trees: True if drafts may form trees.
    """

    runner: DeviceRunner
    limits: SchedulerConfig
    longest: int
    scratch: int
    logprobs: int | None = None
    masked: bool = False
    trees: bool = False

    @property
    def rows(self) -> int:
        """The maximum number of rows of a step."""
        return min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    @property
    def costly(self) -> SamplingParams:
        """Sampling parameters that take the most memory, with the log-probabilities that rows of the job request."""
        return replace(COSTLY, logprobs=self.logprobs, adapter=self.adapter)

    @property
    def adapter(self) -> str:
        """The fingerprint of one LoRA adapter, or "" if all adapters are merged into the weights.

        One adapter is enough to warm up, because all adapters use the same kernels.
        """
        return self.runner.state.adapters.any_name

    def profile(self, meter: MemoryMeter, mixed: int = 0) -> int:
        """Run the largest steps, and return the number of bytes to leave free for steps, without weights and KV cache.

        A step for which memory is missing runs in micro-batches.

        Args:
            meter: Measures device memory.
            mixed: The number of tokens of the largest step that is captured in pieces; 0 if no step is captured.
        """
        # The sum of the peaks: the graphs of decode steps and pieces keep their memory
        sizes = (self.limits.max_num_batched_tokens, self.rows, *[mixed] * (mixed > self.rows))
        return sum(self._most_bytes(meter, tokens) for tokens in sizes)

    def _most_bytes(self, meter: MemoryMeter, tokens: int) -> int:
        found = list[int]()
        parts = self.runner.ops.chunks_need_more_memory and self.longest > tokens > self.rows
        for later in (False, True)[: 1 + parts]:
            meter.restart()
            chunks = self.chunks(tokens, self.rows, self.longest, self.costly, later=later)
            self._run(chunks, masked=True)
            found.append(meter.peak())
        return max(found)

    def warm_up(self) -> None:
        """Run steps of every kind before the job, so that kernels are compiled and CUDA graphs captured."""
        # Largest step first: smaller steps reuse its memory
        for params in (self.costly, SAMPLED, GREEDY):
            self._run(self.chunks(self.limits.max_num_batched_tokens, self.rows, self.longest, params))
        context, adapted = min(self.longest, MIN_CONTEXT_BOUND), replace(GREEDY, adapter=self.adapter)
        for params in (GREEDY, adapted)[: 1 + bool(self.adapter)]:
            most = self.limits.max_num_batched_tokens
            for tokens in (*sizes_between(self.rows, most), min(SHORT_PROMPT, most)):
                fewest = min(self.rows, -(-tokens // self.longest))
                self._run(self.chunks(tokens, fewest, self.longest, params))
        if self.adapter:
            self._run(self.chunks(self.rows, self.rows, context, adapted))
        self._run(self.chunks(self.rows, self.rows, context, GREEDY, shared=True))
        for size in reversed(self.runner.graphs.sizes if self.runner.graphs else []):
            self._run(self.chunks(size, size, context, GREEDY))
        if self.runner.wants.repeats and context > 1:
            chunks = self.chunks(self.rows, self.rows, context, GREEDY)
            self._run([chunk._replace(start=chunk.start - 1) for chunk in chunks], repeats=2)
        for chunks in self._drafted(context):
            self._run(chunks)
        for chunks in self._branching(context) if self.trees else ():
            self._run(chunks)
        if self.masked:
            for params in (SAMPLED, GREEDY):
                self._run(self.chunks(self.rows, self.rows, context, params), masked=True)
        if self.runner.graphs is not None:
            self.runner.graphs.end_warm_up()
        if self.runner.mixed is not None:
            self.runner.mixed.capture()

    def _run(self, chunks: list[Chunk], masked: bool = False, repeats: int = 1) -> None:
        runner, sampler = self.runner, self.runner.sampler
        if masked and self.masked:
            runner = replace(runner, sampler=replace(sampler, mask=_EveryToken()))
            for chunk in chunks:
                chunk.sequence.mask = 0
        sampling = [chunk.sequence for chunk in chunks]
        step = Step(chunks, drafts=sum(sequence.drafts for sequence in sampling))
        plan = PlanWriter(sampler.eos_token_ids).of(step, sampling)
        if repeats > 1:
            plan = replace(plan, repeats=np.full(len(chunks), repeats, np.int32))
        launched = runner.launch(plan)
        launched.tokens()
        launched.logprobs()

    def chunks(
        self,
        tokens: int,
        rows: int,
        longest: int,
        params: SamplingParams,
        shared: bool = False,
        later: bool = False,
    ) -> list[Chunk]:
        """Return the chunks of a step of dummy sequences.

        The first rows prefill and the other rows decode. All rows sample a token.

        Args:
            tokens: The total number of tokens. There are fewer if `rows` sequences are not long enough.
            rows: The number of rows, with one chunk each.
            longest: The number of tokens of the longest sequence.
            params: The sampling parameters of all rows.
            shared: True if all decoding rows read the same blocks.
            later: True if prefilling rows compute the last chunk of a long prompt instead of a whole prompt.
        """
        left, chunks = tokens - rows, []
        for row in range(rows):
            length = 1 + min(left, longest - 1)
            left -= length - 1
            context = length if length > 1 and not later else longest
            sequence = self._sequence(row, context, params)
            if length == 1 and len(sequence.tables[0]) > 1 and not shared and self.scratch:
                for table in sequence.tables:
                    table[0] = row % self.scratch
            chunks.append(Chunk(sequence, context - length, length))
        return chunks

    def _drafted(self, context: int) -> Iterator[list[Chunk]]:
        graphs = self.runner.graphs
        most = 0 if graphs is None else graphs.steps.drafted
        for queries in DRAFT_QUERIES if most else ():
            length = min(queries, context)
            rows = [self._sequence(row, context, GREEDY) for row in range(most // length)]
            yield [Chunk(sequence, context - length, length) for sequence in rows]

    def _branching(self, context: int) -> Iterator[list[Chunk]]:
        for chunks in self._drafted(context):
            if chunks[0].length > MIN_TREE_DRAFTS:
                yield [self._as_tree(chunk) for chunk in chunks]
        length = MIN_TREE_DRAFTS + 1
        read = min(self.longest, self.limits.max_num_batched_tokens - length)
        if context >= length and read > 0 and self.limits.max_num_seqs > 1:
            tree = self._as_tree(Chunk(self._sequence(0, context, GREEDY), context - length, length))
            yield [tree, Chunk(self._sequence(1, read, GREEDY), 0, read)]

    def _as_tree(self, chunk: Chunk) -> Chunk:
        sequence, drafts = chunk.sequence, chunk.length - 1
        del sequence.tokens[-drafts:]
        sequence.propose([0] * drafts, [-1] * drafts)
        return chunk

    def _sequence(self, row: int, tokens: int, params: SamplingParams) -> Sequence:
        request = Request(row.to_bytes(32, "little"), np.zeros(tokens, np.int32), params)
        sequence = Sequence.of(request, ContentRoots(tokens + 1), None, 0.0)
        layout = self.runner.layout
        sequence.tables = [[self.scratch] * -(-tokens // layout.block_size) for _ in layout.groups]
        return sequence
