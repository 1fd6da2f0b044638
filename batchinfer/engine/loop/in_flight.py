"""The step that was launched and whose tokens are awaited, and what its sequences take of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from batchinfer.core.request import FinishReason, RowError
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.draft_tree import child_with
from batchinfer.engine.schedule.pooled_states import asked_chunks
from batchinfer.engine.schedule.scheduler import Chunk, Step, sampling_chunks
from batchinfer.engine.schedule.scored_rows import prompt_chunks
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.cost import StepShape


class End(NamedTuple):
    """The end of a sequence: why, and with what text or error."""

    reason: FinishReason
    text_length: int | None = None
    error: RowError | None = None
    cut: bool = False  # an error, because the answer had no room to become whole

    @property
    def for_length(self) -> bool:
        """Whether max_tokens or the model's context ended it."""
        return self.cut or self.reason == "length"


@dataclass(slots=True, eq=False)
class AcceptedTokens:
    """The tokens that a sequence took of those that a step gave it."""

    sequence: Sequence
    known: int  # its tokens before
    drafts: array[int]  # that the step ran
    parents: list[int] = field(default_factory=list)  # of these, where they are a tree
    path: list[int] = field(default_factory=list)  # which of them were right, one behind the other
    count: int = 0  # tokens taken, one that is none for want of finite logits included
    end: End | None = None

    @property
    def right(self) -> int:
        """Count the drafts that were right."""
        return len(self.path)

    def add(self, token: int) -> None:
        """Count a token, and compare it with the drafts at its place."""
        if self.count == self.right:
            found = child_with(self.drafts, self.parents, self.path[-1] if self.path else -1, token)
            if found is not None:
                self.path.append(found)
        self.count += 1

    @property
    def useful_end(self) -> int:
        """Positions that are computed for the tokens that it has; the last token is still to be run."""
        return self.known + min(self.right, max(0, self.count - 1))

    @property
    def rejected(self) -> int:
        """Positions that were computed for nothing."""
        return self.known + len(self.drafts) - self.useful_end


@dataclass(slots=True, eq=False)
class InFlight:
    """A step between its launch and the arrival of its tokens."""

    scheduled: Step
    sampling: list[Sequence]  # those that get tokens, in order
    completed: list[Sequence]  # those that end with this step and get none
    asked: list[Chunk]  # those whose hidden states or scores it gives, in order
    read: list[Chunk]  # those of whose prompts it gives log-probabilities, in order
    useful: list[Chunk]  # without tokens that are recomputed after a preemption
    decodes: int
    recomputed: int
    reads: bool  # whether it runs tokens of prompts, or any again
    began_s: float
    launched_s: float = 0.0
    result: Launched | None = None
    # Of what is useful in each of the steps that were launched at once, without what was dropped
    shapes: list[StepShape] = field(default_factory=list)
    # Of sequences that did not just get the next token
    irregular: list[AcceptedTokens] = field(default_factory=list)
    dropped: set[Sequence] = field(default_factory=set)  # sequences that had ended when it was launched
    # Of sequences that ended before the last of the steps that they ran at once: how many tokens they took
    cut: dict[Sequence, int] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """Count the steps that were launched at once."""
        return self.scheduled.repeats

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence runs a single token for the first time, behind its prompt, and gets another one."""
        return not self.reads and self.decodes == len(self.scheduled.chunks) == len(self.sampling)

    def run_on(self, runs: list[int]) -> None:
        """Have each sequence run so many tokens one behind the other, of which the step that was scheduled is the
        first."""
        new_tuple, chunks = tuple.__new__, zip(self.scheduled.chunks, runs, strict=True)
        self.useful = [
            new_tuple(Chunk, (s, start, n)) for (s, start, _), n in chunks
        ]  # half of what Chunk(…) takes
        self.scheduled.chunks = self.useful
        self.decodes = sum(runs)

    @property
    def useful_runs(self) -> list[Chunk]:
        """Return of each sequence the tokens that it ran for use in steps that were launched at once."""
        chunks, cut, dropped = self.useful, self.cut, self.dropped
        if dropped:
            chunks = [c for c in chunks if c[0] not in dropped]
        return [Chunk(s, start, cut.get(s, n)) for s, start, n in chunks] if cut else chunks

    @property
    def scored_positions(self) -> int:
        """Count the positions behind which tokens are scored."""
        asked = (
            (c.end, max(c.start, c.sequence.scored.branch.first)) for c in self.asked if c.sequence.scored
        )
        of_prompts = (
            c.sequence.prompt_scores.branch.positions(c.start, c.end)
            for c in self.read
            if c.sequence.prompt_scores
        )
        return sum(end - first for end, first in asked) + sum(map(len, of_prompts))

    @classmethod
    def of(cls, step: Step, began_s: float) -> InFlight:
        """Read the chunks before launching, which moves the sequences on."""
        chunks, samples = step.chunks, sampling_chunks(step.chunks)
        # A chunk that begins behind its prompt and behind what was computed before a preemption only decodes
        reading = [c for c in chunks if c[1] < c[0].prompt_length or c[1] < c[0].computed_before_preemption]
        recomputed = sum(c.recomputed for c in reading)
        silent = [c for c, one in zip(chunks, samples, strict=True) if not one] if False in samples else []
        return cls(
            scheduled=step,
            sampling=[c[0] for c in compress(chunks, samples)],
            completed=[c.sequence for c in silent if c.end == len(c.sequence)],
            asked=asked_chunks(silent) if silent else [],
            read=prompt_chunks(reading) if reading else [],
            useful=[c.fresh for c in chunks if c.recomputed < c.length] if recomputed else chunks,
            decodes=sum([c[2] for c in chunks]) - sum(c.length - c.decodes for c in reading),
            recomputed=recomputed,
            reads=bool(reading),
            began_s=began_s,
        )
