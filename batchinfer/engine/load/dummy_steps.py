"""Profile run and warm-up: measures the memory of a step, and compiles every kernel before the first real one.

The steps run dummy tokens, whose keys go to the block of the padding rows.
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
from batchinfer.engine.tensors.graph_sizes import DRAFT_QUERIES, SHORTEST

LEAST_TREE = 2  # drafts: one alone is a chain
FEW = 8  # tokens of a prompt that no operators take for a long one
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9)
# Takes the most memory: logits, the sampler's scratch, counts of tokens, and all tokens so far
COSTLY = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1)


class MemoryMeter(Protocol):
    """Measures how much of the device's memory is in use."""

    def restart(self) -> None:
        """Count only what is taken from now on."""

    def peak(self) -> int:
        """The most bytes that were in use at once since `restart`."""

    def free(self) -> int:
        """The bytes that are left."""


class GpuMeter:
    """Reads what torch's allocator took from the GPU, which is no less than what its tensors use."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def restart(self) -> None:
        """Count from the memory that is reserved now, after unused memory was given back."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Return the most bytes that were reserved at once since `restart`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._before

    def free(self) -> int:
        """Return the bytes that the device has left."""
        return int(torch.cuda.mem_get_info(self._device)[0])


def sizes_between(rows: int, tokens: int) -> list[int]:
    """Step sizes between a decode step of `rows` and a step of `tokens`, the largest first.

    Each is half the one before, once as a multiple of 16, for which Triton compiles separate kernels, and once as
    another number. Tiles of matrix products grow with the step, so these sizes use every tile.
    """
    sizes, size = [], tokens - 1
    while size > rows:
        sizes += [size, size // 16 * 16] if size // 16 * 16 > rows else [size]
        size //= 2
    return sizes


class _EveryToken:
    """A mask of all rows that allows every token."""

    def allowed(self, masks: Seq[int], tokens: Seq[int]) -> list[bool]:
        return [True] * len(masks)

    def fill(self, masks: Seq[int], bits: NDArray[np.int32]) -> None:
        """All bits are set before."""


@dataclass(frozen=True, slots=True)
class DummySteps:
    """Runs steps of dummy tokens, up to the largest that the limits allow: the profile run, and the warm-up."""

    runner: DeviceRunner
    limits: SchedulerConfig
    longest: int  # tokens of a sequence
    scratch: int  # the block that dummy tokens write to; they read the blocks before it
    logprobs: int | None = None  # the most log-probabilities that a row asks for
    masked: bool = False  # whether rows may have masks, of which the rank that leads alone knows more
    trees: bool = False  # whether drafts of a row may be a tree

    @property
    def rows(self) -> int:
        return min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    @property
    def costly(self) -> SamplingParams:
        """The parameters that take the most memory of those that the job's rows may have."""
        return replace(COSTLY, logprobs=self.logprobs, adapter=self.adapter)

    @property
    def adapter(self) -> str:
        """An adapter that stands beside the weights; "" if there is none. Kernels are the same for all of them."""
        return self.runner.state.adapters.any_name

    def profile(self, meter: MemoryMeter, mixed: int = 0) -> int:
        """Measure the bytes that the largest step takes in addition to the weights and the cache, plus those of the
        largest decode step, which its graph keeps, and of the largest one that is captured in pieces, of `mixed`
        tokens. A step for which there is no memory is measured in the micro-batches that it is then run in."""
        sizes = (self.limits.max_num_batched_tokens, self.rows, *[mixed] * (mixed > self.rows))
        return sum(self._most_bytes(meter, tokens) for tokens in sizes)

    def _most_bytes(self, meter: MemoryMeter, tokens: int) -> int:
        """Measure the bytes that a step of so many tokens takes, of whole prompts or, if that may be more, of parts."""
        found = list[int]()
        parts = self.runner.ops.parts_take_more and self.longest > tokens > self.rows
        for behind in (False, True)[: 1 + parts]:
            meter.restart()
            chunks = self.chunks(tokens, self.rows, self.longest, self.costly, behind=behind)
            self._run(chunks, masked=True)
            found.append(meter.peak())
        return max(found)

    def warm_up(self) -> None:
        """Run steps of every kind, the largest first, so that the later ones reuse its memory."""
        for params in (self.costly, SAMPLED, GREEDY):
            self._run(self.chunks(self.limits.max_num_batched_tokens, self.rows, self.longest, params))
        context, adapted = min(self.longest, SHORTEST), replace(GREEDY, adapter=self.adapter)
        for params in (GREEDY, adapted)[: 1 + bool(self.adapter)]:
            most = self.limits.max_num_batched_tokens
            for tokens in (*sizes_between(self.rows, most), min(FEW, most)):
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
        """Run a step, or several at once. `masked`: every row has a mask, if any row of the job may have one."""
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
        behind: bool = False,
    ) -> list[Chunk]:
        """Make a step of `tokens` tokens, or of as many as `rows` sequences have room for; every row samples.

        The first rows are whole prompts, as long as allowed, or the ends of longer ones, `behind` what is cached of
        these; the others run one token behind `longest` - 1, in blocks that the rows share or not.
        """
        left, chunks = tokens - rows, []
        for row in range(rows):
            length = 1 + min(left, longest - 1)
            left -= length - 1
            context = length if length > 1 and not behind else longest
            sequence = self._sequence(row, context, params)
            if length == 1 and len(sequence.tables[0]) > 1 and not shared and self.scratch:
                for table in sequence.tables:
                    table[0] = row % self.scratch
            chunks.append(Chunk(sequence, context - length, length))
        return chunks

    def _drafted(self, context: int) -> Iterator[list[Chunk]]:
        """Yield the largest step of each kind that verifies drafts, with as many tokens of a row; none where they are
        not captured. The other sizes are captured when they come up: which these are nobody knows."""
        graphs = self.runner.graphs
        most = 0 if graphs is None else graphs.steps.drafted
        for queries in DRAFT_QUERIES if most else ():
            length = min(queries, context)
            rows = [self._sequence(row, context, GREEDY) for row in range(most // length)]
            yield [Chunk(sequence, context - length, length) for sequence in rows]

    def _branching(self, context: int) -> Iterator[list[Chunk]]:
        """Yield the largest steps that verify trees and are captured, and one that reads a prompt, too."""
        for chunks in self._drafted(context):
            if chunks[0].length > LEAST_TREE:
                yield [self._as_tree(chunk) for chunk in chunks]
        length = LEAST_TREE + 1
        read = min(self.longest, self.limits.max_num_batched_tokens - length)
        if context >= length and read > 0 and self.limits.max_num_seqs > 1:
            tree = self._as_tree(Chunk(self._sequence(0, context, GREEDY), context - length, length))
            yield [tree, Chunk(self._sequence(1, read, GREEDY), 0, read)]

    def _as_tree(self, chunk: Chunk) -> Chunk:
        """Return a chunk of which all tokens but the first one are drafts, each of which may follow that one."""
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
