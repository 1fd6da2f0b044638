"""Who runs in the next step, and with how many tokens. Ints only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from batchinfer.engine.kv_cache import BlockPool
from batchinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + length) of a sequence run in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that its next token can be sampled."""
        return self.end == len(self.sequence)

    @property
    def is_decode(self) -> bool:
        return self.length == 1 and self.start >= self.sequence.prompt_length and not self.recomputed

    @property
    def recomputed(self) -> int:
        """Tokens of this chunk that had been computed before a preemption."""
        return max(0, min(self.end, self.sequence.high_water) - self.start)


@dataclass(slots=True)
class Step:
    """What `schedule` decided."""

    chunks: list[Chunk] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens that sequences admitted now found in the cache
    preemptions: int = 0


class Scheduler:
    """Continuous batching: running sequences first, oldest first; then new ones while budget and blocks last.

    A chunk's full prompt blocks are findable as soon as it is scheduled, so that a sequence admitted later in the
    same step shares them: in every layer, all K and V of a step are written before any attention reads them.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        if config.max_num_seqs < 1 or config.max_num_batched_tokens < 1:
            raise ValueError(f"both limits must be at least 1: {config}")
        self.config = config
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that the whole cache could not hold."""
        most = self.pool.blocks_for(sequence.max_length)
        if most > self.pool.total:
            raise ValueError(
                f"{sequence.max_length} tokens need {most} KV blocks and there are {self.pool.total}; "
                "raise engine.kv_memory or lower max_tokens"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """The next step. Empty only when nothing is left to do."""
        step = Step()
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if not step.preemptions:
            self._admit(step, budget)
        return step

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done: its blocks go back."""
        self.running.remove(sequence)
        self._release(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError when the block accounting is off."""
        self.pool.check_integrity(s.blocks for s in self.running)
        assert not any(s.blocks for s in self.waiting), "a waiting sequence holds blocks"
        for sequence in self.running:
            assert len(sequence.blocks) >= self.pool.blocks_for(sequence.computed), (
                "computed tokens without block"
            )

    def _schedule_running(self, step: Step, budget: int) -> int:
        done = 0
        while done < len(self.running) and budget > 0:
            sequence = self.running[done]
            length = min(sequence.remaining, budget)
            if not self._make_room(sequence, sequence.computed + length, step):
                break  # it was the youngest, and preempted itself
            self._run(sequence, length, step)
            budget -= length
            done += 1
        return budget

    def _make_room(self, sequence: Sequence, tokens: int, step: Step) -> bool:
        """Blocks for so many tokens, by preempting the youngest while needed; False: it was preempted itself."""
        missing = self.pool.blocks_for(tokens) - len(sequence.blocks)
        while missing > self.pool.available:
            victim = self.running.pop()
            self._preempt(victim)
            step.preemptions += 1
            if victim is sequence:
                return False
        sequence.blocks.extend(self.pool.allocate() for _ in range(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _run(self, sequence: Sequence, length: int, step: Step) -> None:
        chunk = Chunk(sequence, sequence.computed, length)
        step.chunks.append(chunk)
        if self.config.prefix_caching:
            self._register(chunk)

    def _register(self, chunk: Chunk) -> None:
        sequence, size = chunk.sequence, self.pool.block_size
        first, last = (sequence.prompt_blocks(n, size) for n in (chunk.start, chunk.end))
        for index in range(first, last):
            self.pool.register(sequence.blocks[index], sequence.block_hash(index, size))

    def _admit(self, step: Step, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            shared = list(self._shared_blocks(sequence)) if self.config.prefix_caching else []
            idle = sum(self.pool.is_idle(b) for b in shared)
            missing = self.pool.blocks_for(len(sequence)) - len(shared)
            if missing + idle > self.pool.available:
                return  # its whole prompt has to fit: admitted piecemeal, it would only be preempted
            self._start(self.waiting.popleft(), shared, step)
            length = min(sequence.remaining, budget)
            self._make_room(sequence, sequence.computed + length, step)
            self._run(sequence, length, step)
            budget -= length

    def _shared_blocks(self, sequence: Sequence) -> Iterator[int]:
        """Cached blocks of its prompt, from the start on. The last token is never among them: it has to run."""
        most = sequence.prompt_blocks(len(sequence) - 1, self.pool.block_size)
        for index in range(most):
            block = self.pool.find(sequence.block_hash(index, self.pool.block_size))
            if block is None:
                return
            yield block

    def _start(self, sequence: Sequence, shared: list[int], step: Step) -> None:
        self.pool.acquire(shared)
        sequence.blocks = shared
        sequence.computed = len(shared) * self.pool.block_size
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed
            step.cached_tokens += sequence.computed
        self.running.append(sequence)
