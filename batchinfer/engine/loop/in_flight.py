"""A launched step, and the tokens that its sequences accept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from batchinfer.core.request import FinishReason, RowError
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.draft_tree import find_child
from batchinfer.engine.schedule.pooled_states import output_chunks_of
from batchinfer.engine.schedule.scheduler import Chunk, Step, sampling_chunks
from batchinfer.engine.schedule.scored_rows import prompt_chunks
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.cost import StepShape


class End(NamedTuple):
    """How a sequence ended.

    Attributes:
        reason: Why it ended.
        text_length: The length of its text before a stop string, in characters, or None without a stop string.
        error: Its error, if it failed.
        cut: True if the error is that the length limit cut the answer before it was complete under its constraint.
    """

    reason: FinishReason
    text_length: int | None = None
    error: RowError | None = None
    cut: bool = False

    @property
    def for_length(self) -> bool:
        """True if the sequence ended because it reached max_tokens or the model's context length."""
        return self.cut or self.reason == "length"


@dataclass(slots=True, eq=False)
class AcceptedTokens:
    """The result of verifying the drafts of a sequence in a step.

    Attributes:
        sequence: The sequence.
        length: The length of the sequence before the step, without drafts.
        drafts: The drafts that the step ran.
        parents: The index of each draft's parent if they are a tree, or -1; empty for a chain.
        path: The indices of the accepted drafts, in order.
        count: The number of tokens that the sequence got, including a token that is missing because logits were not
            finite.
        end: How the sequence ended, if it did.
    """

    sequence: Sequence
    length: int
    drafts: array[int]
    parents: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    count: int = 0
    end: End | None = None

    @property
    def accepted(self) -> int:
        """The number of drafts that were accepted."""
        return len(self.path)

    def add(self, token: int) -> None:
        """Record the next token that the sequence got. It accepts the draft at its position if it is the same token."""
        if self.count == self.accepted:
            found = find_child(self.drafts, self.parents, self.path[-1] if self.path else -1, token)
            if found is not None:
                self.path.append(found)
        self.count += 1

    @property
    def useful_end(self) -> int:
        """The number of leading positions of the sequence with valid keys and values, after rejected drafts.

        The newest token is not included, because it has not run yet.
        """
        return self.length + min(self.accepted, max(0, self.count - 1))

    @property
    def rejected(self) -> int:
        """The number of positions that the step computed for rejected drafts."""
        return self.length + len(self.drafts) - self.useful_end


@dataclass(slots=True, eq=False)
class InFlight:
    """A step between its launch and the arrival of its tokens.

    Attributes:
        scheduled: The scheduled step.
        sampling: The sequences that get tokens, in order.
        completed: The sequences that end with this step without getting a token.
        output_chunks: The chunks with hidden states or scores of continuations as output, in order.
        prompt_chunks: The chunks with log-probabilities of prompt tokens as output, in order.
        useful: The chunks, without the tokens that are recomputed after a preemption.
        decodes: The number of generated tokens that run for the first time.
        recomputed: The number of tokens that are recomputed after a preemption.
        reads: True if the step runs prompt tokens or recomputes any tokens.
        began_s: When its scheduling began, in seconds since the engine's start.
        launched_s: When its launch began, in seconds since the engine's start.
        result: Its results, which may still be computed.
        shapes: The shape of its useful work, per step of a multi-step launch.
        irregular: The results of sequences that had drafts, or got another number of tokens than one.
        dropped: The sequences that had ended before this step's launch, which was only known later.
        cut: The number of tokens of each sequence that ended before the last step of a multi-step launch.
    """

    scheduled: Step
    sampling: list[Sequence]
    completed: list[Sequence]
    output_chunks: list[Chunk]
    prompt_chunks: list[Chunk]
    useful: list[Chunk]
    decodes: int
    recomputed: int
    reads: bool
    began_s: float
    launched_s: float = 0.0
    result: Launched | None = None
    shapes: list[StepShape] = field(default_factory=list)
    irregular: list[AcceptedTokens] = field(default_factory=list)
    dropped: set[Sequence] = field(default_factory=set)
    cut: dict[Sequence, int] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """The number of decode steps that are launched together."""
        return self.scheduled.repeats

    @property
    def only_decodes(self) -> bool:
        """True if each sequence of the step runs one generated token for the first time, and gets another token."""
        return not self.reads and self.decodes == len(self.scheduled.chunks) == len(self.sampling)

    def extend_runs(self, runs: list[int]) -> None:
        """Extend the step to a multi-step launch, in which sequence i takes part in the first `runs[i]` steps."""
        new_tuple, chunks = tuple.__new__, zip(self.scheduled.chunks, runs, strict=True)
        # Takes half the time of Chunk(…)
        self.useful = [new_tuple(Chunk, (s, start, n)) for (s, start, _), n in chunks]
        self.scheduled.chunks = self.useful
        self.decodes = sum(runs)

    @property
    def useful_runs(self) -> list[Chunk]:
        """The tokens that each sequence of a multi-step launch needed.

        Left out are sequences that had ended before the launch, and tokens after the end of an answer.
        """
        chunks, cut, dropped = self.useful, self.cut, self.dropped
        if dropped:
            chunks = [c for c in chunks if c[0] not in dropped]
        return [Chunk(s, start, cut.get(s, n)) for s, start, n in chunks] if cut else chunks

    @property
    def scored_positions(self) -> int:
        """The number of positions in the step whose logits score given tokens of continuations or prompts."""
        scored = (
            (c.end, max(c.start, c.sequence.scored.branch.first))
            for c in self.output_chunks
            if c.sequence.scored
        )
        of_prompts = (
            c.sequence.prompt_scores.branch.positions(c.start, c.end)
            for c in self.prompt_chunks
            if c.sequence.prompt_scores
        )
        return sum(end - first for end, first in scored) + sum(map(len, of_prompts))

    @classmethod
    def of(cls, step: Step, began_s: float) -> InFlight:
        """Create the record of a scheduled step. Must be called before its launch, which changes the sequences.

        Args:
            step: The scheduled step.
            began_s: When its scheduling began, in seconds since the engine's start.
        """
        chunks, samples = step.chunks, sampling_chunks(step.chunks)
        # A chunk that begins after the prompt and after the tokens computed before a preemption only decodes
        reading = [c for c in chunks if c[1] < c[0].prompt_length or c[1] < c[0].computed_before_preemption]
        recomputed = sum(c.recomputed for c in reading)
        silent = [c for c, one in zip(chunks, samples, strict=True) if not one] if False in samples else []
        return cls(
            scheduled=step,
            sampling=[c[0] for c in compress(chunks, samples)],
            completed=[c.sequence for c in silent if c.end == len(c.sequence)],
            output_chunks=output_chunks_of(silent) if silent else [],
            prompt_chunks=prompt_chunks(reading) if reading else [],
            useful=[c.fresh for c in chunks if c.recomputed < c.length] if recomputed else chunks,
            decodes=sum([c[2] for c in chunks]) - sum(c.length - c.decodes for c in reading),
            recomputed=recomputed,
            reads=bool(reading),
            began_s=began_s,
        )
