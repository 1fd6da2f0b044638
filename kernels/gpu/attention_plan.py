"""The plan of a step's attention, made once on the host and read in every layer.

Chunks of several queries are cut into items for prefill. Single queries go to decode, those that share leading keys
pass over these together first, level after level (`SharedPrefix`). In a graph that verifies drafts chunks of a few
queries go to decode, too.
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
from batchinfer_kernels.prefix_groups import Ints, Worth, prefix_groups
from batchinfer_kernels.step_tables import StepTables

# Keys that are worth a level. Of a part 8 bytes a value are written and read, of a shared key 4 are not: with up to 16
# query heads a KV head that breaks even at 32 keys; the rest pays for the launch. Not measured.
LEAST_SHARED_KEYS = 256
# Two or three sequences that read the same blocks at the same time find them in the GPU's cache anyway. Not measured.
LEAST_SHARERS = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties of a model that the plan depends on."""

    dtype: torch.dtype
    q_heads: int
    kv_heads: int
    head_dim: int
    deterministic: bool = False
    causal: bool = (
        True  # False: an encoder's, whose tokens see later ones, and whose chunks are whole prompts
    )
    latent: bool = False  # the one KV head is a latent, whose first values are V

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def programs(self) -> int:
        """Return how many programs an item of single queries has: one for each KV head; over latents, for some
        heads."""
        return head_tiles(self.q_heads) if self.latent else self.kv_heads

    @property
    def chunk_tokens(self) -> int:
        """Return how many tokens of a prompt an item has."""
        if self.latent:
            return chunk_tokens(self.q_heads)
        return prefill_tokens(self.dtype, self.head_dim, self.group, self.deterministic)

    def spare_part_bytes(self, rows: int, longest: int, device: torch.device, queries: int = 1) -> int:
        """Return the most bytes that parts of `rows` queries of up to `longest` keys take, beyond the bytes of parts
        where every row is that long and shares nothing: then, by default, none may be split. `queries`: the most of a
        sequence.

        At fixed positions these are as many as there can be; graphs round them up, at most to twice as many. Rows share
        no parts of latents.
        """
        if self.deterministic:
            spare = most_segments(rows, longest) if longest > SEGMENT else 0
        else:
            spare = most_own(rows, self.programs, device, queries)
        if not (self.deterministic or self.latent):
            members = prefix_members(self.dtype, self.head_dim, self.group)
            spare += most_shared(rows, members, self.kv_heads, device)
        return spare * self.q_heads * (self.head_dim + 1) * 4

    @property
    def unit(self) -> int:
        """Shared keys end at a multiple of it: at the end of a tile, or of a segment that all kernels fold alike."""
        return SEGMENT if self.deterministic else choose_tiles("prefix", self.dtype, self.head_dim).keys


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Sequences whose first `keys` keys lie in the same blocks. Of two that hold the same sequence the shorter, which
    the other's sequences share too, comes first."""

    sequences: Sequence[int]
    keys: int


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes that a captured graph holds fixed: every step that is replayed fits into them.

    `sharing`: parts of what rows share, items, and members of groups; None: as the step needs them, rounded up to
    powers of two so that few steps differ in them. `queries`: the most of a sequence; more than one where drafts are
    verified.
    """

    longest: int  # keys of a sequence
    sharing: tuple[int, int, int] | None = (0, 0, 0)
    queries: int = 1


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One step; see `plan_attention`. What is launched depends on sizes alone: `sizes`, and the room's."""

    arrays: StepArrays  # of all plans of the step
    # Those of this plan: items, rows, chunks, contexts and nearby, as far as it has them
    held: Mapping[str, StepArray]
    lengths: Ints = field(repr=False)  # (n,): contexts of the sequences that decode attends to
    starts: Ints = field(repr=False)  # (n,): how many of these keys are shared
    longest: int | None  # the room's; None: there is none
    prefixes: Prefixes | None
    splitter: Splitter
    splits: Mapping[int | None, Splits]  # of what decode attends to, by window
    # (n,): queries of each sequence, where there are `chunks`
    lens: Ints | None = field(default=None, repr=False)
    causal: bool = True

    @property
    def items(self) -> Tensor | None:
        """Return prefill's items; None: there are no chunks for it."""
        return self._tensor("items")

    @property
    def rows(self) -> Tensor | None:
        """(n, 2) int32: row of q, sequence of each single query; None: sequence i has row i."""
        return self._tensor("rows")

    @property
    def chunks(self) -> Tensor | None:
        """(S, 2) int32: first row of q, queries of each sequence, which decode attends to; None: each of these has
        one."""
        return self._tensor("chunks")

    @property
    def contexts(self) -> Tensor:
        """(S,) int32; with `chunks` (T,): the keys that each query sees."""
        return self.held["contexts"].tensor

    @property
    def nearby(self) -> Tensor | None:
        """(T,) int32: which keys queries in trees of drafts see, of `TreeMask`; None: no query is in one."""
        return self._tensor("nearby")

    def _tensor(self, name: str) -> Tensor | None:
        return self.held[name].tensor if name in self.held else None

    @property
    def singles(self) -> int:
        """Count the sequences that decode attends to: those of a single query, or with `chunks` all."""
        return len(self.lengths)

    @property
    def deterministic(self) -> bool:
        return self.splitter.deterministic

    @property
    def sizes(self) -> tuple[object, ...]:
        """The sizes of a step in a room on which its launches depend, apart from the number of rows."""
        p = self.prefixes
        shared = () if p is None else (p.parts, *[len(p.held[name].values) for name in ("items", "members")])
        return ("nearby" in self.held, *shared, *[splits.sizes for splits in self.splits.values()])

    def splits_of(self, window: int | None) -> Splits:
        """Raises ValueError for a window that was not planned for."""
        if window not in self.splits:
            raise ValueError(f"the plan is for windows of {list(self.splits)}, not {window}")
        return self.splits[window]

    def with_windows(self, windows: Collection[int | None]) -> LaunchPlan:
        """The plan of the same step for layers of these windows."""
        if windows == self.splits.keys():
            return self
        known, whole, split = self.splits, (self.lengths, self.starts), self.splitter.split
        splits = {w: known.get(w) or split(*whole, w, lens=self.lens, arrays=self.arrays) for w in windows}
        return replace(self, splits=splits)

    def without_chunks(self) -> LaunchPlan:
        """The plan of what prefill leaves to decode."""
        return replace(self, held={name: one for name, one in self.held.items() if name != "items"})

    def place(self) -> None:
        """Put on the device what kernels read, as a capture has to find it there."""
        self.arrays.place()

    def grown(self, context_lens: Sequence[int], beside: LaunchPlan | None = None) -> LaunchPlan:
        """The plan of a later step of the same sequences in the same Room: with other contexts, which still begin with
        what they shared. All else is as it is in this one; the splits, too, as long as they serve. `beside`: another
        plan of that step."""
        lengths = np.array(context_lens, np.int64)
        fits = self.longest is not None and len(lengths) == len(self.lengths) and "chunks" not in self.held
        if not fits or lengths.max() > (self.longest or 0):
            raise ValueError(f"contexts of up to {lengths.max()} do not grow out of {self._fixed()}")
        together = beside is not None and beside.arrays.origin is self.arrays
        arrays = beside.arrays if beside is not None and together else self.arrays.again()
        if not together:
            arrays.put(self.held["contexts"].number, lengths)
        grown = self.splitter.grown
        splits = {w: grown(own, lengths, self.starts, arrays) for w, own in self.splits.items()}
        return self._on(arrays, splits, lengths)

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Whether a graph of this plan gives what one of `grown` would, once its contexts are these, and also for all
        contexts on the way."""
        lengths = np.array(context_lens, np.int64)
        if self.longest is None or "chunks" in self.held or lengths.max() > self.longest:
            return False
        return all(self._serve(own, lengths) for own in self.splits.values())

    def _serve(self, splits: Splits, lengths: Ints) -> bool:
        """Whether splits serve up to these contexts. Keys that a window has left are taken off in whole segments, so
        that a row at fixed positions may need one more on the way, and not at the end."""
        further = int((lengths - self.lengths).max(initial=0))
        on_the_way = further if self.deterministic and splits.window is not None else 1
        ahead = (further - at for at in range(on_the_way))
        serve = self.splitter.serve
        return all(serve(splits, np.minimum(self.lengths + n, lengths), self.starts) for n in ahead)

    def refilled(self, other: LaunchPlan) -> LaunchPlan:
        """The other plan on this one's tensors, which a captured graph reads and which are overwritten, together with
        those of the step's other plans.

        Raises ValueError where the graph would launch something else for the other plan: give both the same Room.
        """
        if self._fixed() != other._fixed():
            raise ValueError(f"a graph of {self._fixed()} does not run {other._fixed()}")
        self.arrays.refill(other.arrays)
        splits = {w: replace(own, array=own.array.of(self.arrays)) for w, own in other.splits.items()}
        return other._on(self.arrays, splits, other.lengths)

    def _on(self, arrays: StepArrays, splits: Mapping[int | None, Splits], lengths: Ints) -> LaunchPlan:
        """Return the plan with arrays of the same numbers in the place of its own; the splits lie in these."""
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
        """Return the sizes of what a graph launches, and which arrays it reads."""
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
    """The plan of a step of S sequences, one chunk each, in order; context lengths count the chunk too.

    `shared`: of `find_shared`, or as the planner of the job knows it. Rounded down to `shape.unit`; of their sequences
    those with a single query take part, outer levels first, as long as there is room for their parts. `room`: the step
    is to be captured into a graph or replayed (`refilled`); it then has one query a sequence, or as many as the room
    says, and pads a batch with sequences of context 0. Where it has several, sequences may have none. `windows`: of the
    layers that read the plan. `tree`: of the step's tokens without padding, where some are in trees of drafts. Copies
    to the device do not wait for it.
    Raises ValueError where shared prefixes do not nest, or do not fit their sequences or the room.
    """
    device = torch.device(device)
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    queries = 1 if room is None else room.queries
    nearby = None if tree is None else np.append(tree.nearby, np.full(lens.sum() - len(tree.last), -1))
    alone = (lens == 1) & ~_branching(lens, nearby)
    few = np.flatnonzero(alone) if queries == 1 else np.flatnonzero(lens <= queries)
    longest = int(contexts[few].max(initial=0))
    if room is not None and (len(few) < len(lens) or longest > room.longest):
        raise ValueError(f"chunks of up to {lens.max()} and contexts of up to {longest} are not in {room}")
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
    """Return which sequences of so many queries have any in trees, (S,)."""
    if nearby is None:
        return np.zeros(len(lens), bool)
    return np.bincount(np.repeat(np.arange(len(lens)), lens), nearby != -1, len(lens)) > 0


def _seen(lens: Ints, contexts: Ints) -> Ints:
    """Return how many keys each query sees, (T,): those up to its own. A query without a context, which is padding,
    sees none."""
    return np.repeat(contexts - np.cumsum(lens), lens) + np.arange(1, lens.sum() + 1)


def _chunks(chunks: Ints, lens: Ints, contexts: Ints, shape: AttentionShape) -> NDArray[np.int32] | None:
    """Return prefill's items; None: it has none. `chunks`: the queries that it attends to of each sequence's `lens`,
    all or none."""
    if not chunks.any():
        return None
    return prefill_items(chunks, contexts, shape.chunk_tokens, np.cumsum(lens) - lens, shape.causal)


@dataclass(frozen=True, slots=True)
class _Level:
    """Queries that share keys [first, end)."""

    rows: Ints
    sequence: int
    first: int
    end: int
    part: int  # which of each row's the first one is


def _plan_prefixes(
    shared: Sequence[SharedPrefix],
    lens: Ints,
    contexts: Ints,
    few: Ints,
    shape: AttentionShape,
    arrays: StepArrays,
    room: Room | None,
) -> tuple[Prefixes | None, Ints]:
    """Prefixes, which are added to the `arrays`, and how many keys each sequence of `few` queries shares: none over
    latents."""
    starts, parts = np.zeros(len(few), np.int64), np.zeros(len(few), np.int64)
    if shape.latent:
        return None, starts
    counts = lens[few]  # of queries, each of which is a row of the prefixes
    spans = list(_spans(shared, lens, contexts, few, shape.unit))
    if not shape.deterministic:  # where it is, what rows do not share they keep as many parts of
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
            raise ValueError(f"{needed[0]} parts in {needed[1]} items of {needed[2]} rows are not in {room}")
        items = np.concatenate([items, np.zeros((sizes[0] - len(items), 6), np.int64)])
        members = np.concatenate([members, np.zeros(sizes[1] - len(members), np.int64)])
    found = {"items": items, "members": members, "starts": starts, "places": places}
    return Prefixes({name: arrays.add(values) for name, values in found.items()}, count), starts


def _queries_of(rows: Ints, counts: Ints) -> Ints:
    """Return the queries of some of the sequences, which have so many each, one after the other."""
    if counts.max(initial=1) == 1 == counts.min(initial=1):
        return rows
    own = counts[rows]
    nth = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own)
    return np.repeat((np.cumsum(counts) - counts)[rows], own) + nth


def _most_parts(rows: int, members: int, shape: AttentionShape, device: torch.device, room: Room) -> int:
    """Return the most parts that the shared keys of a graph have."""
    if shape.deterministic:
        return most_segments(rows, room.longest)
    return most_shared(rows, members, shape.kv_heads, device)


def _spans(
    shared: Sequence[SharedPrefix], lens: Ints, contexts: Ints, few: Ints, unit: int
) -> Iterator[tuple[Ints, int, int]]:
    """Rows, each a sequence of `few` queries, that share keys [first, end), outer levels before inner ones."""
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
                f"sequences {list(prefix.sequences)} share {prefix.keys} keys, but no whole level before"
            )
        if (contexts[few[rows]] < prefix.keys).any() or len(np.unique(rows)) < len(rows):
            raise ValueError(
                f"sequences {list(prefix.sequences)} do not all have {prefix.keys} keys, or are not distinct"
            )
        if end > first:
            starts[rows] = end
            yield rows, first, end


def _outer(spans: list[tuple[Ints, int, int]], counts: Ints) -> list[tuple[Ints, int, int]]:
    """Return the levels that there is room for: the ones that begin first. Levels inside of one that is left out are
    left out too. `counts`: queries of each row."""
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
    """(m, 6) and (members,): each level's rows `most` at a time over `segment` keys at a time, the largest first."""
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
    """Find the keys that sequences of up to so many queries share, read from the block tables on the host; `unit`: of
    AttentionShape.

    Every group has LEAST_SHARERS sequences at least, and its level LEAST_SHARED_KEYS beyond those around it.
    """

    def whole_units(blocks: Ints) -> Ints:
        return blocks * block_size // unit * unit

    worth = Worth(LEAST_SHARERS, LEAST_SHARED_KEYS)
    found = prefix_groups(query_lens, context_lens, tables, block_size, whole_units, worth, queries)
    return [SharedPrefix(group.sequences.tolist(), group.end) for group in found]
