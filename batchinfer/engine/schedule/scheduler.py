"""Chooses the sequences of each step, and how many tokens each of them runs. Ints only."""

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

# One in this many blocks stays free of estimates (docs/measurements/scheduling.md)
HEAD_ROOM = 20
# A row that did not fit is looked at again when another has ended, or after this many steps: while it waits the others
# get closer to their ends. A forecast for 256 rows takes 0.2 to 0.5 ms, so this hides it.
RETRY_STEPS = 8

_AWAITING = SequenceStatus.AWAITING_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step.

    `admission_costs`: what decides when places that have come free are filled; None: as soon as a sequence fits.

    `least_copied`: tokens that it pays to copy from the middle of another sequence's block; None: none.

    `whole_prompts`: a prompt runs in one step, as that of an encoder has to, whose tokens see later ones. Then nothing
    is shared, as what a prompt's beginning gives depends on its end.

    `most_adapters`: that running sequences may have; None: any number.
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
            raise ValueError(f"prompts that run as a whole share nothing: {self}")


class Chunk(NamedTuple):
    """Tokens [start, start + length) of a sequence run in this step. A tuple, as each step makes hundreds."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled behind the chunk; see `sampling_chunks`."""
        return sampling_chunks([self])[0]

    @property
    def recomputed(self) -> int:
        """The number of tokens that had been computed before a preemption."""
        start, before = self.start, self.sequence.computed_before_preemption
        return min(start + self.length, before) - start if start < before else 0

    @property
    def decodes(self) -> int:
        """The number of tokens behind the prompt that run for the first time. Recomputation after a preemption ends
        with one."""
        sequence = self.sequence
        return max(0, self.end - max(self.start, sequence.computed_before_preemption, sequence.prompt_length))

    @property
    def fresh(self) -> Chunk:
        """The tokens that run for the first time; its length may be 0."""
        again = self.recomputed
        return Chunk(self.sequence, self.start + again, self.length - again)


def sampling_chunks(chunks: list[Chunk]) -> list[bool]:
    """Say of each chunk whether tokens are sampled behind it: it reaches its sequence's end, and one more may follow.

    Written for speed: it passes over every row of every step."""
    return [start + length == len(s.tokens) < s.max_length for s, start, length in chunks]


@dataclass(slots=True)
class Step:
    """One step, as scheduled."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # which of them waited before
    cached_tokens: int = 0  # prompt tokens that sequences admitted now found in the cache
    preemptions: int = 0
    # Made once K and V of the chunks are stored, before attention
    copies: list[Copy] = field(default_factory=list)
    copied_tokens: int = 0  # in each layer
    drafts: int = 0  # that its chunks run
    # Steps that are launched at once, in each of which every chunk but the shortest runs a token
    repeats: int = 1


class Scheduler:
    """Continuous batching: running sequences first, oldest first; then new ones, in the order in which they were added,
    while budget and memory last.

    Memory lasts if all that runs can end without a preemption, as far as lengths are known (`peak_blocks`,
    `OutputLengths`). A waiting sequence reserves the prefix blocks that it could share; the reservation ends when
    it is admitted, and a preemption restores it.

    A chunk's full prompt blocks are findable as soon as it is scheduled, so that a sequence admitted later in the
    same step shares them: in every layer, all K and V of a step are written before any attention reads them. Where its
    prompt leaves such a block in the middle, it gets a copy of what they have in common (`PartialBlocks`).

    `windows`: of the cache groups, whose block tables each sequence has; see `BlockTables`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        lengths: OutputLengths | None = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        self.config = config
        self._most_tokens = config.max_num_batched_tokens  # of a step, where memory lasts
        self.pool = pool
        self.tables = BlockTables(pool, windows)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # oldest first; a dict, because any of them may leave
        # Not scheduled any more, but an in-flight step still reads their blocks
        self.finishing: dict[Sequence, None] = {}
        self._lengths = lengths or OutputLengths()
        self._added = 0
        self.partial = PartialBlocks(self.tables, config.least_copied if config.prefix_caching else None)
        self._next_prefix: list[bytes] = []  # contents that the request to be added next will look for
        self._next_partial: PartialBlock | None = None
        self._for_chunks = self.tables.sizes.for_chunks(config.max_num_batched_tokens)
        # Blocks of all that runs or leaves, if none shares and each grows to its max_length, and of a step's chunks
        self._most = self._for_chunks
        self._patience = 0  # steps for which the first in the queue is not looked at: it did not fit
        self._batching = BatchedAdmission(config.admission_costs)
        self._available_at_stop = 0  # blocks that were available when admission stopped
        self._launched_steps = 1  # since the one before was scheduled

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if the whole cache could not hold it, or no step its whole prompt."""
        if self.config.whole_prompts and sequence.prompt_length > self._most_tokens:
            raise ValueError(
                f"a prompt of {sequence.prompt_length} tokens, which run in one step, and steps of {self._most_tokens}"
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
        """Reserve the prefix that the next request shares with this one: the queue may be empty until it comes."""
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
        """Limit the tokens of each later step further than the configuration does; None: no further."""
        tokens = self._most_tokens if most is None else min(most, self._most_tokens)
        if tokens != self.config.max_num_batched_tokens:
            self.config = replace(self.config, max_num_batched_tokens=tokens)

    def schedule(self, drafted: bool = False) -> Step:
        """Decide the next step. It is empty only when there is nothing to run, or all of it awaits tokens. `drafted`:
        whether sequences may have drafts."""
        step = Step()
        self._leave_behind()
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if drafted:
            budget = self._run_drafts(step, budget)
        if not step.preemptions:
            budget = self._admit(step, budget)
        self._batching.read = self.config.max_num_batched_tokens - budget - len(step.chunks) - step.drafts
        return step

    def run_on(self, step: Step, most: int) -> list[int] | None:
        """Reserve blocks so that the sequences of a step that was scheduled last, and only decodes, can run on for up
        to `most` tokens before their ends are known; how many each runs: no more than it may get. None where there are
        too few blocks, or each gets one token only. All together run no more tokens than a step may have, as blocks of
        windows are counted for these."""
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

    def launched(self, step: Step) -> None:
        """Move the sequences of a step on, which was scheduled last and is launched."""
        self.partial.launched()
        self._launched_steps = self._batching.steps = step.repeats
        for sequence, start, length in step.chunks:
            sequence.computed = start + length

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence that is done and free its blocks."""
        self.stop(sequence)
        self.release(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones. It keeps its blocks until `release`."""
        del self.running[sequence]
        self.finishing[sequence] = None
        sequence.status = SequenceStatus.FINISHING
        self.tables.leave_behind(sequence, sequence.computed)
        self._lengths.record(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that finishes, once no in-flight step reads them."""
        del self.finishing[sequence]
        sequence.status = SequenceStatus.FINISHED
        self.partial.remove(sequence)
        self._release(sequence)
        self._patience = 0
        self._batching.ended += 1

    def take_back(self, sequence: Sequence, end: int) -> None:
        """Keep the first `end` positions of a sequence, which lie behind its prompt or end it: the others were computed
        for tokens that were rejected. Frees the blocks beyond."""
        sequence.computed_before_preemption = min(sequence.computed_before_preemption, end)
        sequence.computed = end
        if self.tables.cut(sequence, end):
            self._patience = 0

    def has_room(self) -> bool:
        """Whether the next step can run every running sequence without a preemption."""
        budget = self.config.max_num_batched_tokens
        # n tokens take n // block_size blocks more, and one if they do not begin with a block
        most = (len(self.running) + budget // self.pool.block_size) * self.tables.sizes.tables
        if self._most <= self.pool.total or most <= self.pool.available:
            return True
        self._leave_behind()
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
        """Count the tokens for which blocks are held, in each cache group."""
        return self.pool.used * self.pool.block_size // self.tables.sizes.tables

    def shared_blocks(self, chunks: list[Chunk]) -> int:
        """Count how often a block table that keeps all tokens names a block, among those that these chunks read, that
        the table of an earlier chunk names, too. The chunks are of distinct sequences that hold blocks."""
        pool, sizes = self.pool, self.tables.sizes
        if not pool.shared or not sizes.whole:
            return 0
        group = sizes.windows.index(None)
        if self.tables.have_windows:  # then a sequence may hold a shared block without its parents
            tables = [s.tables[group][: sizes.blocks(start + n)] for s, start, n in chunks]
            return sum(map(len, tables)) - len(set().union(*tables))
        if len(chunks) == len(self.running) + len(self.finishing):
            return pool.shared // sizes.tables  # nobody else holds any, and what is shared was run
        counted = CountedBlocks(pool)
        return sum(counted.before(s.tables[group], sizes.blocks(start + n)) for s, start, n in chunks)

    def forget_waiting(self) -> None:
        """Drop the waiting sequences and their reservations."""
        while self.waiting:
            sequence = self.waiting.popleft()
            self._unreserve(sequence)
            self.partial.remove(sequence)
        self.pool.unreserve(self._next_prefix, self._added)
        self.partial.unreserve(self._next_partial, self._added)
        self._next_prefix, self._next_partial = [], None

    def check_integrity(self) -> None:
        """Raises AssertionError when the block accounting is off."""
        reservations = {s.arrival: s.hashes[: s.reserved] for s in self.waiting}
        reservations[self._added] = self._next_prefix
        each = ((s.arrival, self.partial.wanted(s)) for s in self.waiting)
        partial = {arrival: [block.content] for arrival, block in each if block is not None}
        partial |= {self._added: [self._next_partial.content]} if self._next_partial is not None else {}
        holders = [*self.running, *self.finishing]
        self.pool.check_integrity((t for s in holders for t in self.tables.held(s)), reservations, partial)
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
        assert self._most == sum(map(self._bound, holders), self._for_chunks), "the bound is off"
        assert self.pool.used <= self._most + self.pool.held, "more blocks are held than the bound says"

    def _leave_behind(self) -> None:
        """Free what the windows of running sequences have left. Drafts of an in-flight step, and the token before them,
        may be taken back."""
        if self.tables.have_windows:
            for sequence in self.running:
                start = sequence.computed - (sequence.drafts + 1 if sequence.status is _AWAITING else 0)
                self.tables.leave_behind(sequence, start)

    def _schedule_running(self, step: Step, budget: int) -> int:
        """Written for speed: it passes over every row of every step."""
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
                    break  # it was the youngest, and preempted itself
                preempted = step.preemptions > 0
            chunks.append(new_tuple(Chunk, (sequence, start, length)))  # half of what Chunk(…) takes
            if start < sequence.prompt_length:
                self._register(sequence, start, end)
            budget -= length
        return budget

    def _run_drafts(self, step: Step, budget: int) -> int:
        """Lengthen chunks by their drafts, as far as budget and free blocks last; drop the other drafts."""
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
        """Allocate blocks for this many tokens, preempting the youngest if needed. False: this one was preempted."""
        missing = -(-tokens // self.pool.block_size) - len(sequence.tables[0])
        if missing <= 0:  # nearly always
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
        assert not sequence.placeholders, "who looks ahead asks `has_room` first"
        assert sequence.status is not _AWAITING, "an in-flight step runs it"
        sequence.status = SequenceStatus.WAITING
        sequence.drop_drafts()
        sequence.drafting = False
        self._reserve(sequence)  # first: what is released is then kept for it
        self._release(sequence)
        sequence.computed_before_preemption = max(sequence.computed_before_preemption, sequence.computed)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self._patience = 0

    def _reserve(self, sequence: Sequence) -> None:
        sequence.reserved = self._sharable(sequence)
        self.pool.reserve(sequence.block_hashes(sequence.reserved, self.pool.block_size), sequence.arrival)
        self.partial.reserve(self.partial.wanted(sequence), sequence.arrival)

    def _unreserve(self, sequence: Sequence) -> None:
        self.pool.unreserve(sequence.hashes[: sequence.reserved], sequence.arrival)
        sequence.reserved = 0
        self.partial.unreserve(self.partial.wanted(sequence), sequence.arrival)

    def _sharable(self, sequence: Sequence) -> int:
        """How many prompt blocks it could share. Tokens behind which something is asked have to run."""
        if not self.config.prefix_caching:
            return 0
        return sequence.prompt_blocks(sequence.most_cached, self.pool.block_size)

    def _release(self, sequence: Sequence) -> None:
        self.partial.released(sequence)
        self.tables.release(sequence)
        self._most -= self._bound(sequence)

    def _bound(self, sequence: Sequence) -> int:
        """Count the blocks that it holds at most, apart from its share of `_for_chunks`."""
        return self.tables.sizes.among_others(sequence.max_length)

    def _register(self, sequence: Sequence, start: int, end: int) -> None:
        """Make the prompt blocks findable that the chunk [start, end) completes."""
        if self.config.prefix_caching:
            self.tables.register(sequence, start, end)

    def _admit(self, step: Step, budget: int) -> int:
        """Admit waiting sequences while budget and memory last; what is left of the budget."""
        self._patience -= self._launched_steps
        if self._patience > 0 or self._waits_for_others(budget):
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
                reading = self._reading(sequence, budget)
                self._patience = 0 if reading else RETRY_STEPS
                self.tables.give_back(sequence)
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
        """Whether its adapter is that of a running sequence, or one more may be."""
        name, most = sequence.request.params.adapter, self.config.most_adapters
        names = {running.request.params.adapter for running in self.running} - {""}
        return not name or name in names or most is None or len(names) < most

    def _share(self, sequence: Sequence, budget: int) -> list[int] | None:
        """Give a waiting sequence the blocks that it shares; those of which it copies the beginning; None: it does not
        fit."""
        self.tables.share(sequence)
        whole = self.tables.tokens(sequence)
        sources, wanted = self.partial.acquire(sequence), self.partial.wanted(sequence)
        sequence.computed = whole + (wanted.tokens if sources and wanted is not None else 0)
        if self._fits(sequence, budget):
            return sources
        if sources:  # before its blocks are given back: what follows them is to be evicted first
            self.partial.release()
            sequence.computed = whole
            if not self.running and not self.finishing:  # nobody will make room for them
                return []
        return None

    def _copy(self, sequence: Sequence, sources: list[int], step: Step) -> None:
        """Fill the beginning of its first block of its own from these, if there are any."""
        self.partial.admitted(sequence)
        wanted = self.partial.wanted(sequence)
        if not sources or wanted is None:
            return
        step.copies += self.partial.copies(sequence, sources)
        step.copied_tokens += wanted.tokens
        self.tables.leave_behind(sequence, sequence.computed)  # windows begin so much later

    def _waits_for_others(self, budget: int) -> bool:
        """Whether places that have come free are filled later, with those of others: see BatchedAdmission."""
        if self.pool.available - self._available_at_stop >= self.pool.total // IDLE:
            return False
        return self._batching.waits(
            running=len(self.running),
            waiting=len(self.waiting),
            cached=self.cached_tokens,
            budget=budget,
            brought=lambda n: sum(map(self._unshared, islice(self.waiting, n))),
        )

    def _stop_admitting(self) -> None:
        """Note that there is no room until others have ended."""
        self._batching.stop(len(self.running))
        self._available_at_stop = self.pool.available

    def _unshared(self, sequence: Sequence) -> int:
        """Count the tokens of a waiting sequence that are not in the cache."""
        found = self.tables.found(sequence)
        return len(sequence.tokens) - found - self.partial.match(sequence, found // self.pool.block_size)

    def _fits(self, sequence: Sequence, budget: int) -> bool:
        """Whether its chunk fits now, and it and the running sequences are expected to end without a preemption."""
        if self._chunk_blocks(sequence, budget) > self.pool.available:
            return False
        if self._most + self._bound(sequence) <= self.pool.total:
            return True
        if not self.running and not self.finishing:
            return True  # `add` has seen to it, and it need not share with anyone's wrong estimate
        self._lengths.survey(self.running)
        ends = [(self._steps_left(s), s) for s in self.running]
        ends += [(0, s) for s in self.finishing]
        ends.append((self._steps_left(sequence) + self._reading(sequence, budget), sequence))
        head_room = 0 if sequence.exact else self.pool.total // HEAD_ROOM
        return peak_blocks(ends, self.tables) + self._of_chunks(sequence) <= self.pool.total - head_room

    def _of_chunks(self, sequence: Sequence) -> int:
        """Count the blocks that chunks of prompts take at most, its own and those of running sequences, beyond the
        forecast's."""
        if not self.tables.have_windows:
            return 0
        unread = [(len(s.tokens), s.remaining) for s in self.running if s.remaining > 1]
        unread.append((len(sequence.tokens), sequence.remaining))
        most = self.config.max_num_batched_tokens
        return sum(self.tables.sizes.of_chunk(tokens, min(left, most)) for tokens, left in unread)

    def _chunk_blocks(self, sequence: Sequence, budget: int) -> int:
        """Count the blocks that its first chunk takes apart from those that it shares."""
        return self.tables.missing(sequence, min(len(sequence.tokens), sequence.computed + budget))

    def _steps_left(self, sequence: Sequence) -> int:
        """Count the steps after this one, if this one runs the rest of its prompt. The last token is sampled, never
        run."""
        return max(0, self._lengths.longest(sequence) - len(sequence.tokens) - 1)

    def _reading(self, sequence: Sequence, budget: int) -> int:
        """Count the further steps that its prompt takes if `budget` tokens of it run in this one."""
        left = sequence.remaining - budget
        return -(-left // max(1, self.config.max_num_batched_tokens - len(self.running))) if left > 0 else 0

    def _start(self, sequence: Sequence, step: Step) -> None:
        self._unreserve(sequence)
        step.admitted.append(sequence)
        # What it had computed before a preemption was run once, and saves nothing; nor does what another branch of its
        # request has run
        saved = (
            max(0, sequence.computed - sequence.computed_before_preemption) if sequence.begins_request else 0
        )
        sequence.cached_tokens += saved
        step.cached_tokens += saved
        self.running[sequence] = None
        sequence.status = SequenceStatus.RUNNING
        self._most += self._bound(sequence)
