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
    """Layers that share a block table."""

    layers: tuple[int, ...]  # layers with K and V of their own
    keeps: int | None  # number of kept tokens, including the next one; None: all
    windows: frozenset[int | None]  # windows of the layers that read the group, each at most `keeps`


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of the KV cache of a model for a job."""

    windows: tuple[int | None, ...]  # window of each layer with attention
    groups: tuple[CacheGroup, ...]
    depth: int  # layers per block
    block_size: int  # tokens per block

    @property
    def sizes(self) -> TableSizes:
        """The table sizes of a sequence, for the scheduler."""
        return TableSizes(self.block_size, tuple(group.keeps for group in self.groups))

    @property
    def whole(self) -> int | None:
        """The index of the first group that keeps all tokens, if there is one."""
        return next((i for i, group in enumerate(self.groups) if group.keeps is None), None)


def one_group(caches: Caches, block_size: int) -> CacheLayout:
    """Return a layout with a single group, in which all layers keep all tokens."""
    windows, layers = _windows(caches), tuple(own_caches(caches))
    return CacheLayout(windows, (CacheGroup(layers, None, frozenset(windows)),), len(layers), block_size)


def cache_layout(caches: Caches, block_size: int, longest: int) -> CacheLayout:
    """Return the layout with the lowest memory for a sequence of `longest` tokens, weighted by the number of tables.

    A layer keeps all tokens if its window is at least `longest`. If layers have K and V of different sizes, all layers
    keep all tokens.

    Raises:
        ValueError: If a layer reads the K and V of a layer that does not keep any.
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
    found = [_cut(caches, keeps, depth, block_size) for depth in range(1, max(kinds.values()) + 1)]
    fitting = [layout for layout in found if len(layout.groups) <= max(MOST_TABLES, len(kinds))]
    fitting.append(one_group(caches, block_size))
    return min(fitting, key=lambda at: _memory(at, longest) * (TABLE_COST + len(at.groups)))


def stage_layout(layout: CacheLayout, caches: Caches, layers: tuple[int, int]) -> CacheLayout:
    """Return the layout of a pipeline stage.

    It has the same groups as the model, because stages share block tables. The stage's layers are distributed evenly
    among the groups with the same window, which keeps blocks small. A group may have no layers. `windows` has
    all layers of the model.

    Args:
        layout: The layout of the model.
        caches: The caches of all layers.
        layers: The first layer of the stage and the first layer after it. They are renumbered from 0.
    """
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
    """Return the window of each layer with attention."""
    return tuple(cache.window for cache in caches if cache is not None)


def _memory(layout: CacheLayout, longest: int) -> int:
    """Return the memory of a sequence of `longest` tokens, in blocks times layers per block."""
    return layout.depth * layout.sizes.among_others(longest)


def _cut(caches: Caches, keeps: Mapping[int, int | None], depth: int, block_size: int) -> CacheLayout:
    own, groups = own_caches(caches), []
    for kind in dict.fromkeys(keeps.values()):
        layers = [layer for layer, keep in keeps.items() if keep == kind]
        for at in range(0, len(layers), depth):
            part = tuple(layers[at : at + depth])
            groups.append(CacheGroup(part, kind, frozenset(own[layer].window for layer in part)))
    return CacheLayout(_windows(caches), tuple(groups), depth, block_size)
