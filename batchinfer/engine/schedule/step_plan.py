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
    """The parts of a plan that a runner reads, in addition to the chunks."""

    inputs: bool = True  # tokens, block tables and sampling parameters
    requests: bool = False
    shared_blocks: bool = False
    repeats: bool = False  # True if it can run several decode steps for one plan


COMPUTES = PlanWants()  # for a runner that computes tokens
COUNTS = PlanWants(inputs=False, requests=True, shared_blocks=True)  # for a runner that simulates steps


class TableChanges(NamedTuple):
    """The changed entries of a cache group's block tables since the previous plan."""

    spans: Ints  # (m, 3): row, first entry, number of entries. A span from entry 0 on replaces the row
    blocks: Ints  # the entries of all spans, concatenated
    width: int  # maximum number of blocks of a sequence of the step


class Awaited(NamedTuple):
    """Input tokens that only the device knows, because the previous step samples them."""

    places: Ints | None  # indices among the step's tokens; None: all tokens
    sampled: Ints | None  # indices among the tokens that the previous step samples; None: all, in order


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRows:
    """The parameters of random sampling for n rows; see `batchinfer_kernels.sample.RowSampling`."""

    positions: Ints  # (n,)
    # temperature (n,) float32, top_k (n,) int32, top_p and min_p (n,) float64, keys (n, 4) int32. None: unchanged since
    # the last plan that had them
    fixed: tuple[NDArray[Any], ...] | None

    def part(self, first: int, end: int) -> DrawnRows:
        """Return the rows [first, end)."""
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
    """The rows with penalties or banned tokens; see `batchinfer_kernels.penalties`."""

    rows: Ints  # (n,): indices among the sampled rows
    tokens: Ints  # the token ids of all rows, concatenated
    lengths: Ints  # (n,): the number of tokens per row
    prompt_lens: Ints  # (n,)
    strengths: NDArray[np.float32]  # (3, n): repetition, presence, frequency
    banned: Ints  # (n, most): banned tokens, padded with -1
    awaited: Ints  # indices of the `tokens` that the previous step samples
    sampled: Ints  # their indices among the tokens that the previous step samples

    @property
    def starts(self) -> Longs:
        """The index of each row's first token in `tokens`, (n,)."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def part(self, first: int, end: int) -> PenalisedRows | None:
        """Return the entries of sampled rows [first, end), renumbered from 0, or None if there are none."""
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
    """Given tokens whose log-probabilities are computed."""

    rows: Ints  # (n,): the sampled row that each token follows, ascending
    tokens: Ints  # (n,)
    likeliest: int = 0  # number of most likely tokens whose log-probabilities are also computed per token

    def part(self, first: int, end: int) -> ScoredTokens | None:
        """Return the entries of rows [first, end), renumbered from 0, or None if there are none."""
        low, high = np.searchsorted(self.rows, (first, end))
        return (
            None
            if low == high
            else ScoredTokens(self.rows[low:high] - np.int32(first), self.tokens[low:high], self.likeliest)
        )


class TokenScores(NamedTuple):
    """The log-probabilities of scored tokens on the host, in the order of `ScoredTokens`."""

    logprobs: NDArray[np.float32]  # (n,); NaN if logits are not finite
    greedy: NDArray[np.bool_]  # (n,): True if the token is the argmax
    top: NDArray[np.float32]  # (n, likeliest): log-probabilities of the most likely tokens, descending
    top_ids: Longs  # (n, likeliest): these tokens

    @classmethod
    def joined(cls, parts: Iterable[Iterable[NDArray[Any]]]) -> TokenScores:
        """Concatenate the scores of micro-batches, each given as the fields of this class."""
        each = [tuple(part) for part in parts]
        return cls(*map(np.concatenate, zip(*each, strict=True))) if each else NO_SCORES


NO_SCORES = TokenScores(
    np.empty(0, np.float32), np.empty(0, np.bool_), np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)
)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """The outputs of the sampled rows, and how their tokens are chosen. Fields name rows by their index."""

    argmax: bool = True  # True if each token is the argmax of the logits, except for a mask
    masked: list[int] = field(default_factory=list)  # rows with a mask
    masks: list[int] = field(default_factory=list)  # number of the mask, per masked row
    # True if the row's last token would have been the same without the mask, per masked row
    followed: list[bool] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)  # rows with log-probabilities as output
    likeliest: list[int] = field(default_factory=list)  # number of top tokens, per row in `asking`
    # True if probabilities are relative to the tokens that the mask allows, per row in `asking`
    among_allowed: list[bool] = field(default_factory=list)
    penalised: PenalisedRows | None = None
    drawn: DrawnRows | None = None  # None: all rows are greedy
    states: list[int] = field(default_factory=list)  # rows with hidden states as output
    # Index of the row's chunk among the chunks with hidden states, ascending, per row in `states`
    state_chunks: list[int] = field(default_factory=list)
    summed: bool = False  # True if the states of a chunk are summed
    chooses: bool = True  # False if no row gets a token
    classified: bool = False  # True if the classification head is applied to the states or their means
    scored: ScoredTokens | None = None
    biased: BiasedTokens | None = None
    allowed: AllowedTokens | None = None
    # The rows that get tokens, ascending; None: all. All fields except `scored` and `states` index these rows
    chosen: Ints | None = None

    def choosing(self, rows: int) -> int:
        """Return the number of rows that get tokens among `rows` sampled rows, if `chooses`."""
        return rows if self.chosen is None else len(self.chosen)

    @property
    def edited(self) -> bool:
        """True if logits are changed before tokens are chosen."""
        changed = (self.penalised, self.biased, self.allowed)
        return bool(self.masked) or any(part is not None for part in changed)

    def later(self, ahead: Ints) -> SamplingPlan:
        """Return the plan of a later step of the same rows.

        Args:
            ahead: (n,), how many tokens later each row is.
        """
        drawn = self.drawn
        return (
            self if drawn is None else replace(self, drawn=replace(drawn, positions=drawn.positions + ahead))
        )

    def part(self, first: int, end: int) -> SamplingPlan:
        """Return the plan of rows [first, end), renumbered from 0."""
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
        """Pickle the most frequent plan, `ARGMAX`, in a byte."""
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
    """The part of a plan about outputs: tokens, hidden states and log-probabilities. See StepPlan for its fields."""

    sampled: Ints | None
    counts: list[int] | None
    sampling: SamplingPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step: the chunks of S sequences with T tokens in all, concatenated."""

    starts: Ints  # (S,): position of each chunk's first token
    lengths: Ints | None  # (S,): number of tokens per chunk; None: 1 each
    # (S,): row of each sequence's block table; None: the same sequences in the same order as in the previous plan
    rows: Ints | None
    # (S,): first row of the rotary tables; None: all 0 if `rows` is given, else unchanged
    rope_offsets: Ints | None
    # (S,): first position with token type 1, 0 for none; None: all 0 if `rows` is given, else unchanged
    second_segments: Ints | None
    # (S,): fingerprints of the adapters, "" for none; None: all "" if `rows` is given, else unchanged
    adapters: tuple[str, ...] | None
    tokens: Ints  # (T,)
    tables: tuple[TableChanges, ...]  # per cache group
    # (n, 6): chunk, cache group, source, target, first slot, end. Run in each layer before attention
    copies: Ints | None
    # Indices of the tokens after which the step samples or has other outputs, ascending; None: all
    sampled: Ints | None
    sampled_counts: list[int] | None  # number of sampled rows per chunk that has any; None: one each
    awaited: Awaited | None
    sampling: SamplingPlan
    # The request key and the number of answer tokens per chunk, if `PlanWants.requests`
    requests: list[tuple[bytes, int]] | None = None
    # (T,): ancestor bits of draft tree nodes, see TreeMask; 0 for other tokens. The nodes are at the end of their
    # chunk. None: there is no tree
    tree_bits: Ints | None = None
    # How often a block table names a block that another table named before, if `PlanWants.shared_blocks`
    shared_blocks: int = 0
    # (S,): number of decode steps per sequence, if `PlanWants.repeats`; this step is the first. Block tables have
    # entries for all of them. None: one each
    repeats: Ints | None = None

    @property
    def steps(self) -> int:
        """The number of steps that run for the plan."""
        return 1 if self.repeats is None else int(self.repeats.max())

    @property
    def chunk_lengths(self) -> Ints:
        """The number of tokens per chunk, (S,)."""
        return np.ones(len(self.starts), np.int32) if self.lengths is None else self.lengths

    @property
    def sampled_rows(self) -> int:
        """The number of sampled rows."""
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
    awaited = None if waits is None else Awaited(*map(_ints, waits))
    return StepPlan(
        starts, lengths, rows, offsets, segments, adapters, tokens, changes, copied, sampled, counts, awaited,
        sampling, requests, bits, shared_blocks, repeats,
    )  # fmt: skip


def _ints(data: bytes | None) -> Ints | None:
    return None if data is None else np.frombuffer(data, np.int32)


class RankStep(NamedTuple):
    """A step of one of the engines that alternate on the ranks."""

    turn: int
    plan: StepPlan
