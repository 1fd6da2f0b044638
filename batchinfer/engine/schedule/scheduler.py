"""Chooses the sequences of each step and the tokens that each of them runs. Free of torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.schedule.admission import CountedBlocks, peak_blocks
from batchinfer.engine.schedule.batched_admission import IDLE, AdmissionCosts, BatchedAdmission
from batchinfer.engine.schedule.block_tables import BlockTables
from batchinfer.engine.schedule.output_lengths import OutputLengths
from batchinfer.engine.schedule.partial_blocks import Copy, PartialBlock, PartialBlocks
from batchinfer.engine.schedule.sequence import Sequence, SequenceStatus

# 1 / HEAD_ROOM of the blocks is kept free as a margin for estimated lengths (docs/measurements/scheduling.md)
HEAD_ROOM = 20
# Steps after which a row that did not fit is tried again, unless another row ends before. A forecast for 256 rows takes
# 0.2 to 0.5 ms, so it must not run in every step
RETRY_STEPS = 8

_AWAITING = SequenceStatus.AWAITING_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler.

    Attributes:
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum number of tokens per step.
        prefix_caching: True if sequences share the blocks of common prefixes.
        admission_costs: The estimated times from which the delay of admission is computed. None: a sequence is
            admitted as soon as it fits.
        least_copied: Minimum number of tokens to copy from a partial block. None: nothing is copied.
        whole_prompts: True if each prompt must run in a single step and share no blocks, as encoders need.
        most_adapters: Maximum number of different LoRA adapters of running sequences. None: no limit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True
    admission_costs: AdmissionCosts | None = None
    least_copied: int | None = 1
    whole_prompts: bool = False
    most_adapters: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < 1:
            raise ValueError(f"both limits must be at least 1: {self}")
        if self.whole_prompts and self.prefix_caching:
            raise ValueError(f"whole_prompts and prefix_caching exclude each other: {self}")


class Chunk(NamedTuple):
    """The tokens of a sequence that run in a step: `length` tokens from position `start` on."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """The position after the chunk's last token."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """True if a token is sampled after the chunk.

        The chunk ends with the last token of its sequence, and the sequence is shorter than its maximum length.
        """
        return sampling_chunks([self])[0]

    @property
    def recomputed(self) -> int:
        """The number of the chunk's tokens that were computed before a preemption and run again."""
        start, before = self.start, self.sequence.computed_before_preemption
        return min(start + self.length, before) - start if start < before else 0

    @property
    def decodes(self) -> int:
        """The number of the chunk's tokens that are generated tokens and run for the first time."""
        sequence = self.sequence
        return max(0, self.end - max(self.start, sequence.computed_before_preemption, sequence.prompt_length))

    @property
    def fresh(self) -> Chunk:
        """The part of the chunk that runs for the first time, not again after a preemption. Its length may be 0."""
        again = self.recomputed
        return Chunk(self.sequence, self.start + again, self.length - again)


def sampling_chunks(chunks: list[Chunk]) -> list[bool]:
    """Return for each chunk True if a token is sampled after it.

    This is the case if the chunk ends with the last token of its sequence, and the sequence is shorter than its
    maximum length.
    """
    # Performance-critical: runs over all rows of every step
    return [start + length == len(s.tokens) < s.max_length for s, start, length in chunks]


@dataclass(slots=True)
class Step:
    """A scheduled step.

    Attributes:
        chunks: The tokens that the step runs, at most one chunk per sequence.
        admitted: The sequences that were admitted with this step.
        cached_tokens: The number of prompt tokens that admitted sequences found in the prefix cache.
        preemptions: The number of sequences that were preempted to make room.
        copies: Copies of partial blocks. In each layer, they run after the keys and values of the chunks are stored
            and before attention.
        copied_tokens: The number of tokens that are copied, per layer.
        drafts: The number of draft tokens in the chunks.
        repeats: The number of decode steps that are launched together.
    """

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    preemptions: int = 0
    copies: list[Copy] = field(default_factory=list)
    copied_tokens: int = 0
    drafts: int = 0
    repeats: int = 1


class Scheduler:
    """Schedules the steps of an engine with continuous batching.

    A step runs the running sequences, oldest first, then admits waiting sequences in order of arrival. A sequence is
    admitted if all running sequences, this one included, are expected to end without a preemption. While a sequence
    waits, it reserves the prefix blocks that it can share.

    Args:
        config: The limits.
        pool: The blocks of the KV cache.
        lengths: Estimates the output lengths of running sequences. None: a new estimator.
        windows: The sliding window of each cache group in tokens. None: the group keeps all tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        lengths: OutputLengths | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.config = config
        self._most_tokens = config.max_num_batched_tokens  # limit of a step before `limit_tokens`
        self.pool = pool
        self.tables = BlockTables(pool, windows)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # oldest first; a dict for fast removal
        # Ended sequences whose blocks a step in flight still reads
        self.finishing: dict[Sequence, None] = {}
        self._lengths = lengths or OutputLengths()
        self._added = 0
        self.partial = PartialBlocks(self.tables, config.least_copied if config.prefix_caching else None)
        self._next_prefix: list[bytes] = []  # block contents that the next request shares
        self._next_partial: PartialBlock | None = None
        self._step_blocks = self.tables.sizes.for_chunks(config.max_num_batched_tokens)
        # Upper bound of the blocks of running and finishing sequences, without sharing and at their max_length
        self._max_blocks = self._step_blocks
        self._retry_in = 0  # steps until the first waiting sequence, which did not fit, is tried again
        self._batching = BatchedAdmission(config.admission_costs)
        self._available_when_stopped = 0  # available blocks when admission stopped
        self._launched_steps = 1  # decode steps in the newest launch

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to the end of the queue.

        Raises:
            ValueError: If the sequence needs more blocks than the whole KV cache has, or if its prompt must run in one
                step and is longer than a step.
        """
        if self.config.whole_prompts and sequence.prompt_length > self._most_tokens:
            raise ValueError(
                f"a prompt of {sequence.prompt_length} tokens must run in one step, and a step has {self._most_tokens}"
            )
        most = self.tables.sizes.alone(sequence.max_length, self._most_tokens)
        sequence.arrival, fits = self._added, most <= self.pool.total
        if fits:
            self.partial.insert(sequence)
            self._reserve(sequence)
            self.waiting.append(sequence)
        self._expect_next(sequence)
        if not fits:
            raise ValueError(
                f"{sequence.max_length} tokens need {most} KV blocks and there are {self.pool.total}; "
                "raise engine.kv_memory or lower max_tokens"
            )

    def _expect_next(self, sequence: Sequence) -> None:
        size, before, partial = self.pool.block_size, self._next_prefix, self._next_partial
        arrival = self._added
        shared = min(sequence.request.shares_next, sequence.prompt_length)
        self._next_prefix = sequence.block_hashes(shared // size if self.config.prefix_caching else 0, size)
        self._next_partial = self.partial.after(sequence, shared)
        self._added += 1
        self.pool.reserve(self._next_prefix, self._added)
        self.partial.reserve(self._next_partial, self._added)
        self.pool.unreserve(before, arrival)
        self.partial.unreserve(partial, arrival)

    def limit_tokens(self, most: int | None) -> None:
        """Lower the maximum number of tokens per step, because steps of the configured maximum do not fit into memory.

        Args:
            most: The maximum number of tokens. None: the configured maximum is restored.
        """
        tokens = self._most_tokens if most is None else min(most, self._most_tokens)
        if tokens != self.config.max_num_batched_tokens:
            self.config = replace(self.config, max_num_batched_tokens=tokens)

    def schedule(self, drafted: bool = False) -> Step:
        """Choose the chunks of the next step. The step has no chunks if nothing can run.

        Args:
            drafted: True if any running sequence has draft tokens.
        """
        step = Step()
        self._free_outside_windows()
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if drafted:
            budget = self._run_drafts(step, budget)
        if not step.preemptions:
            budget = self._admit(step, budget)
        self._batching.prefill_tokens = (
            self.config.max_num_batched_tokens - budget - len(step.chunks) - step.drafts
        )
        return step

    def reserve_steps(self, step: Step, most: int) -> list[int] | None:
        """Extend the newest step to several decode steps that are launched together, and allocate their blocks.

        All steps together run at most `max_num_batched_tokens` tokens.

        Args:
            step: The newest scheduled step, in which each sequence decodes one token.
            most: Maximum number of steps.

        Returns:
            For each sequence, the number of steps in which it runs a token. None if there are too few blocks, or if no
            sequence can run more than one step; nothing is changed then.
        """
        # The number of blocks for sliding windows depends on max_num_batched_tokens
        size, most = self.pool.block_size, min(most, self.config.max_num_batched_tokens // len(step.chunks))
        lefts = [s.max_length - 1 - start for s, start, _ in step.chunks]
        runs = [most if left > most else left for left in lefts]
        each = zip(step.chunks, runs, strict=True)
        short = [(s, start + n) for (s, start, _), n in each if start + n > len(s.tables[0]) * size]
        if max(runs) == 1 or sum(self.tables.missing(*one) for one in short) > self.pool.available:
            return None
        for sequence, end in short:
            self._make_room(sequence, end, step)
        step.repeats = max(runs)
        return runs

    def record_launch(self, step: Step) -> None:
        """Record that the newest step was launched. The tokens of its chunks count as computed from now on."""
        self.partial.record_launch()
        self._launched_steps = self._batching.steps = step.repeats
        for sequence, start, length in step.chunks:
            sequence.computed = start + length

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence that has ended, and free its blocks."""
        self.stop(sequence)
        self.release(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended from the running batch. It holds its blocks until `release` is called."""
        del self.running[sequence]
        self.finishing[sequence] = None
        sequence.status = SequenceStatus.FINISHING
        self.tables.free_outside_windows(sequence, sequence.computed)
        self._lengths.record(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that `stop` removed. No step in flight may read them any longer."""
        del self.finishing[sequence]
        sequence.status = SequenceStatus.FINISHED
        self.partial.remove(sequence)
        self._release(sequence)
        self._retry_in = 0
        self._batching.ended += 1

    def roll_back(self, sequence: Sequence, end: int) -> None:
        """Discard the last computed positions of a sequence after drafts were rejected, and free their blocks.

        Args:
            sequence: The sequence.
            end: The number of leading positions to keep. It includes at least the prompt.
        """
        sequence.computed_before_preemption = min(sequence.computed_before_preemption, end)
        sequence.computed = end
        if self.tables.truncate(sequence, end):
            self._retry_in = 0

    def has_room(self) -> bool:
        """Return True if blocks are available to run all running sequences in the next step without a preemption."""
        budget = self.config.max_num_batched_tokens
        # n tokens need at most n // block_size + 1 new blocks
        most = (len(self.running) + budget // self.pool.block_size) * self.tables.sizes.tables
        if self._max_blocks <= self.pool.total or most <= self.pool.available:
            return True
        self._free_outside_windows()
        missing = 0
        for sequence in self.running:
            if sequence.status is _AWAITING:
                continue
            length = min(sequence.remaining, budget)
            missing += max(0, self.tables.missing(sequence, sequence.computed + length))
            budget -= length
        return missing <= self.pool.available

    @property
    def cached_tokens(self) -> int:
        """The number of tokens for which the used blocks have room, averaged over cache groups."""
        return self.pool.used * self.pool.block_size // self.tables.sizes.tables

    def shared_blocks(self, chunks: list[Chunk]) -> int:
        """Return the number of block reads that can be saved, because an earlier chunk reads the same block.

        Only the first block table without a sliding window is counted.

        Args:
            chunks: Chunks of different sequences. Each sequence must hold blocks.
        """
        pool, sizes = self.pool, self.tables.sizes
        if not pool.shared or not sizes.unwindowed:
            return 0
        group = sizes.windows.index(None)
        if self.tables.have_windows:  # a sequence may hold a shared block without its parents
            tables = [s.tables[group][: sizes.blocks(start + n)] for s, start, n in chunks]
            return sum(map(len, tables)) - len(set().union(*tables))
        if len(chunks) == len(self.running) + len(self.finishing):
            return pool.shared // sizes.tables  # the chunks include all sequences that hold blocks
        counted = CountedBlocks(pool)
        return sum(counted.before(s.tables[group], sizes.blocks(start + n)) for s, start, n in chunks)

    def forget_waiting(self) -> None:
        """Drop all waiting sequences and their reservations."""
        while self.waiting:
            sequence = self.waiting.popleft()
            self._unreserve(sequence)
            self.partial.remove(sequence)
        self.pool.unreserve(self._next_prefix, self._added)
        self.partial.unreserve(self._next_partial, self._added)
        self._next_prefix, self._next_partial = [], None

    def check_integrity(self) -> None:
        """Check, in tests, that the blocks, reservations and states of all sequences are consistent.

        Raises:
            AssertionError: If blocks, reservations or states are inconsistent.
        """
        reservations = {s.arrival: s.hashes[: s.reserved] for s in self.waiting}
        reservations[self._added] = self._next_prefix
        each = ((s.arrival, self.partial.wanted(s)) for s in self.waiting)
        partial = {arrival: [block.content] for arrival, block in each if block is not None}
        partial |= {self._added: [self._next_partial.content]} if self._next_partial is not None else {}
        holders = [*self.running, *self.finishing]
        self.pool.check_integrity(
            (t for s in holders for t in self.tables.owned_blocks(s)), reservations, partial
        )
        assert not any(s.tables for s in self.waiting), "a waiting sequence holds blocks"
        assert not any(s.reserved for s in holders), "a running sequence holds a reservation"
        assert not any(s.placeholders or s.drafts for s in self.waiting), "a waiting sequence awaits tokens"
        assert all(s.status is SequenceStatus.WAITING for s in self.waiting), (
            "a waiting sequence is not WAITING"
        )
        runs = (SequenceStatus.RUNNING, SequenceStatus.AWAITING_TOKENS)
        assert all(s.status in runs for s in self.running), "a running sequence has another status"
        assert all(s.status is SequenceStatus.FINISHING for s in self.finishing), (
            "a sequence is not FINISHING"
        )
        for sequence in holders:
            self.tables.check(sequence)
        assert self._max_blocks == sum(map(self._blocks_bound, holders), self._step_blocks), (
            "the bound is off"
        )
        assert self.pool.used <= self._max_blocks + self.pool.pinned, (
            "more blocks are held than the bound says"
        )

    def _free_outside_windows(self) -> None:
        # Blocks that are needed after a rollback of drafts in flight are kept
        if self.tables.have_windows:
            for sequence in self.running:
                start = sequence.computed - (sequence.drafts + 1 if sequence.status is _AWAITING else 0)
                self.tables.free_outside_windows(sequence, start)

    def _schedule_running(self, step: Step, budget: int) -> int:
        # Performance-critical: runs over all rows of every step
        size, chunks, new_tuple, preempted = self.pool.block_size, step.chunks, tuple.__new__, False
        waiting, awaiting = SequenceStatus.WAITING, _AWAITING
        for sequence in list(self.running):
            if budget == 0 or (preempted and sequence.status is waiting):
                break  # the youngest ones may have been preempted
            if sequence.status is awaiting:
                continue
            start, end = sequence.computed, len(sequence.tokens) - sequence.drafts
            length = end - start
            if length > budget:
                length, end = budget, start + budget
            if end > len(sequence.tables[0]) * size:
                if not self._make_room(sequence, end, step):
                    break  # it was the youngest and preempted itself
                preempted = step.preemptions > 0
            chunks.append(new_tuple(Chunk, (sequence, start, length)))  # takes half the time of Chunk(…)
            if start < sequence.prompt_length:
                self._register(sequence, start, end)
            budget -= length
        return budget

    def _run_drafts(self, step: Step, budget: int) -> int:
        for index, (sequence, start, length) in enumerate(step.chunks):
            if not sequence.drafts:
                continue
            end = start + length
            free = self.tables.room(sequence) - end
            runs = min(sequence.drafts, budget, free) if length == sequence.remaining else 0
            sequence.drop_drafts(runs)
            sequence.drafting = runs > 0
            self._make_room(sequence, end + runs, step)
            step.chunks[index] = Chunk(sequence, start, length + runs)
            step.drafts += runs
            budget -= runs
        return budget

    def _make_room(self, sequence: Sequence, tokens: int, step: Step) -> bool:
        """Allocate the blocks for a sequence's first `tokens` tokens, preempting the youngest sequences if needed.

        Args:
            sequence: The sequence.
            tokens: The number of tokens.
            step: The step, in which preemptions are counted.

        Returns:
            False if `sequence` itself was preempted.
        """
        missing = -(-tokens // self.pool.block_size) - len(sequence.tables[0])
        if missing <= 0:  # the most frequent case
            return True
        missing *= len(sequence.tables)
        while missing > self.pool.available:
            victim, _ = self.running.popitem()
            self._preempt(victim)
            step.preemptions += 1
            if victim is sequence:
                return False
        self.tables.extend(sequence, missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert not sequence.placeholders, "has_room() must be called before a step is scheduled ahead"
        assert sequence.status is not _AWAITING, "a step in flight runs the sequence"
        sequence.status = SequenceStatus.WAITING
        sequence.drop_drafts()
        sequence.drafting = False
        self._reserve(sequence)  # before the release, which then keeps its blocks in the cache
        self._release(sequence)
        sequence.computed_before_preemption = max(sequence.computed_before_preemption, sequence.computed)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self._retry_in = 0

    def _reserve(self, sequence: Sequence) -> None:
        sequence.reserved = self._sharable_blocks(sequence)
        self.pool.reserve(sequence.block_hashes(sequence.reserved, self.pool.block_size), sequence.arrival)
        self.partial.reserve(self.partial.wanted(sequence), sequence.arrival)

    def _unreserve(self, sequence: Sequence) -> None:
        self.pool.unreserve(sequence.hashes[: sequence.reserved], sequence.arrival)
        sequence.reserved = 0
        self.partial.unreserve(self.partial.wanted(sequence), sequence.arrival)

    def _sharable_blocks(self, sequence: Sequence) -> int:
        if not self.config.prefix_caching:
            return 0
        return sequence.prompt_blocks(sequence.most_cached, self.pool.block_size)

    def _release(self, sequence: Sequence) -> None:
        self.partial.record_release(sequence)
        self.tables.release(sequence)
        self._max_blocks -= self._blocks_bound(sequence)

    def _blocks_bound(self, sequence: Sequence) -> int:
        return self.tables.sizes.among_others(sequence.max_length)

    def _register(self, sequence: Sequence, start: int, end: int) -> None:
        if self.config.prefix_caching:
            self.tables.register(sequence, start, end)

    def _admit(self, step: Step, budget: int) -> int:
        self._retry_in -= self._launched_steps
        if self._retry_in > 0 or self._should_delay_admission(budget):
            return budget
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if len(self.running) == self.config.max_num_seqs:
                self._stop_admitting()
                break
            if self.config.whole_prompts and len(sequence.tokens) > budget:
                break
            if self.config.most_adapters is not None and not self._has_adapter(sequence):
                break
            sources = self._share(sequence, budget)
            if sources is None:
                reading = self._prefill_steps(sequence, budget)
                self._retry_in = 0 if reading else RETRY_STEPS
                self.tables.unshare(sequence)
                sequence.computed = 0
                if not reading:
                    self._stop_admitting()
                break
            self._start(self.waiting.popleft(), step)
            length = min(sequence.remaining, budget)
            self._make_room(sequence, sequence.computed + length, step)
            self._copy(sequence, sources, step)
            step.chunks.append(Chunk(sequence, sequence.computed, length))
            self._register(sequence, sequence.computed, sequence.computed + length)
            budget -= length
        return budget

    def _has_adapter(self, sequence: Sequence) -> bool:
        name, most = sequence.request.params.adapter, self.config.most_adapters
        names = {running.request.params.adapter for running in self.running} - {""}
        return not name or name in names or most is None or len(names) < most

    def _share(self, sequence: Sequence, budget: int) -> list[int] | None:
        """Assign shared blocks to a waiting sequence, if the sequence fits into the memory.

        Args:
            sequence: The sequence.
            budget: The number of tokens that the step may still run.

        Returns:
            The blocks from which the sequence's partial block is copied, one per cache group; empty if nothing is
            copied. None if the sequence does not fit.
        """
        self.tables.share(sequence)
        shared_tokens = self.tables.tokens(sequence)
        sources, wanted = self.partial.acquire(sequence), self.partial.wanted(sequence)
        sequence.computed = shared_tokens + (wanted.tokens if sources and wanted is not None else 0)
        if self._fits(sequence, budget):
            return sources
        if sources:  # unpinned before its shared blocks, because later blocks must be evicted first
            self.partial.release()
            sequence.computed = shared_tokens
            if not self.running and not self.finishing:  # no sequence will free blocks for them
                return []
        return None

    def _copy(self, sequence: Sequence, sources: list[int], step: Step) -> None:
        self.partial.record_admission(sequence)
        wanted = self.partial.wanted(sequence)
        if not sources or wanted is None:
            return
        step.copies += self.partial.copies(sequence, sources)
        step.copied_tokens += wanted.tokens
        self.tables.free_outside_windows(sequence, sequence.computed)  # the copied tokens move the windows

    def _should_delay_admission(self, budget: int) -> bool:
        if self.pool.available - self._available_when_stopped >= self.pool.total // IDLE:
            return False
        return self._batching.should_wait(
            running=len(self.running),
            waiting=len(self.waiting),
            cached=self.cached_tokens,
            budget=budget,
            prompt_tokens=lambda n: sum(map(self._unshared, islice(self.waiting, n))),
        )

    def _stop_admitting(self) -> None:
        self._batching.stop(len(self.running))
        self._available_when_stopped = self.pool.available

    def _unshared(self, sequence: Sequence) -> int:
        found = self.tables.cached_tokens(sequence)
        return len(sequence.tokens) - found - self.partial.match(sequence, found // self.pool.block_size)

    def _fits(self, sequence: Sequence, budget: int) -> bool:
        if self._chunk_blocks(sequence, budget) > self.pool.available:
            return False
        if self._max_blocks + self._blocks_bound(sequence) <= self.pool.total:
            return True
        if not self.running and not self.finishing:
            return True  # no other sequence runs, and `add` has checked that it fits
        self._lengths.update(self.running)
        ends = [(self._steps_left(s), s) for s in self.running]
        ends += [(0, s) for s in self.finishing]
        ends.append((self._steps_left(sequence) + self._prefill_steps(sequence, budget), sequence))
        head_room = 0 if sequence.exact else self.pool.total // HEAD_ROOM
        return peak_blocks(ends, self.tables) + self._prefill_blocks(sequence) <= self.pool.total - head_room

    def _prefill_blocks(self, sequence: Sequence) -> int:
        if not self.tables.have_windows:
            return 0
        unread = [(len(s.tokens), s.remaining) for s in self.running if s.remaining > 1]
        unread.append((len(sequence.tokens), sequence.remaining))
        most = self.config.max_num_batched_tokens
        return sum(self.tables.sizes.of_chunk(tokens, min(left, most)) for tokens, left in unread)

    def _chunk_blocks(self, sequence: Sequence, budget: int) -> int:
        return self.tables.missing(sequence, min(len(sequence.tokens), sequence.computed + budget))

    def _steps_left(self, sequence: Sequence) -> int:
        # The last token of a sequence never runs
        return max(0, self._lengths.expected_length(sequence) - len(sequence.tokens) - 1)

    def _prefill_steps(self, sequence: Sequence, budget: int) -> int:
        left = sequence.remaining - budget
        return -(-left // max(1, self.config.max_num_batched_tokens - len(self.running))) if left > 0 else 0

    def _start(self, sequence: Sequence, step: Step) -> None:
        self._unreserve(sequence)
        step.admitted.append(sequence)
        # Tokens that the sequence itself or another branch of its request has computed before are not savings
        saved = (
            max(0, sequence.computed - sequence.computed_before_preemption) if sequence.begins_request else 0
        )
        sequence.cached_tokens += saved
        step.cached_tokens += saved
        self.running[sequence] = None
        sequence.status = SequenceStatus.RUNNING
        self._max_blocks += self._blocks_bound(sequence)
