"""The layout of the KV cache: which layers share a block table, and which share a block.

Layers with the same window allocate and free blocks at the same positions. They are split into groups of `depth` layers
with one block table each, and a block holds the K and V of one group's layers. So all blocks have the same size, and
memory moves freely between groups (as in vLLM's hybrid KV cache manager). The last group of a window may have fewer
layers than its blocks have room for. A layer that reads the K and V of an earlier layer uses that layer's group.

Separate pools per window would need fewer tables, but their sizes would have to be fixed in advance, and the right
ratio depends on the lengths of the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.models.spec.spec import Caches, cache_mistakes, own_caches

# Maximum number of block tables: each table costs the host time in every step. Gemma 3 has 5 layers with a window per
# layer without: 6 or 7 tables if a block holds all layers without a window
MOST_TABLES = 8
TABLE_COST = 50  # a further table must save about 1 / TABLE_COST of the memory


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A group of layers that share a block table.

    Attributes:
        layers: The indices of the layers that store keys and values of their own.
        keeps: The number of newest tokens whose keys and values are kept, including the token that is computed next.
            None: all tokens are kept.
        windows: The sliding windows, in tokens, of the layers that read the group's keys and values. The value is None
            if a layer sees all tokens.
    """

    layers: tuple[int, ...]
    keeps: int | None
    windows: frozenset[int | None]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of the KV cache: which layers share a block table, and how many layers share a block.

    Attributes:
        windows: The sliding window, in tokens, of each layer with attention. None for a layer that sees all tokens.
        groups: The cache groups. Each sequence has a block table per group.
        depth: The number of layers whose keys and values a block contains.
        block_size: The number of tokens per block.
    """

    windows: tuple[int | None, ...]
    groups: tuple[CacheGroup, ...]
    depth: int
    block_size: int

    @property
    def sizes(self) -> TableSizes:
        """The calculator of the number of blocks that a sequence needs with this layout."""
        return TableSizes(self.block_size, tuple(group.keeps for group in self.groups))

    @property
    def full_group(self) -> int | None:
        """The index of the first cache group that keeps all tokens, or None if all groups have a sliding window."""
        return next((i for i, group in enumerate(self.groups) if group.keeps is None), None)


def one_group(caches: Caches, block_size: int) -> CacheLayout:
    """Return the layout with a single cache group, in which all layers keep the keys and values of all tokens.

    Args:
        caches: The cache of each layer, or None for layers without attention.
        block_size: The number of tokens per block.
    """
    windows, layers = _windows(caches), tuple(own_caches(caches))
    return CacheLayout(windows, (CacheGroup(layers, None, frozenset(windows)),), len(layers), block_size)


def cache_layout(caches: Caches, block_size: int, longest: int) -> CacheLayout:
    """Return the KV cache layout in which the longest sequence of a job takes the least memory.

    A further block table is used only if it saves about 2 % of the memory. A layer keeps all tokens if its window is
    at least `longest`. If layers have keys and values of different sizes, all layers keep all tokens.

    Args:
        caches: The cache of each layer, or None for layers without attention.
        block_size: The number of tokens per block.
        longest: The number of tokens of the longest sequence.

    Raises:
        ValueError: If a layer shares the keys and values of a layer that does not store any.
    """
    wrong = next(cache_mistakes(caches), None)
    if wrong is not None:
        raise ValueError(wrong)
    own = own_caches(caches)
    same_size = len({cache.layout for cache in own.values()}) == 1
    keeps = {layer: cache.window if same_size else None for layer, cache in own.items()}
    keeps = {
        layer: None if window is None or window >= longest else window for layer, window in keeps.items()
    }
    kinds = Counter(keeps.values())
    if set(kinds) == {None}:
        return one_group(caches, block_size)
    found = [_make_layout(caches, keeps, depth, block_size) for depth in range(1, max(kinds.values()) + 1)]
    fitting = [layout for layout in found if len(layout.groups) <= max(MOST_TABLES, len(kinds))]
    fitting.append(one_group(caches, block_size))
    return min(fitting, key=lambda at: _memory(at, longest) * (TABLE_COST + len(at.groups)))


def stage_layout(layout: CacheLayout, caches: Caches, layers: tuple[int, int]) -> CacheLayout:
    """Return the KV cache layout of a pipeline stage.

    The stage has the same cache groups as the model, but some may have no layers. The stage's layers are renumbered
    from 0. The result's `windows` still include all layers of the model.

    Args:
        layout: The layout of the whole model.
        caches: The cache of each layer of the whole model, or None for layers without attention.
        layers: (first, end): the stage has the layers with the indices from `first` up to, but not including, `end`.
    """
    first, end = layers
    own = own_caches(caches[first:end])
    kept = {layer: group.keeps for group in layout.groups for layer in group.layers}
    parts = dict[int, tuple[int, ...]]()
    for kind in {group.keeps for group in layout.groups}:
        numbers = [at for at, group in enumerate(layout.groups) if group.keeps == kind]
        held = [layer for layer in own if kept[first + layer] == kind]
        # Distributed evenly: the group with the most layers determines the bytes per block
        parts |= {at: tuple(held[turn :: len(numbers)]) for turn, at in enumerate(numbers)}
    groups = tuple(
        replace(group, layers=parts[at], windows=_read_windows(parts[at], caches[first:end]) or group.windows)
        for at, group in enumerate(layout.groups)
    )
    return CacheLayout(layout.windows, groups, max(map(len, parts.values())), layout.block_size)


def _read_windows(layers: tuple[int, ...], caches: Caches) -> frozenset[int | None]:
    sources = (
        (layer if cache.shared is None else cache.shared, cache)
        for layer, cache in enumerate(caches)
        if cache
    )
    return frozenset(cache.window for source, cache in sources if source in layers)


def _windows(caches: Caches) -> tuple[int | None, ...]:
    return tuple(cache.window for cache in caches if cache is not None)


def _memory(layout: CacheLayout, longest: int) -> int:
    return layout.depth * layout.sizes.among_others(longest)


def _make_layout(caches: Caches, keeps: Mapping[int, int | None], depth: int, block_size: int) -> CacheLayout:
    own, groups = own_caches(caches), []
    for kind in dict.fromkeys(keeps.values()):
        layers = [layer for layer, keep in keeps.items() if keep == kind]
        for at in range(0, len(layers), depth):
            part = tuple(layers[at : at + depth])
            groups.append(CacheGroup(part, kind, frozenset(own[layer].window for layer in part)))
    return CacheLayout(_windows(caches), tuple(groups), depth, block_size)
