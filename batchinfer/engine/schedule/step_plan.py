"""The plan of a step: plain data that a runner executes.

A plan is a difference to the previous plan; the runner keeps the rest (`StepState`). So plans are small, and anything
that gets all plans in order can follow: a runner, a rank, a simulation. Plans have hand-written pickling, because the
defaults of dataclasses and numpy take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
States = NDArray[np.floating[Any]]  # hidden states in float32, or sums of them in float64
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]


class PlanWants(NamedTuple):
    """The optional parts of a step plan that a runner needs.

    Attributes:
        inputs: True for tokens, block tables and sampling parameters. A simulation does not need them.
        requests: True for the work key and the number of answer tokens of each chunk's request.
        shared_blocks: True for the number of block reads that sequences of a step share.
        repeats: True if the runner can run several decode steps for one plan.
    """

    inputs: bool = True
    requests: bool = False
    shared_blocks: bool = False
    repeats: bool = False


COMPUTES = PlanWants()  # for a runner that computes tokens
COUNTS = PlanWants(inputs=False, requests=True, shared_blocks=True)  # for a runner that simulates steps


class TableChanges(NamedTuple):
    """The entries of a cache group's block tables that changed since the previous plan.

    Attributes:
        spans: [m, 3], the changed ranges: row of the sequence, first entry, number of entries. A range that begins
            with entry 0 replaces the whole row.
        blocks: The new entries of all ranges, concatenated.
        width: The number of blocks of the step's longest sequence.
    """

    spans: Ints
    blocks: Ints
    width: int


class AwaitedTokens(NamedTuple):
    """The input tokens of a step that the host does not know, because the previous step samples them.

    Attributes:
        places: The index of each unknown token among the step's tokens. None: all tokens are unknown.
        sampled: The index of each unknown token among the tokens that the previous step samples. None: all of them, in
            order.
    """

    places: Ints | None
    sampled: Ints | None


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRows:
    """The parameters of random sampling for n rows.

    Attributes:
        positions: int32 [n], the number of answer tokens before the token that each row samples. The random numbers
            depend on it.
        fixed: Five arrays: temperature [n] float32, top_k [n] int32, top_p [n] float64, min_p [n] float64, and the
            keys of the random numbers [n, 4] int32. None: the same as in the last plan that had them.
    """

    positions: Ints
    fixed: tuple[NDArray[Any], ...] | None

    def part(self, first: int, end: int) -> DrawnRows:
        """Return the parameters of the rows [first, end), which form a micro-batch."""
        assert self.fixed is not None
        return DrawnRows(self.positions[first:end], tuple(values[first:end] for values in self.fixed))

    def __reduce__(self) -> Pickled:
        fixed = None if self.fixed is None else tuple(values.tobytes() for values in self.fixed)
        return _drawn, (self.positions.tobytes(), fixed)


def _drawn(positions: bytes, fixed: tuple[bytes, ...] | None) -> DrawnRows:
    found: tuple[NDArray[Any], ...] | None = None
    if fixed is not None:
        kinds = (np.float32, np.int32, np.float64, np.float64, np.int32)
        *first, keys = (np.frombuffer(data, kind) for data, kind in zip(fixed, kinds, strict=True))
        found = (*first, keys.reshape(-1, 4))
    return DrawnRows(np.frombuffer(positions, np.int32), found)


@dataclass(frozen=True, slots=True, eq=False)
class PenalisedRows:
    """The n rows of a step that have penalties or banned tokens.

    Attributes:
        rows: [n], the index of each row among the sampled rows.
        tokens: The tokens of prompt and answer of all n rows, concatenated.
        lengths: [n], the number of tokens per row in `tokens`; 0 for a row without penalties.
        prompt_lens: [n], how many of these tokens are prompt tokens.
        strengths: [3, n], the repetition, presence and frequency penalties.
        banned: [n, maximum number of banned tokens], the banned tokens of each row, padded with -1.
        awaited: The indices of the elements of `tokens` that the previous step samples.
        sampled: For each element of `awaited`, its index among the tokens that the previous step samples.
    """

    rows: Ints
    tokens: Ints
    lengths: Ints
    prompt_lens: Ints
    strengths: NDArray[np.float32]
    banned: Ints
    awaited: Ints
    sampled: Ints

    @property
    def starts(self) -> Longs:
        """The index of each row's first token in the concatenated tokens, [n]."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def part(self, first: int, end: int) -> PenalisedRows | None:
        """Return the entries of the sampled rows [first, end), as a micro-batch with renumbered rows needs them.

        The result is None if none of these rows has penalties or banned tokens.
        """
        inside = np.flatnonzero((self.rows >= first) & (self.rows < end))
        if not len(inside):
            return None
        low, high = inside[0], inside[-1] + 1
        edges = [0, *np.cumsum(self.lengths).tolist()]
        start, stop = edges[low], edges[high]
        awaited = (self.awaited >= start) & (self.awaited < stop)
        return PenalisedRows(
            self.rows[low:high] - np.int32(first),
            self.tokens[start:stop],
            self.lengths[low:high],
            self.prompt_lens[low:high],
            self.strengths[:, low:high],
            self.banned[low:high],
            self.awaited[awaited] - np.int32(start),
            self.sampled[awaited],
        )

    def __reduce__(self) -> Pickled:
        arrays = (
            self.rows,
            self.tokens,
            self.lengths,
            self.prompt_lens,
            self.awaited,
            self.sampled,
            self.banned,
        )
        return _penalised, (*(array.tobytes() for array in arrays), self.strengths.tobytes())


def _penalised(*data: bytes) -> PenalisedRows:
    rows, tokens, lengths, prompts, awaited, sampled, banned = (
        np.frombuffer(one, np.int32) for one in data[:-1]
    )
    strengths = np.frombuffer(data[-1], np.float32).reshape(3, -1)
    return PenalisedRows(
        rows, tokens, lengths, prompts, strengths, banned.reshape(len(rows), -1), awaited, sampled
    )


class ScoredTokens(NamedTuple):
    """The n given tokens whose log-probabilities a step computes, such as tokens of prompts or continuations.

    Attributes:
        rows: [n], the sampled row whose logits give the log-probability of each token, ascending.
        tokens: [n], the token ids.
        likeliest: The number of most likely tokens per given token whose log-probabilities are computed, too.
    """

    rows: Ints
    tokens: Ints
    likeliest: int = 0

    def part(self, first: int, end: int) -> ScoredTokens | None:
        """Return the entries of the sampled rows [first, end), as a micro-batch with renumbered rows needs them.

        The result is None if these rows have no given tokens.
        """
        low, high = np.searchsorted(self.rows, (first, end))
        return (
            None
            if low == high
            else ScoredTokens(self.rows[low:high] - np.int32(first), self.tokens[low:high], self.likeliest)
        )


class TokenScores(NamedTuple):
    """The log-probabilities of n given tokens on the host, in the order in which the step plan lists the tokens.

    Attributes:
        logprobs: [n], the log-probability of each given token; NaN if logits are not finite.
        greedy: [n], True if the given token has the highest logit.
        top: [n, likeliest], the log-probabilities of the most likely tokens at the same position, descending.
        top_ids: [n, likeliest], the ids of the most likely tokens.
    """

    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    top: NDArray[np.float32]
    top_ids: Longs

    @classmethod
    def joined(cls, parts: Iterable[Iterable[NDArray[Any]]]) -> TokenScores:
        """Concatenate the scores that the micro-batches of a step computed.

        Args:
            parts: For each micro-batch: logprobs, greedy, top and top_ids, as the fields of this class. Without
                micro-batches, the result is empty.
        """
        each = [tuple(part) for part in parts]
        return cls(*map(np.concatenate, zip(*each, strict=True))) if each else NO_SCORES


NO_SCORES = TokenScores(
    np.empty(0, np.float32), np.empty(0, np.bool_), np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)
)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """The outputs of a step's sampled rows, and how their tokens are chosen.

    A sampled row is a token of the step that has an output. Rows are given as indices among the sampled rows that get
    tokens. Only `states` and `scored` contain indices among all sampled rows. Fields that no row needs are empty or
    None.

    Attributes:
        argmax: True if each token is the argmax of the logits, among the tokens that the row's mask allows.
        masked: The rows that have a token mask of a constraint.
        masks: The number of the mask of each row in `masked`.
        followed: For each row in `masked`, True if its previous token would have been the same without the mask.
        asking: The rows whose output includes log-probabilities.
        likeliest: For each row in `asking`, the number of most likely tokens with log-probabilities.
        among_allowed: For each row in `asking`, True if its probabilities are relative to the tokens that its mask
            allows.
        penalised: The rows with penalties or banned tokens.
        drawn: The parameters of random sampling. None: all rows are greedy.
        states: The rows whose output is hidden states.
        state_chunks: For each row in `states`, the index of its chunk among the chunks with hidden states, ascending.
        summed: True if the hidden states of a chunk are summed.
        chooses: False if no row gets a token.
        classified: True if the classification head is applied to the hidden states or their means.
        scored: The given tokens whose log-probabilities are computed.
        biased: The biases that are added to logits.
        allowed: The tokens that rows with `allowed_token_ids` may get.
        chosen: The indices of the sampled rows that get tokens, ascending. None: all.
    """

    argmax: bool = True
    masked: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)
    followed: list[bool] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)
    among_allowed: list[bool] = field(default_factory=list)
    penalised: PenalisedRows | None = None
    drawn: DrawnRows | None = None
    states: list[int] = field(default_factory=list)
    state_chunks: list[int] = field(default_factory=list)
    summed: bool = False
    chooses: bool = True
    classified: bool = False
    scored: ScoredTokens | None = None
    biased: BiasedTokens | None = None
    allowed: AllowedTokens | None = None
    chosen: Ints | None = None

    def count_chosen_rows(self, rows: int) -> int:
        """Return how many of a step's sampled rows get tokens, provided that any row does.

        Args:
            rows: The number of sampled rows of the step.
        """
        return rows if self.chosen is None else len(self.chosen)

    @property
    def edited(self) -> bool:
        """True if logits are changed before tokens are chosen: by masks, penalties, biases or allowed tokens."""
        changed = (self.penalised, self.biased, self.allowed)
        return bool(self.masked) or any(part is not None for part in changed)

    def later(self, ahead: Ints) -> SamplingPlan:
        """Return the sampling plan of a later decode step of the same launch, with the same n rows.

        Args:
            ahead: [n], the number of tokens by which each row is longer than in this step.
        """
        drawn = self.drawn
        return (
            self if drawn is None else replace(self, drawn=replace(drawn, positions=drawn.positions + ahead))
        )

    def part(self, first: int, end: int) -> SamplingPlan:
        """Return the sampling plan of a micro-batch with the sampled rows [first, end), renumbered from 0."""
        scored = None if self.scored is None else self.scored.part(first, end)
        states = [at for at, row in enumerate(self.states) if first <= row < end]
        stated = [self.states[at] - first for at in states]
        chosen, begin = self.chosen, first
        if chosen is not None:
            first, end = np.searchsorted(chosen, (first, end)).tolist()
            chosen = chosen[first:end] - np.int32(begin)
        masked = [at for at, row in enumerate(self.masked) if first <= row < end]
        asking = [at for at, row in enumerate(self.asking) if first <= row < end]
        return SamplingPlan(
            self.argmax,
            [self.masked[at] - first for at in masked],
            [self.masks[at] for at in masked],
            [self.followed[at] for at in masked],
            [self.asking[at] - first for at in asking],
            [self.likeliest[at] for at in asking],
            [self.among_allowed[at] for at in asking],
            None if self.penalised is None else self.penalised.part(first, end),
            None if self.drawn is None else self.drawn.part(first, end),
            stated,
            [self.state_chunks[at] for at in states],
            self.summed,
            self.chooses and (chosen is None or len(chosen) > 0),
            self.classified,
            scored,
            None if self.biased is None else self.biased.part(first, end),
            None if self.allowed is None else self.allowed.part(first, end),
            chosen,
        )

    def __reduce__(self) -> Pickled:
        # ARGMAX, the most frequent plan, takes one byte
        if self is ARGMAX:
            return _argmax, ()
        lists = (self.masked, self.masks, self.followed, self.asking, self.likeliest, self.among_allowed)
        asked = (self.argmax, *lists, self.penalised, self.drawn)
        asked_for, chosen = self.scored, None if self.chosen is None else self.chosen.tobytes()
        scored = (
            None if asked_for is None else (*(one.tobytes() for one in asked_for[:2]), asked_for.likeliest)
        )
        how, edits = (self.chooses, self.classified, chosen), (self.biased, self.allowed)
        states = (self.states, self.state_chunks, self.summed)
        return _sampling, (asked, states, how, scored, *edits)


ARGMAX = SamplingPlan()


def _argmax() -> SamplingPlan:
    return ARGMAX


def _sampling(
    asked: tuple[Any, ...], states: tuple[list[int], list[int], bool],
    how: tuple[bool, bool, bytes | None], scored: tuple[bytes, bytes, int] | None, *edits: Any,
) -> SamplingPlan:  # fmt: skip
    tokens = None
    if scored is not None:
        places, ids, likeliest = scored
        tokens = ScoredTokens(np.frombuffer(places, np.int32), np.frombuffer(ids, np.int32), likeliest)
    *said, chosen = how
    fields: tuple[Any, ...] = (*asked, *states, *said, tokens, *edits, _ints(chosen))
    return SamplingPlan(*fields)


class OutputRows(NamedTuple):
    """The part of a step plan that says which outputs the step has: tokens, hidden states and log-probabilities.

    Attributes:
        sampled: The indices of the step's tokens that have an output (the sampled rows), ascending. None: all tokens.
        counts: For each chunk with sampled rows, their number. None: 1 each.
        sampling: The outputs of the sampled rows, and how tokens are chosen.
    """

    sampled: Ints | None
    counts: list[int] | None
    sampling: SamplingPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The plan of a step that runs chunks of S sequences, with T tokens in all, concatenated.

    A chunk is the range of a sequence's tokens that the step runs. A plan only contains what differs from the previous
    plan. None in `rope_offsets`, `second_segments` and `adapters` means: unchanged if `rows` is None, else no sequence
    has any.

    Attributes:
        starts: [S], the position of each chunk's first token in its sequence.
        lengths: [S], the number of tokens per chunk. None: 1 each.
        rows: [S], the row of each sequence's block table. None: the sequences of the previous plan in the same order.
        rope_offsets: [S], the row of the rotary tables for position 0 of each sequence.
        second_segments: [S], the first position with token type 1, or 0 if all tokens of a sequence have type 0.
        adapters: [S], the fingerprint of each sequence's LoRA adapter, "" for none.
        tokens: [T], the token ids.
        tables: The changes of block tables per cache group.
        copies: [n, 6], copies of partial blocks, which run in each layer before attention: index of the chunk, cache
            group, source block, target block, first slot, end. None: nothing is copied.
        sampled: The indices of the tokens that have an output (the sampled rows), ascending. None: all tokens.
        sampled_counts: For each chunk with sampled rows, their number. None: 1 each.
        awaited: The tokens that only the device knows, because the previous step samples them. None: no token.
        sampling: The outputs of the sampled rows, and how their tokens are chosen.
        requests: (work key, number of answer tokens) of each chunk's request, if the runner needs them.
        tree_bits: [T], for each token that is a node of a draft tree, a bit set of the node and its ancestors; 0 for
            other tokens. The nodes are at the end of their chunk. None: there is no draft tree.
        shared_blocks: The number of block table entries that repeat an entry of an earlier table, if the runner needs
            it.
        repeats: [S], the number of decode steps to run per sequence, this step included. Block tables have the blocks
            of all these steps. None: 1 each.
    """

    starts: Ints
    lengths: Ints | None
    rows: Ints | None
    rope_offsets: Ints | None
    second_segments: Ints | None
    adapters: tuple[str, ...] | None
    tokens: Ints
    tables: tuple[TableChanges, ...]
    copies: Ints | None
    sampled: Ints | None
    sampled_counts: list[int] | None
    awaited: AwaitedTokens | None
    sampling: SamplingPlan
    requests: list[tuple[bytes, int]] | None = None
    tree_bits: Ints | None = None
    shared_blocks: int = 0
    repeats: Ints | None = None

    @property
    def steps(self) -> int:
        """The number of decode steps that a runner launches for this plan; 1 without multi-step decoding."""
        return 1 if self.repeats is None else int(self.repeats.max())

    @property
    def chunk_lengths(self) -> Ints:
        """The number of tokens of each chunk, [S]."""
        return np.ones(len(self.starts), np.int32) if self.lengths is None else self.lengths

    @property
    def sampled_rows(self) -> int:
        """The number of the step's tokens that have an output, such as a sampled token."""
        return len(self.tokens) if self.sampled is None else len(self.sampled)

    def __reduce__(self) -> Pickled:
        arrays = (
            self.starts,
            self.lengths,
            self.rows,
            self.rope_offsets,
            self.second_segments,
            self.tokens,
            self.copies,
            self.sampled,
            self.tree_bits,
            self.repeats,
        )
        sent = [None if array is None else array.tobytes() for array in arrays]
        tables = [(spans.tobytes(), blocks.tobytes(), width) for spans, blocks, width in self.tables]
        awaited = self.awaited
        waits = awaited and tuple(None if array is None else array.tobytes() for array in awaited)
        rest = (self.sampled_counts, self.sampling, self.requests, self.shared_blocks)
        return _step_plan, (sent, self.adapters, tables, waits, *rest)


def _step_plan(
    sent: list[bytes | None],
    adapters: tuple[str, ...] | None,
    tables: list[tuple[bytes, bytes, int]],
    waits: tuple[bytes | None, ...] | None,
    counts: list[int] | None,
    sampling: SamplingPlan,
    requests: list[tuple[bytes, int]] | None,
    shared_blocks: int,
) -> StepPlan:
    starts, lengths, rows, offsets, segments, tokens, copies, sampled, bits, repeats = map(_ints, sent)
    assert starts is not None
    assert tokens is not None
    changes = tuple(
        TableChanges(np.frombuffer(spans, np.int32).reshape(-1, 3), np.frombuffer(blocks, np.int32), width)
        for spans, blocks, width in tables
    )
    copied = None if copies is None else copies.reshape(-1, 6)
    awaited = None if waits is None else AwaitedTokens(*map(_ints, waits))
    return StepPlan(
        starts, lengths, rows, offsets, segments, adapters, tokens, changes, copied, sampled, counts, awaited,
        sampling, requests, bits, shared_blocks, repeats,
    )  # fmt: skip


def _ints(data: bytes | None) -> Ints | None:
    return None if data is None else np.frombuffer(data, np.int32)


class RankStep(NamedTuple):
    """A step that the leading rank sends to the other ranks of a sharded model.

    Attributes:
        turn: The index, among the engines that alternate, of the engine whose step it is.
        plan: The plan of the step.
    """

    turn: int
    plan: StepPlan
