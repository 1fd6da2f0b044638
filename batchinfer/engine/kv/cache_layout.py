"""The cache layout says where the K and V of each layer lie: which layers share block tables, and which share a block.

Layers of one kind (all tokens are kept, or those of a window) take and free blocks at the same positions. They are cut
into groups of `depth` layers, with a block table each, and a block holds one group's `depth` layers. So all blocks
are alike, whichever group they belong to, and memory moves freely between the kinds (as in vLLM's hybrid KV cache
manager). The last group of a kind may have fewer layers than its blocks have room for. A layer that reads the K and V
of an earlier one lies in no block: it has that one's group.

Separate pools for the kinds would need one table a kind. But how much memory each gets would have to be decided
beforehand, by the ratio of window to length: a job of long rows needs many blocks that keep all, one of short rows as
many of either, and most jobs have both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.models.spec.spec import Caches, cache_mistakes, own_caches

# Each table is built, uploaded and planned with in every step, which takes the host time. Gemma 3 has 5 layers with a
# window to one without: 6 or 7 tables if blocks are as deep as the fewer ones.
MOST_TABLES = 8
TABLE_WORTH = 50  # a further table has to save about such a part of the memory


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table."""

    layers: tuple[int, ...]  # those that keep K and V of their own
    keeps: int | None  # tokens that are kept, seen from the next one, that one included; None: all
    windows: frozenset[int | None]  # of the attention that reads it: no more than `keeps`


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of a model for a job."""

    windows: tuple[int | None, ...]  # of each layer with attention
    groups: tuple[CacheGroup, ...]
    depth: int  # layers that a block holds
    block_size: int

    @property
    def sizes(self) -> TableSizes:
        """The sizes that the scheduler counts with."""
        return TableSizes(self.block_size, tuple(group.keeps for group in self.groups))

    @property
    def whole(self) -> int | None:
        """The first group that keeps all tokens."""
        return next((i for i, group in enumerate(self.groups) if group.keeps is None), None)


def one_group(caches: Caches, block_size: int) -> CacheLayout:
    """All layers keep all tokens."""
    windows, layers = _windows(caches), tuple(own_caches(caches))
    return CacheLayout(windows, (CacheGroup(layers, None, frozenset(windows)),), len(layers), block_size)


def cache_layout(caches: Caches, block_size: int, longest: int) -> CacheLayout:
    """The layout that takes the least memory for a sequence of `longest` tokens.

    A window that no sequence outgrows keeps all tokens. Layers whose K and V differ in size cannot take turns in a
    block: such a model keeps all tokens of all layers. Raises ValueError where a layer reads the K and V of
    one that keeps none before it.
    """
    wrong = next(cache_mistakes(caches), None)
    if wrong is not None:
        raise ValueError(wrong)
    own = own_caches(caches)
    alike = len({cache.layout for cache in own.values()}) == 1
    keeps = {layer: cache.window if alike else None for layer, cache in own.items()}
    keeps = {
        layer: None if window is None or window >= longest else window for layer, window in keeps.items()
    }
    kinds = Counter(keeps.values())
    if set(kinds) == {None}:
        return one_group(caches, block_size)
    found = [_cut(caches, keeps, depth, block_size) for depth in range(1, max(kinds.values()) + 1)]
    fitting = [layout for layout in found if len(layout.groups) <= max(MOST_TABLES, len(kinds))]
    fitting.append(one_group(caches, block_size))
    return min(fitting, key=lambda at: _memory(at, longest) * (TABLE_WORTH + len(at.groups)))


def stage_layout(layout: CacheLayout, caches: Caches, layers: tuple[int, int]) -> CacheLayout:
    """Return the layout of some of a model's layers, from the first to before the second, which are numbered from 0 on.
    It has the same groups, so that each block table of the whole model is one of theirs, and of a kind's layers as many
    in each as in the others, so that a block is no deeper than it has to be: a group may have none. Its `windows` are
    those of the whole model, whose steps are counted."""
    first, end = layers
    own = own_caches(caches[first:end])
    kept = {layer: group.keeps for group in layout.groups for layer in group.layers}
    parts = dict[int, tuple[int, ...]]()
    for kind in {group.keeps for group in layout.groups}:
        numbers = [at for at, group in enumerate(layout.groups) if group.keeps == kind]
        held = [layer for layer in own if kept[first + layer] == kind]
        parts |= {at: tuple(held[turn :: len(numbers)]) for turn, at in enumerate(numbers)}
    groups = tuple(
        replace(group, layers=parts[at], windows=_read_windows(parts[at], caches[first:end]) or group.windows)
        for at, group in enumerate(layout.groups)
    )
    return CacheLayout(layout.windows, groups, max(map(len, parts.values())), layout.block_size)


def _read_windows(layers: tuple[int, ...], caches: Caches) -> frozenset[int | None]:
    """Return the windows of the attention that reads the caches of these layers."""
    sources = (
        (layer if cache.shared is None else cache.shared, cache)
        for layer, cache in enumerate(caches)
        if cache
    )
    return frozenset(cache.window for source, cache in sources if source in layers)


def _windows(caches: Caches) -> tuple[int | None, ...]:
    """List the window of each layer with attention."""
    return tuple(cache.window for cache in caches if cache is not None)


def _memory(layout: CacheLayout, longest: int) -> int:
    """Layers' blocks of a sequence of `longest` tokens."""
    return layout.depth * layout.sizes.among_others(longest)


def _cut(caches: Caches, keeps: Mapping[int, int | None], depth: int, block_size: int) -> CacheLayout:
    own, groups = own_caches(caches), []
    for kind in dict.fromkeys(keeps.values()):
        layers = [layer for layer, keep in keeps.items() if keep == kind]
        for at in range(0, len(layers), depth):
            part = tuple(layers[at : at + depth])
            groups.append(CacheGroup(part, kind, frozenset(own[layer].window for layer in part)))
    return CacheLayout(_windows(caches), tuple(groups), depth, block_size)
