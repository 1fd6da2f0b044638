"""A launched step, and the tokens that its sequences accept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from batchinfer.core.request import FinishReason, RowError
from batchinfer.engine.runner.runner import LaunchedStep
from batchinfer.engine.schedule.draft_tree import find_child
from batchinfer.engine.schedule.pooled_states import output_chunks_of
from batchinfer.engine.schedule.scheduler import Chunk, Step, sampling_chunks
from batchinfer.engine.schedule.scored_rows import prompt_chunks
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.cost import StepShape


class End(NamedTuple):
    """How a sequence ended.

    Attributes:
        reason: Why the sequence ended.
        text_length: The number of characters of its text before a stop string, or None without a stop string.
        error: The error of the sequence, or None if it succeeded.
        truncated: True if the error is that the answer reached max_tokens or the context length before its constraint
            was complete.
    """

    reason: FinishReason
    text_length: int | None = None
    error: RowError | None = None
    truncated: bool = False

    @property
    def for_length(self) -> bool:
        """True if the sequence ended because it reached max_tokens or the model's context length."""
        return self.truncated or self.reason == "length"


@dataclass(slots=True, eq=False)
class AcceptedTokens:
    """The tokens that a sequence got in a step that verified drafts.

    Attributes:
        sequence: The sequence.
        length: The length of the sequence before the step, without drafts.
        drafts: The drafts that the step ran.
        parents: The index of each draft's parent in a draft tree, or -1 for the sequence's last token; empty for a
            chain.
        path: The indices of the accepted drafts, in order.
        count: The number of tokens that the sequence got, accepted drafts included.
        end: How the sequence ended, or None if it continues.
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
        """Record the next token that the sequence got.

        If it equals a draft at its position, the draft is accepted.
        """
        if self.count == self.accepted:
            found = find_child(self.drafts, self.parents, self.path[-1] if self.path else -1, token)
            if found is not None:
                self.path.append(found)
        self.count += 1

    @property
    def useful_end(self) -> int:
        """The number of leading positions of the sequence whose keys and values remain valid after the step.

        Positions of rejected drafts and of the newest token are not included.
        """
        return self.length + min(self.accepted, max(0, self.count - 1))

    @property
    def rejected(self) -> int:
        """The number of positions that the step computed in vain, for rejected drafts."""
        return self.length + len(self.drafts) - self.useful_end


@dataclass(slots=True, eq=False)
class InFlight:
    """A step between its launch and the arrival of its results.

    Attributes:
        scheduled: The step as the scheduler planned it.
        sampling: The sequences that get tokens, in order.
        completed: The sequences that end with this step without getting a token.
        output_chunks: The chunks whose output is hidden states or scores of continuations, in order.
        prompt_chunks: The chunks whose output is log-probabilities of prompt tokens, in order.
        useful: The chunks, without tokens that were computed before a preemption and are computed again.
        decodes: The number of generated tokens that run for the first time.
        recomputed: The number of tokens that were computed before a preemption and are computed again.
        reads: True if the step runs prompt tokens or recomputes any tokens.
        began_s: When the scheduling of the step began, in seconds since the engine's start.
        launched_s: When the launch of the step began, in seconds since the engine's start.
        result: The results of the step, which may still be computed. None before the launch.
        shapes: The shape of the step's useful work; with multi-step decoding, of each decode step.
        irregular: The results of the sequences that had drafts or did not get exactly one token.
        dropped: The sequences that turned out, after the launch, to have ended before it.
        used_lengths: For each sequence that ended before the last step of a multi-step launch, its number of tokens.
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
    result: LaunchedStep | None = None
    shapes: list[StepShape] = field(default_factory=list)
    irregular: list[AcceptedTokens] = field(default_factory=list)
    dropped: set[Sequence] = field(default_factory=set)
    used_lengths: dict[Sequence, int] = field(default_factory=dict)

    @property
    def repeats(self) -> int:
        """The number of decode steps that were launched together; 1 without multi-step decoding."""
        return self.scheduled.repeats

    @property
    def only_decodes(self) -> bool:
        """True if each chunk of the step is one generated token that runs for the first time and yields another token.

        Only such a step can be launched together with further decode steps.
        """
        return not self.reads and self.decodes == len(self.scheduled.chunks) == len(self.sampling)

    def extend_runs(self, runs: list[int]) -> None:
        """Turn the step into a multi-step launch.

        Args:
            runs: The number of decode steps in which each sequence takes part, in the order of the step's chunks.
        """
        new_tuple, chunks = tuple.__new__, zip(self.scheduled.chunks, runs, strict=True)
        # Takes half the time of Chunk(…)
        self.useful = [new_tuple(Chunk, (s, start, n)) for (s, start, _), n in chunks]
        self.scheduled.chunks = self.useful
        self.decodes = sum(runs)

    @property
    def useful_runs(self) -> list[Chunk]:
        """The tokens that each sequence of a multi-step launch needed, as a chunk per sequence.

        Sequences that had ended before the launch are left out, and so are tokens after the end of an answer.
        """
        chunks, lengths, dropped = self.useful, self.used_lengths, self.dropped
        if dropped:
            chunks = [c for c in chunks if c[0] not in dropped]
        return [Chunk(s, start, lengths.get(s, n)) for s, start, n in chunks] if lengths else chunks

    @property
    def scored_positions(self) -> int:
        """The number of positions in the step whose logits give log-probabilities of continuations or prompts."""
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
        """Create the record of a scheduled step. It must be created before the launch, which changes the sequences.

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
