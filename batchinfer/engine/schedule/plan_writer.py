"""Converts a scheduled step to the plan that a runner executes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import compress
from operator import is_not, ne, or_
from typing import NamedTuple

import numpy as np

from batchinfer.engine.schedule.draft_tree import ancestor_bits
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.pooled_states import add_states
from batchinfer.engine.schedule.sampling_writer import SamplingWriter, awaited_from, indices_of
from batchinfer.engine.schedule.scheduler import Chunk, Step, sampling_chunks
from batchinfer.engine.schedule.scored_rows import add_prompt_scores, scored_rows
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import (
    ARGMAX,
    COMPUTES,
    AwaitedTokens,
    Ints,
    Longs,
    OutputRows,
    PlanWants,
    StepPlan,
    TableChanges,
)

_NONE = np.empty(0, np.int32)


class PlanWriter:
    """Converts the scheduled steps of an engine to plans, which a runner executes.

    A plan only contains what differs from the previous plan, so a runner must read all plans in order.

    Args:
        eos_token_ids: The end-of-sequence tokens of the model.
        wants: The optional parts of plans that the runner needs.
    """

    def __init__(self, eos_token_ids: frozenset[int] = frozenset(), wants: PlanWants = COMPUTES) -> None:
        self._wants = wants
        self._sampling = SamplingWriter(eos_token_ids)
        self._groups: list[_GroupTables] = []
        self._sequences: list[Sequence] = []  # of the previous plan
        self._rows: Longs = np.zeros(0, np.int64)  # the row of each of these sequences
        self._sampled: list[Sequence] = []  # the sequence of each sampled row of the previous plan

    def of(
        self,
        step: Step,
        sampling: list[Sequence],
        shared_blocks: int = 0,
        prompt_chunks: Seq[Chunk] = (),
        output_chunks: Seq[Chunk] = (),
    ) -> StepPlan:
        """Return the plan of a scheduled step. It must be called once per step, in order.

        Args:
            step: The step.
            sampling: The sequences that get tokens, in the order of their chunks.
            shared_blocks: The number of entries in the block tables that repeat an entry of an earlier sequence's
                table.
            prompt_chunks: The chunks for which log-probabilities of prompt tokens are computed.
            output_chunks: The chunks whose output is hidden states or scores of continuations.
        """
        chunks = step.chunks
        chunk_sequences, starts, lengths = zip(*chunks, strict=True)
        sequences = list(chunk_sequences)
        single = lengths.count(1) == len(lengths)
        requests = [(s.request.key, s.output_length) for s in sequences] if self._wants.requests else None
        sampled = self._sampled_rows(chunks, sampling, lengths, single)
        verified = _Verified.of(sampling, sampled) if step.drafts else None
        sampled = sampled if verified is None else verified.rows
        spans = np.array(starts, np.int32), None if single else np.array(lengths, np.int32)
        copies = _copies(step.copies, sequences) if step.copies else None
        silent = None if sequences[0].scored is None else scored_rows(chunks)
        if not self._wants.inputs:
            own = silent or OutputRows(sampled, None, ARGMAX)
            own = add_prompt_scores(chunks, prompt_chunks, sampled, own) if prompt_chunks else own
            return replace(
                _COUNTED, starts=spans[0], lengths=spans[1], copies=copies, sampled=sampled, sampling=own.sampling,
                requests=requests, shared_blocks=shared_blocks,
            )  # fmt: skip
        rows = None if sequences == self._sequences else self._arranged(sequences)
        before, self._sampled = self._sampled, sampling if verified is None else verified.sequences
        own = silent or self._output_rows(verified, before, sampled)
        own = add_prompt_scores(chunks, prompt_chunks, sampled, own) if prompt_chunks else own
        own = add_states(chunks, output_chunks, own) if output_chunks and silent is None else own
        return StepPlan(
            *spans,
            rows=rows,
            rope_offsets=None if rows is None else _each([s.rope_offset for s in sequences]),
            second_segments=None if rows is None else _each([s.second_segment for s in sequences]),
            adapters=None if rows is None else _adapters(sequences),
            tokens=_tokens(chunks, single),
            tables=tuple(self._changes(sequences)),
            copies=copies,
            sampled=own.sampled,
            sampled_counts=own.counts,
            awaited=_awaited(self._sampled, before, sampled),
            sampling=own.sampling,
            requests=requests,
            tree_bits=_tree_bits(chunks) if step.drafts else None,
            shared_blocks=shared_blocks,
        )

    def _output_rows(
        self, verified: _Verified | None, before: list[Sequence], sampled: Ints | None
    ) -> OutputRows:
        ahead, counts = (None, None) if verified is None else (verified.ahead, verified.counts)
        how = self._sampling.of(self._sampled, before, ahead) if self._sampled else ARGMAX
        return OutputRows(sampled, counts, how)

    def _sampled_rows(
        self, chunks: list[Chunk], sampling: list[Sequence], lengths: tuple[int, ...], single: bool
    ) -> Ints | None:
        every = len(sampling) == len(chunks)
        if every and single:
            return None
        ends = np.cumsum(lengths, dtype=np.int32) - np.int32(1)
        return ends if every else ends[sampling_chunks(chunks)]

    def _arranged(self, sequences: list[Sequence]) -> Ints:
        before = indices_of(sequences, self._sequences)
        places = np.array(before, np.int64)
        come = np.flatnonzero(places < 0)
        rows = np.append(self._rows, 0)[places]
        free = np.ones(max(len(sequences), self._rows.max(initial=-1) + 1), bool)
        free[rows[places >= 0]] = False
        rows[come] = np.flatnonzero(free)[: len(come)]
        for group in self._groups:
            group.arrange(before)
        self._sequences, self._rows = sequences, rows
        return rows.astype(np.int32)

    def _changes(self, sequences: list[Sequence]) -> list[TableChanges]:
        groups = len(sequences[0].tables)
        if len(self._groups) < groups:
            self._groups += [_GroupTables(group) for group in range(len(self._groups), groups)]
            for group in self._groups:
                group.arrange([-1] * len(sequences))
        return [group.changes(sequences, self._rows) for group in self._groups]


class _Verified(NamedTuple):
    """The sampled rows of a step with drafts: for each sequence, its last known token and each of its drafts.

    Attributes:
        rows: The indices of the sampled rows among the step's tokens.
        sequences: The sequence of each row.
        ahead: For each row, the number of the sequence's drafts up to the row; 0 for the last known token.
        counts: The number of rows per sequence.
    """

    rows: Ints
    sequences: list[Sequence]
    ahead: list[int]
    counts: list[int]

    @classmethod
    def of(cls, sampling: list[Sequence], ends: Ints | None) -> _Verified:
        assert ends is not None, "a chunk with drafts has several tokens"
        drafts = np.array([sequence.drafts for sequence in sampling], np.int32)
        counts = drafts + np.int32(1)
        own = np.repeat(np.arange(len(sampling)), counts)
        ahead = np.arange(len(own), dtype=np.int32) - (np.cumsum(counts, dtype=np.int32) - counts)[own]
        rows = (ends - drafts)[own] + ahead
        return cls(rows, [sampling[place] for place in own.tolist()], ahead.tolist(), counts.tolist())


def _adapters(sequences: list[Sequence]) -> tuple[str, ...] | None:
    names = tuple(sequence.request.params.adapter for sequence in sequences)
    return names if any(names) else None


# Template for the plans of a runner that only counts
_COUNTED = StepPlan(
    starts=_NONE, lengths=None, rows=None, rope_offsets=None, second_segments=None, adapters=None, tokens=_NONE,
    tables=(), copies=None, sampled=None, sampled_counts=None, awaited=None, sampling=ARGMAX,
)  # fmt: skip


class _GroupTables:
    """The block tables of one cache group as the runner knows them from earlier plans."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._tables: list[list[int]] = []  # of each sequence; a new list object means a changed table
        self._sent: list[int] = []  # the number of sent entries of each table

    def arrange(self, before: list[int]) -> None:
        self._tables = list(map([*self._tables, _NO_TABLE].__getitem__, before))
        self._sent = list(map([*self._sent, 0].__getitem__, before))

    def changes(self, sequences: list[Sequence], rows: Longs) -> TableChanges:
        group, sent = self._group, self._sent
        tables = [sequence.tables[group] for sequence in sequences]
        # Without a Python loop: a decode step changes few of its tables
        changed = map(or_, map(ne, map(len, tables), sent), map(is_not, tables, self._tables))
        spans: list[tuple[int, int, int]] = []
        blocks: list[int] = []
        for place in compress(range(len(tables)), changed):
            table, first = tables[place], sent[place]
            if table is not self._tables[place] or len(table) < first:
                first = 0
            spans.append((int(rows[place]), first, len(table) - first))
            blocks += table[first:]
            self._tables[place], sent[place] = table, len(table)
        return TableChanges(np.array(spans, np.int32).reshape(-1, 3), np.array(blocks, np.int32), max(sent))


_NO_TABLE: list[int] = []


def _each(numbers: list[int]) -> Ints | None:
    return np.array(numbers, np.int32) if any(numbers) else None


def _tokens(chunks: list[Chunk], single: bool) -> Ints:
    if single:
        return np.array([sequence.tokens[start] for sequence, start, _ in chunks], np.int32)
    return np.concatenate([np.frombuffer(s.tokens, np.int32)[start : start + n] for s, start, n in chunks])


def _tree_bits(chunks: list[Chunk]) -> Ints | None:
    if not any(s.draft_parents for s, _, _ in chunks):
        return None
    each = [ancestor_bits(s.draft_parents) for s, _, _ in chunks]
    bits = [bit for own, (_, _, n) in zip(each, chunks, strict=True) for bit in [0] * (n - len(own)) + own]
    return np.array(bits, np.uint32).view(np.int32)


def _awaited(sampling: list[Sequence], before: list[Sequence], sampled: Ints | None) -> AwaitedTokens | None:
    waits = [sequence.placeholders > 0 for sequence in sampling]
    if True not in waits:
        return None
    waiting, places = sampling, sampled
    if False in waits:  # only then, because indexing with a list of bools is slow
        waiting = list(compress(sampling, waits))
        places = np.flatnonzero(waits).astype(np.int32) if sampled is None else sampled[waits]
    return AwaitedTokens(places, None if waiting == before else awaited_from(waiting, before))


def _copies(copies: list[Copy], sequences: list[Sequence]) -> Ints:
    places = indices_of([copy.sequence for copy in copies], sequences)
    return np.array([(place, *copy[1:]) for place, copy in zip(places, copies, strict=True)], np.int32)
