"""Runs a scheduler without a model."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import CacheGroup, CacheLayout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.output_lengths import OutputLengths
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Scheduler, SchedulerConfig, Step
from batchinfer.engine.schedule.sequence import Sequence, SequenceStatus
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.engine.tensors.device_tables import DeviceTables, GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphSize
from batchinfer.engine.tensors.step_state import StepState

ROOTS = ContentRoots(100_000)


class Hopeful(OutputLengths):
    """Predicts that each row ends with its next token, which overflows a small cache."""

    def expected_length(self, sequence: Sequence) -> int:
        return len(sequence) + 1


class Preempting(Scheduler):
    """Preempts the youngest sequence before each fourth step, if no step awaits its tokens."""

    _steps = 0

    def schedule(self, drafted: bool = False) -> Step:
        self._steps += 1
        youngest = next(reversed(self.running), None)
        forced = youngest is not None and len(self.running) > 1 and self._steps % 4 == 0
        if (
            youngest is not None
            and forced
            and youngest.status is SequenceStatus.RUNNING
            and not youngest.placeholders
        ):
            del self.running[youngest]
            self._preempt(youngest)
        else:
            forced = False
        step = super().schedule(drafted)
        step.preemptions += forced
        return step


class PreemptingAhead(Preempting):
    """Preempts sequences even if steps look ahead. No step is launched ahead of a step that preempts."""

    def has_room(self) -> bool:
        return self._steps % 4 != 3 and super().has_room()


def sequence(
    tokens: list[int],
    max_tokens: int,
    key: int = 0,
    exact: bool = False,
    shares_next: int = 0,
    roots: ContentRoots = ROOTS,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=exact)
    request = Request(key.to_bytes(32, "big"), np.array(tokens, np.int32), params, shares_next)
    return Sequence.of(request, roots, None, 0.0)


def distinct_tokens(rows: list[list[int]]) -> int:
    """Return the number of nodes of the rows' trie: the tokens to run if each node runs once."""
    nodes = (accumulate(row, _digest, initial=0) for row in rows)
    return len(set().union(*nodes)) - 1


class Slots:
    """The content of each cache slot: its cache group, and a digest of the tokens up to its own."""

    def __init__(self, windows: tuple[int | None, ...], block_size: int) -> None:
        self._windows, self._size = windows, block_size
        self._held: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, chunks: Seq[Chunk], copies: Seq[Copy], tokens: Callable[[Sequence], list[int]]) -> None:
        """Write the chunks' tokens, copy blocks, and check that attention reads each sequence's own prefix."""
        known = [
            list(accumulate(tokens(chunk.sequence), _digest, initial=hash(chunk.sequence.content_root)))[1:]
            for chunk in chunks
        ]
        for chunk, digests in zip(chunks, known, strict=True):
            for group in range(len(self._windows)):
                for at in range(chunk.start, chunk.end):
                    self._held[self._slot(chunk, group, at)] = group, digests[at]
        for copy in copies:
            for at in range(copy.first, copy.end):
                self._held[copy.target, at] = self._held[copy.source, at]
        for chunk, digests in zip(chunks, known, strict=True):
            for group, window in enumerate(self._windows):
                for at in range(0 if window is None else max(0, chunk.start - window + 1), chunk.end):
                    read = self._held[self._slot(chunk, group, at)]
                    assert read == (group, digests[at]), "another sequence's key is read"

    def _slot(self, chunk: Chunk, group: int, at: int) -> tuple[int, int]:
        return chunk.sequence.tables[group][at // self._size], at % self._size


def _digest(before: int, token: int) -> int:
    return hash((before, token))


class Driver:
    """Runs the steps of a scheduler like the engine and checks the slots that each step reads and keeps."""

    def __init__(self, scheduler: Scheduler, seed: int = 0, stops: float = 0.0) -> None:
        self.scheduler, self.random, self.stops = scheduler, random.Random(seed), stops
        self.slots = Slots(scheduler.tables.sizes.windows, scheduler.pool.block_size)
        self.finished: list[Sequence] = []
        self.cached = self.preempted = self.steps = self.ran = self.copied = 0
        self.writer, self.state, self.on_device = PlanWriter(), StepState(), DeviceTables()
        self.graphs: GraphTables | None = None

    def step(self) -> Step:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check_limits(step)
        self.slots.run(step.chunks, step.copies, lambda seq: list(seq.tokens))
        for chunk in step.chunks:
            self.check_freed(chunk)
        self.check_sharing(step.chunks)
        self.check_sharing(step.chunks[self.random.randrange(2) :: 2])
        if step.chunks:
            self.check_rows(step)
            self.scheduler.record_launch(step)
        assert not self.scheduler.pool.pinned, (
            "a block is held for a copy that was made, or is not to be made"
        )
        for chunk in step.chunks:
            self.post_process(chunk.sequence, chunk.end, chunk.samples)
        self.scheduler.check_integrity()
        self.cached += step.cached_tokens
        self.copied += step.copied_tokens
        self.preempted += step.preemptions
        self.steps += 1
        self.ran += sum(c.length for c in step.chunks)
        return step

    def check_sharing(self, chunks: list[Chunk]) -> None:
        """Check the number of shared leading blocks by comparing tables one by one."""
        sizes = self.scheduler.tables.sizes
        if not sizes.unwindowed:
            assert self.scheduler.shared_blocks(chunks) == 0
            return
        group = sizes.windows.index(None)
        tables = [c.sequence.tables[group][: sizes.blocks(c.end)] for c in chunks]
        again = sum(map(len, tables)) - len(set().union(*tables))
        assert self.scheduler.shared_blocks(chunks) == again

    def check_rows(self, step: Step) -> None:
        """Compare the incremental arrays of plans with the block tables, on the host and as on a GPU."""
        sequences = [chunk.sequence for chunk in step.chunks]
        plan = self.writer.of(step, [chunk.sequence for chunk in step.chunks if chunk.samples])
        count, pool = len(sequences), self.scheduler.pool
        groups = tuple(CacheGroup((), w, frozenset()) for w in self.scheduler.tables.sizes.windows)
        layout = CacheLayout((), groups, 0, pool.block_size)
        kept = self.state.batch(pickle.loads(pickle.dumps(plan)), layout).tables
        places, width = kept[0].rows, max(own.width for own in kept)
        assert len(set(places.tolist())) == len(places) == count
        self.on_device.refresh(self.state.tables, torch.device("cpu"))
        made = [rows.numpy() for rows in self.on_device.of(kept, torch.from_numpy(places))]
        size = GraphSize(count + self.random.randrange(3), width + self.random.randrange(3), 1, 0)
        self.graphs = self.graphs or GraphTables(len(kept), 100_000, torch.device("cpu"))
        filled = [view.numpy() for view in self.graphs.fill(size, kept, self.on_device)]
        for group, (own, *others) in enumerate(zip(kept, made, filled, strict=True)):
            assert [len(rows) for rows in (own.array(), *others)] == [count, count, size.rows]
            for place, sequence in enumerate(sequences):
                table, left = sequence.tables[group], sequence.freed[group]
                row = own.array()[place].tolist()
                assert row[left:] == [*table[left:], *[0] * (len(row) - len(table))]
                assert all(rows[place, left : len(table)].tolist() == table[left:] for rows in others)

    def drain(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    def check_limits(self, step: Step) -> None:
        config = self.scheduler.config
        assert sum(c.length for c in step.chunks) <= config.max_num_batched_tokens
        assert len(self.scheduler.running) <= config.max_num_seqs
        assert len({id(c.sequence) for c in step.chunks}) == len(step.chunks)
        assert all(c.length >= 1 for c in step.chunks)

    def check_freed(self, chunk: Chunk) -> None:
        for group, window in enumerate(self.scheduler.tables.sizes.windows):
            left = 0 if window is None else max(0, chunk.start - window + 1) // self.scheduler.pool.block_size
            assert chunk.sequence.freed[group] == left, "a block that no token sees is held"

    def post_process(self, seq: Sequence, end: int, samples: bool) -> None:
        assert seq.computed == end
        if samples:
            seq.tokens.append(self.random.randrange(3))
            early = not seq.exact and self.random.random() < self.stops
            if len(seq) >= seq.max_length or early:
                self.scheduler.finish(seq)
                self.finished.append(seq)


def driver_for(
    rows: Iterable[Sequence] = (),
    *,
    blocks: int,
    size: int = 4,
    seqs: int = 8,
    budget: int = 4096,
    windows: tuple[int | None, ...] = (None,),
    lengths: OutputLengths | None = None,
    kind: type[Driver] = Driver,
    seed: int = 0,
    stops: float = 0.0,
    **config: Any,
) -> Driver:
    """Return a driver of a scheduler with these waiting rows.

    Args:
        blocks: number of blocks per cache group.
    """
    pool = BlockPool(blocks * len(windows), size, len(windows))
    driver = kind(Scheduler(SchedulerConfig(seqs, budget, **config), pool, lengths, windows), seed, stops)
    for row in rows:
        driver.scheduler.add(row)
    return driver


class Piped:
    """A runner that gets its plans pickled, as if through a pipe."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        return self._runner.launch(pickle.loads(pickle.dumps(plan)))
