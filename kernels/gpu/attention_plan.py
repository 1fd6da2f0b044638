"""The attention plan of a step, which is made once on the host and used by every layer.

Chunks of several queries become items of prefill attention. Single queries go to decode attention, which first reads
shared leading keys once per group of sequences, level by level (`SharedPrefix`). In a graph that verifies drafts,
chunks of a few queries also go to decode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.gpu.attention_launch import SEGMENT, choose_tiles, prefix_segment
from batchinfer_kernels.gpu.attention_splits import Splits, Splitter
from batchinfer_kernels.gpu.latent_tiles import chunk_tokens, head_tiles
from batchinfer_kernels.gpu.part_room import most_members, most_own, most_segments, most_shared
from batchinfer_kernels.gpu.prefill_attention import prefill_items, prefill_tokens
from batchinfer_kernels.gpu.prefix_attention import Prefixes, prefix_members
from batchinfer_kernels.gpu.step_arrays import StepArray, StepArrays
from batchinfer_kernels.prefix_groups import GroupMinimum, Ints, prefix_groups
from batchinfer_kernels.step_tables import StepTables

# The fewest keys of a level. A part writes and reads 8 bytes per value and a shared key saves 4: with up to 16 query
# heads per KV head this breaks even at 32 keys; the rest amortises the launch. Not measured
LEAST_SHARED_KEYS = 256
# The fewest sequences of a group. Two or three that read the same blocks hit the GPU's cache anyway. Not measured
LEAST_SHARERS = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties of a model on which attention plans depend.

    Attributes:
        dtype: dtype of q.
        q_heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: number of values of a head.
        deterministic: True if the bits of a sequence must not depend on other sequences of the step.
        causal: False for the bidirectional attention of an encoder; each step then computes whole prompts.
        latent: True if the cache holds latents: there is one KV head, and the first values of K are V.
    """

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    deterministic: bool = False
    causal: bool = True
    latent: bool = False

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def programs(self) -> int:
        """Return the number of programs per work item of decode attention.

        It is the number of KV heads or, for latents, of tiles of query heads.
        """
        return head_tiles(self.q_heads) if self.latent else self.kv_heads

    @property
    def chunk_tokens(self) -> int:
        """Return the maximum number of prompt tokens of a work item of prefill attention."""
        if self.latent:
            return chunk_tokens(self.q_heads)
        return prefill_tokens(self.dtype, self.head_dim, self.group, self.deterministic)

    def spare_part_bytes(self, rows: int, longest: int, device: torch.device, queries: int = 1) -> int:
        """Return an upper bound of the bytes of partial attention results in a step.

        Args:
            rows: number of queries of the step.
            longest: maximum number of keys of a query.
            device: the GPU.
            queries: maximum number of queries of a sequence.
        """
        if self.deterministic:
            # Exact; a captured graph may reserve up to twice as much
            spare = most_segments(rows, longest) if longest > SEGMENT else 0
        else:
            spare = most_own(rows, self.programs, device, queries)
        if not (self.deterministic or self.latent):
            members = prefix_members(self.dtype, self.head_dim, self.group)
            spare += most_shared(rows, members, self.kv_heads, device)
        return spare * self.q_heads * (self.head_dim + 1) * 4

    @property
    def unit(self) -> int:
        """Return the number of keys of a tile or, in deterministic mode, of a segment.

        The length of a shared prefix is rounded down to a multiple of this number.
        """
        return SEGMENT if self.deterministic else choose_tiles("prefix", self.dtype, self.head_dim).keys


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences of a step whose first keys are in the same blocks of the cache.

    Prefixes may nest: in a list, the shorter prefix comes first and has all sequences of the longer one.

    Attributes:
        sequences: indices of the sequences in the step.
        keys: number of leading keys that they share.
    """

    sequences: Sequence[int]
    keys: int


@dataclass(frozen=True, slots=True)
class Room:
    """The sizes for which a captured graph is made; every step that it replays must fit them.

    Attributes:
        longest: maximum number of keys of a sequence.
        sharing: maximum numbers of partial results, work items and members in `Prefixes`. None: the numbers of the
            captured step, rounded up to powers of two.
        queries: maximum number of queries of a sequence; more than one if drafts are verified.
    """

    longest: int
    sharing: tuple[int, int, int] | None = (0, 0, 0)
    queries: int = 1


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The attention work of one step, made by `plan_attention` on the host and used by every layer.

    Decode attention computes sequences with a single query or, with `chunks`, with a few queries. Prefill attention
    computes all other sequences.

    Attributes:
        arrays: the arrays of all plans of the step.
        held: the arrays that this plan uses, by name: items, rows, chunks, contexts and nearby.
        lengths: (n,), number of keys of each sequence in decode attention.
        starts: (n,), number of leading keys that each of these sequences shares with others.
        longest: `Room.longest`; None if the step is not captured into a graph.
        prefixes: the shared keys; None: nothing is shared.
        splitter: splits the keys that are not shared among programs.
        splits: the work items over keys that are not shared, by sliding window of the layers (None: full attention).
        lens: (n,), number of queries of each sequence, if the plan has `chunks`.
        causal: False for bidirectional attention.
    """

    arrays: StepArrays
    held: Mapping[str, StepArray]
    lengths: Ints = field(repr=False)
    starts: Ints = field(repr=False)
    longest: int | None
    prefixes: Prefixes | None
    splitter: Splitter
    splits: Mapping[int | None, Splits]
    lens: Ints | None = field(default=None, repr=False)
    causal: bool = True

    @property
    def items(self) -> Tensor | None:
        """Return the work items of prefill attention, (m, 5) int32 from `prefill_items`; None if there are none."""
        return self._tensor("items")

    @property
    def rows(self) -> Tensor | None:
        """Return for each query in decode attention its row in q and the index of its sequence, (n, 2) int32.

        The result is None if query i is in row i and belongs to sequence i, for all queries.
        """
        return self._tensor("rows")

    @property
    def chunks(self) -> Tensor | None:
        """Return for each sequence its first row in q and its number of queries, (S, 2) int32.

        The result is None if each sequence has one query."""
        return self._tensor("chunks")

    @property
    def contexts(self) -> Tensor:
        """Return the number of keys of each sequence, (S,) int32.

        With `chunks`, it is the number of keys that each query sees, (T,).
        """
        return self.held["contexts"].tensor

    @property
    def nearby(self) -> Tensor | None:
        """Return `TreeMask.nearby`, the keys that queries in draft trees see, (T,) int32; None: there are no trees."""
        return self._tensor("nearby")

    def _tensor(self, name: str) -> Tensor | None:
        return self.held[name].tensor if name in self.held else None

    @property
    def singles(self) -> int:
        """Return the number of sequences in decode attention."""
        return len(self.lengths)

    @property
    def deterministic(self) -> bool:
        """Return True if keys are split at fixed positions, so that results do not depend on other sequences."""
        return self.splitter.deterministic

    @property
    def sizes(self) -> tuple[object, ...]:
        """Return the sizes of the plan that a captured graph fixes, except the number of sequences and `longest`.

        A graph can only run plans with equal sizes.
        """
        p = self.prefixes
        shared = () if p is None else (p.parts, *[len(p.held[name].values) for name in ("items", "members")])
        return ("nearby" in self.held, *shared, *[splits.sizes for splits in self.splits.values()])

    def splits_of(self, window: int | None) -> Splits:
        """Return the work items over keys that are not shared, for layers with this window; None: full attention.

        Raises:
            ValueError: If the plan was not made for this window.
        """
        if window not in self.splits:
            raise ValueError(f"the plan is for windows of {list(self.splits)}, not {window}")
        return self.splits[window]

    def with_windows(self, windows: Collection[int | None]) -> LaunchPlan:
        """Return the plan of the same step for layers with these sliding windows; None: full attention."""
        if windows == self.splits.keys():
            return self
        known, whole, split = self.splits, (self.lengths, self.starts), self.splitter.split
        splits = {w: known.get(w) or split(*whole, w, lens=self.lens, arrays=self.arrays) for w in windows}
        return replace(self, splits=splits)

    def without_chunks(self) -> LaunchPlan:
        """Return the plan without the work items of prefill attention."""
        return replace(self, held={name: one for name, one in self.held.items() if name != "items"})

    def place(self) -> None:
        """Copy the plan's arrays to the device. Must be called before a graph is captured."""
        self.arrays.place()

    def grown(self, context_lens: Sequence[int], beside: LaunchPlan | None = None) -> LaunchPlan:
        """Return the plan of a later step of the same sequences, which have more keys.

        Shared prefixes stay the same, and other keys are split again only if necessary.

        Args:
            context_lens: the new number of keys of each sequence.
            beside: another plan of the later step. If both grew from plans with the same arrays, they share the new
                arrays.

        Raises:
            ValueError: If the plan was made without a Room, has chunks, or a sequence exceeds the Room.
        """
        lengths = np.array(context_lens, np.int64)
        fits = self.longest is not None and len(lengths) == len(self.lengths) and "chunks" not in self.held
        if not fits or lengths.max() > (self.longest or 0):
            raise ValueError(f"contexts of up to {lengths.max()} cannot grow from the plan {self._fixed()}")
        together = beside is not None and beside.arrays.origin is self.arrays
        arrays = beside.arrays if beside is not None and together else self.arrays.again()
        if not together:
            arrays.put(self.held["contexts"].number, lengths)
        grown = self.splitter.grown
        splits = {w: grown(own, lengths, self.starts, arrays) for w, own in self.splits.items()}
        return self._on(arrays, splits, lengths)

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Return True if a graph of this plan is valid in all steps until the sequences have `context_lens` keys."""
        lengths = np.array(context_lens, np.int64)
        if self.longest is None or "chunks" in self.held or lengths.max() > self.longest:
            return False
        return all(self._serve(own, lengths) for own in self.splits.values())

    def _serve(self, splits: Splits, lengths: Ints) -> bool:
        # A window drops keys in whole segments, so a row at fixed positions may need one more segment on the way than
        # at the end
        further = int((lengths - self.lengths).max(initial=0))
        on_the_way = further if self.deterministic and splits.window is not None else 1
        ahead = (further - at for at in range(on_the_way))
        serve = self.splitter.serve
        return all(serve(splits, np.minimum(self.lengths + n, lengths), self.starts) for n in ahead)

    def refilled(self, other: LaunchPlan) -> LaunchPlan:
        """Copy the arrays of plan `other` into this plan's tensors, and return plan `other` with these tensors.

        A captured graph reads this plan's tensors, so its next replay computes the step of `other`.

        Raises:
            ValueError: If the graph would launch other kernels for `other`. Give both plans the same Room.
        """
        if self._fixed() != other._fixed():
            raise ValueError(
                f"a graph with the sizes {self._fixed()} cannot run a plan with {other._fixed()}"
            )
        self.arrays.refill(other.arrays)
        splits = {w: replace(own, array=own.array.of(self.arrays)) for w, own in other.splits.items()}
        return other._on(self.arrays, splits, other.lengths)

    def _on(self, arrays: StepArrays, splits: Mapping[int | None, Splits], lengths: Ints) -> LaunchPlan:
        p = self.prefixes
        return replace(
            self,
            arrays=arrays,
            held=_among(self.held, arrays),
            prefixes=None if p is None else replace(p, held=_among(p.held, arrays)),
            splits=splits,
            lengths=lengths,
        )

    def _fixed(self) -> tuple[object, ...]:
        read = (
            [*self.held.items()]
            if self.prefixes is None
            else [*self.held.items(), *self.prefixes.held.items()]
        )
        numbers = [(name, one.number) for name, one in read]
        own = [splits.array.number for splits in self.splits.values()]
        return self.singles, self.longest, self.deterministic, self.sizes, *numbers, *own


def _among(held: Mapping[str, StepArray], arrays: StepArrays) -> dict[str, StepArray]:
    return {name: one.of(arrays) for name, one in held.items()}


def plan_attention(
    query_lens: Sequence[int] | Ints,
    context_lens: Sequence[int] | Ints,
    shape: AttentionShape,
    device: torch.device | str,
    shared: Sequence[SharedPrefix] = (),
    room: Room | None = None,
    windows: Collection[int | None] = (None,),
    tree: TreeMask | None = None,
) -> LaunchPlan:
    """Plan the attention of a step of S sequences. Copies of the plan to the device do not block the host.

    Args:
        query_lens: number of queries of each sequence.
        context_lens: number of keys of each sequence, its queries included.
        shape: properties of the model.
        device: device of the plan's arrays.
        shared: prefixes from `find_shared` or from the planner, shorter ones first. Only sequences in decode attention
            use them, if the buffers have space for the partial results.
        room: the sizes of a captured graph, if the step is captured or replayed (`refilled`). Each sequence then has at
            most `room.queries` queries. Padding sequences have 0 keys.
        windows: sliding windows of the layers that use the plan; None: full attention.
        tree: the keys that queries in draft trees see, without padding; None: there are no draft trees.

    Raises:
        ValueError: If shared prefixes do not nest, or do not match their sequences or the room.
    """
    device = torch.device(device)
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    queries = 1 if room is None else room.queries
    nearby = None if tree is None else np.append(tree.nearby, np.full(lens.sum() - len(tree.last), -1))
    alone = (lens == 1) & ~_branching(lens, nearby)
    few = np.flatnonzero(alone) if queries == 1 else np.flatnonzero(lens <= queries)
    longest = int(contexts[few].max(initial=0))
    if room is not None and (len(few) < len(lens) or longest > room.longest):
        raise ValueError(f"chunks of up to {lens.max()} and contexts of up to {longest} do not fit {room}")
    several = queries > 1
    items = None if several else _chunks(np.where(alone, 0, lens), lens, contexts, shape)
    found = {
        "contexts": _seen(lens, contexts) if several else contexts,
        "items": items,
        "rows": None if len(few) == len(lens) else np.stack((np.cumsum(lens)[few] - 1, few), 1),
        "chunks": np.stack((np.cumsum(lens) - lens, lens), 1) if several else None,
        "nearby": nearby,
    }
    arrays = StepArrays(device)
    held = {name: arrays.add(values) for name, values in found.items() if values is not None}
    prefixes, starts = _plan_prefixes(shared, lens, contexts, few, shape, arrays, room)
    most, own = None if room is None else room.longest, lens if several else None
    splitter = Splitter(shape.programs, device, shape.deterministic, most, queries)
    return LaunchPlan(
        arrays=arrays,
        held=held,
        lengths=contexts[few],
        starts=starts,
        longest=most,
        prefixes=prefixes,
        splitter=splitter,
        splits={w: splitter.split(contexts[few], starts, w, lens=own, arrays=arrays) for w in windows},
        lens=own,
        causal=shape.causal,
    )


def _branching(lens: Ints, nearby: NDArray[np.integer] | None) -> NDArray[np.bool_]:
    if nearby is None:
        return np.zeros(len(lens), bool)
    return np.bincount(np.repeat(np.arange(len(lens)), lens), nearby != -1, len(lens)) > 0


def _seen(lens: Ints, contexts: Ints) -> Ints:
    return np.repeat(contexts - np.cumsum(lens), lens) + np.arange(1, lens.sum() + 1)


def _chunks(chunks: Ints, lens: Ints, contexts: Ints, shape: AttentionShape) -> NDArray[np.int32] | None:
    if not chunks.any():
        return None
    return prefill_items(chunks, contexts, shape.chunk_tokens, np.cumsum(lens) - lens, shape.causal)


@dataclass(frozen=True, slots=True)
class _Level:
    rows: Ints
    sequence: int
    first: int
    end: int
    part: int  # number of the first part within each row


def _plan_prefixes(
    shared: Sequence[SharedPrefix],
    lens: Ints,
    contexts: Ints,
    few: Ints,
    shape: AttentionShape,
    arrays: StepArrays,
    room: Room | None,
) -> tuple[Prefixes | None, Ints]:
    # Nothing is shared over latents
    starts, parts = np.zeros(len(few), np.int64), np.zeros(len(few), np.int64)
    if shape.latent:
        return None, starts
    counts = lens[few]  # queries; each is a row of the prefixes
    spans = list(_spans(shared, lens, contexts, few, shape.unit))
    if not shape.deterministic:  # at fixed positions a row has the same number of parts, shared or not
        spans = _outer(spans, counts)
    most = prefix_members(shape.dtype, shape.head_dim, shape.group, shape.deterministic)
    work = sum(-(-int(counts[rows].sum()) // most) * (end - first) for rows, first, end in spans)
    segment = SEGMENT if shape.deterministic else prefix_segment(work, shape.kv_heads, arrays.device)
    levels = []
    for rows, first, end in spans:
        queries = _queries_of(rows, counts)
        levels.append(_Level(queries, int(few[rows[0]]), first, end, int(parts[rows[0]])))
        starts[rows], parts[rows] = end, parts[rows] + -(-(end - first) // segment)
    if not levels and (room is None or not room.sharing or not room.sharing[0]):
        return None, starts
    items, members = _items(levels, segment, most)
    places = np.concatenate([[0], np.cumsum(np.repeat(parts, counts))])
    count = int(places[-1])
    if room is not None:
        needed = (count, len(items), len(members))
        rounded = [1 << (n - 1).bit_length() for n in needed]
        if not room.sharing:
            rounded[0] = min(rounded[0], _most_parts(len(places) - 1, most, shape, arrays.device, room))
        count, *sizes = room.sharing or rounded
        if any(n > most for n, most in zip(needed, (count, *sizes), strict=True)):
            raise ValueError(f"{needed[0]} parts in {needed[1]} items of {needed[2]} rows do not fit {room}")
        items = np.concatenate([items, np.zeros((sizes[0] - len(items), 6), np.int64)])
        members = np.concatenate([members, np.zeros(sizes[1] - len(members), np.int64)])
    found = {"items": items, "members": members, "starts": starts, "places": places}
    return Prefixes({name: arrays.add(values) for name, values in found.items()}, count), starts


def _queries_of(rows: Ints, counts: Ints) -> Ints:
    if counts.max(initial=1) == 1 == counts.min(initial=1):
        return rows
    own = counts[rows]
    nth = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
    return np.repeat((np.cumsum(counts) - counts)[rows], own) + nth


def _most_parts(rows: int, members: int, shape: AttentionShape, device: torch.device, room: Room) -> int:
    if shape.deterministic:
        return most_segments(rows, room.longest)
    return most_shared(rows, members, shape.kv_heads, device)


def _spans(
    shared: Sequence[SharedPrefix], lens: Ints, contexts: Ints, few: Ints, unit: int
) -> Iterator[tuple[Ints, int, int]]:
    # A row is an index into `few`, the sequences of decode attention. Outer levels come first
    row_of = np.full(len(lens), -1)
    row_of[few] = np.arange(len(few))
    starts = np.zeros(len(few), np.int64)
    for prefix in shared:
        rows = row_of[np.asarray(prefix.sequences, np.int64)]
        rows = rows[rows >= 0]
        if len(rows) < 2:
            continue
        first, end = int(starts[rows[0]]), prefix.keys // unit * unit
        if (starts[rows] != first).any():
            raise ValueError(
                f"sequences {list(prefix.sequences)} share {prefix.keys} keys, but not the same outer prefix"
            )
        if (contexts[few[rows]] < prefix.keys).any() or len(np.unique(rows)) < len(rows):
            raise ValueError(
                f"sequences {list(prefix.sequences)} do not all have {prefix.keys} keys, or are not distinct"
            )
        if end > first:
            starts[rows] = end
            yield rows, first, end


def _outer(spans: list[tuple[Ints, int, int]], counts: Ints) -> list[tuple[Ints, int, int]]:
    # Levels with a smaller `first` take precedence; a level inside one that is dropped is dropped too
    room, ends, kept = most_members(int(counts.sum())), np.zeros(len(counts), np.int64), []
    for span in sorted(spans, key=lambda span: span[1]):
        members, first, end = span
        queries = int(counts[members].sum())
        if queries <= room and ends[members[0]] == first:
            room -= queries
            ends[members] = end
            kept.append(span)
    return kept


def _items(levels: list[_Level], segment: int, most: int) -> tuple[Ints, Ints]:
    # An item is up to `most` rows of a level × `segment` keys; the largest come first
    found, members, before = [np.empty((0, 6), np.int64)], [np.empty(0, np.int64)], 0
    for level in levels:
        firsts = np.arange(0, len(level.rows), most), np.arange(level.first, level.end, segment)
        row, key = (axis.ravel() for axis in np.meshgrid(*firsts, indexing="ij"))
        items = np.empty((len(row), 6), np.int64)
        items[:, 0], items[:, 1] = before + row, np.minimum(most, len(level.rows) - row)
        items[:, 2], items[:, 3] = level.sequence, key
        items[:, 4] = np.minimum(key + segment, level.end)
        items[:, 5] = level.part + (key - level.first) // segment
        found.append(items)
        members.append(level.rows)
        before += len(level.rows)
    items = np.concatenate(found)
    return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")], np.concatenate(members)


def find_shared(
    query_lens: Sequence[int] | Ints,
    context_lens: Sequence[int] | Ints,
    tables: StepTables,
    block_size: int,
    unit: int,
    queries: int = 1,
) -> list[SharedPrefix]:
    """Find the prefixes that sequences with few queries share, from their block tables.

    At least LEAST_SHARERS sequences share a prefix. It has at least LEAST_SHARED_KEYS keys more than any shorter prefix
    of these sequences.

    Args:
        query_lens: number of queries of each sequence.
        context_lens: number of keys of each sequence, queries included.
        tables: block tables of the sequences.
        block_size: number of tokens of a block.
        unit: prefixes are rounded down to a multiple of this number of keys; AttentionShape.unit.
        queries: maximum number of queries of a sequence; sequences with more share nothing.
    """

    def whole_units(blocks: Ints) -> Ints:
        return blocks * block_size // unit * unit

    minimum = GroupMinimum(LEAST_SHARERS, LEAST_SHARED_KEYS)
    found = prefix_groups(query_lens, context_lens, tables, block_size, whole_units, minimum, queries)
    return [SharedPrefix(group.sequences.tolist(), group.end) for group in found]
