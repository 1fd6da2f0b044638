"""Attention over cached latents on a GPU, with or without decompressing them to K and V of each head.

Heads of K and V are smaller than a latent, so the queries of a prompt need fewer FLOPs with them. K and V are made once
for all queries of a sequence in a step. If a sequence has few queries for its cached tokens, as in decoding or when
drafts are verified, making K and V would take longer than it saves (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.gpu_experts import TritonHeads
from batchinfer.models.ops.layers import LatentHeads
from batchinfer_kernels.cost import LatentSizes
from batchinfer_kernels.gpu.attention_launch import copy_to_device
from batchinfer_kernels.gpu.decompressed_attention import decompressed_attention, decompressed_tokens
from batchinfer_kernels.gpu.prefill_attention import prefill_items

# For fewer queries, the five additional launches per layer would take longer than they save. Not measured.
LEAST_TOKENS = 256
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DecompressedGroup:
    """A group of sequences in a step whose K and V are computed from cached latents ("decompressed") at the same time.

    Attributes:
        slots: (keys,) int64, the cache slots of the latents of all tokens of these sequences.
        items: (n, 5) int32, the work items of the kernel `decompressed_attention`.
    """

    slots: Tensor
    items: Tensor

    def attend(self, q: Tensor, cache: LayerCache, heads: LatentHeads, scale: float, out: Tensor) -> None:
        """Compute attention for the tokens of these sequences, and write the results to their rows of `out`.

        Args:
            q: (tokens of the step, heads, unrotated + rotated values), the queries.
            cache: The layer's cache of latents.
            heads: The weights that compute K and V from latents.
            scale: The factor of scores.
            out: (tokens of the step, heads, size of a value), the results of the step. Rows of other sequences are not
                changed.
        """
        k, v = plain_weights(heads)
        latents = cache.k.view(-1, cache.k.shape[3]).index_select(0, self.slots)
        of_heads = latents[:, : heads.rank].expand(len(k), -1, -1)  # a view, which bmm does not copy
        made = torch.bmm(of_heads, k), torch.bmm(of_heads, v.mT)
        decompressed_attention(q, *made, latents[:, heads.rank :], self.items, scale, out)


@dataclass(frozen=True, slots=True, eq=False)
class LatentWork:
    """The attention of a step over cached latents, divided between two methods.

    Some sequences attend to latents directly. For others, K and V are computed from latents ("decompressed").

    Attributes:
        absorbed: The plan of direct attention to latents. None: all sequences are decompressed.
        rows: (n,) int64, the rows of the queries that attend to latents directly. None: all queries, if `absorbed` is
            given, or else no query.
        decompressed: Groups of sequences, which are decompressed sequentially to limit memory.
    """

    absorbed: AttentionPlan | None
    rows: Tensor | None
    decompressed: Sequence[DecompressedGroup]


class LatentPlan(AttentionPlan):
    """The plan of a step's attention over cached latents, outside of CUDA graphs.

    The first layer decides for which sequences K and V are computed from latents ("decompressed").
    """

    padded_tokens = 0

    def __init__(
        self, inputs: AttentionInputs, block_size: int, plan: Callable[[AttentionInputs], AttentionPlan]
    ) -> None:
        """Create the plan. `work` then chooses the method for each sequence.

        Args:
            inputs: The inputs of the step.
            block_size: The number of tokens in a block.
            plan: Returns the plan of direct attention to latents for the inputs of some sequences.
        """
        self._inputs, self._block_size, self._plan = inputs, block_size, plan
        self._work: dict[LatentSizes | None, LatentWork] = {}

    def work(self, q: Tensor, heads: LatentHeads) -> LatentWork:
        """Return which sequences attend to latents directly, and for which K and V are computed from latents.

        Layers with equal sizes share the result.

        Args:
            q: (tokens, heads, unrotated + rotated values), the queries.
            heads: The weights that compute K and V from latents.
        """
        sizes = decompressed_sizes(q, heads)
        if sizes not in self._work:
            self._work[sizes] = self._divide(sizes, q.dtype)
        return self._work[sizes]

    def _divide(self, sizes: LatentSizes | None, dtype: torch.dtype) -> LatentWork:
        lens, contexts = (
            np.array(of, np.int64) for of in (self._inputs.query_lens, self._inputs.context_lens)
        )
        chosen = np.zeros(len(lens), bool) if sizes is None else choose_decompressed(lens, contexts, sizes)
        if not chosen.any():
            return LatentWork(self._plan(self._inputs), None, ())
        groups = group_by_keys(np.flatnonzero(chosen), contexts, int(lens.sum()))
        made = [self._plan_group(group, lens, contexts, dtype) for group in groups]
        rest = np.flatnonzero(~chosen & (lens > 0))
        if not len(rest):
            return LatentWork(None, None, made)
        rows = copy_to_device(np.flatnonzero(np.repeat(~chosen, lens)), self._device, np.int64)
        return LatentWork(self._plan(self._select(rest)), rows, made)

    def _select(self, sequences: Ints) -> AttentionInputs:
        inputs = self._inputs
        return replace(
            inputs,
            block_tables=inputs.block_tables.index_select(
                0, copy_to_device(sequences, self._device, np.int64)
            ),
            query_lens=[inputs.query_lens[i] for i in sequences],
            context_lens=[inputs.context_lens[i] for i in sequences],
            host_tables=None,
        )

    def _plan_group(self, group: Ints, lens: Ints, contexts: Ints, dtype: torch.dtype) -> DecompressedGroup:
        own = contexts[group]
        firsts = np.cumsum(own) - own
        rows = (np.cumsum(lens) - lens)[group]
        items = prefill_items(lens[group], own, decompressed_tokens(dtype), rows)
        items[:, 0] = firsts[items[:, 0]]
        sequence, at = np.repeat(group, own), np.arange(own.sum()) - np.repeat(firsts, own)
        places = copy_to_device(
            np.stack((sequence, at // self._block_size, at % self._block_size)), self._device, np.int64
        )
        blocks = self._inputs.block_tables[places[0], places[1]].long()
        return DecompressedGroup(blocks * self._block_size + places[2], copy_to_device(items, self._device))

    @property
    def _device(self) -> torch.device:
        return self._inputs.block_tables.device


def plain_weights(heads: LatentHeads) -> tuple[Tensor, Tensor]:
    """Return the float weights that compute K and V from latents.

    Args:
        heads: The weights. They must not be quantised.

    Returns:
        (heads, rank, unrotated values of a query) for K, and (heads, size of a value, rank) for V.
    """
    assert isinstance(heads.k, TritonHeads)
    assert isinstance(heads.v, TritonHeads)
    assert heads.k.values is not None
    assert heads.v.values is not None
    return heads.k.values, heads.v.values


def decompressed_sizes(q: Tensor, heads: LatentHeads) -> LatentSizes | None:
    """Return the sizes of a layer for `choose_decompressed`; None if the weights of `heads` are quantised.

    Quantised weights cannot compute K and V from latents.

    Args:
        q: (tokens, heads, unrotated + rotated values), the queries.
        heads: The weights that compute K and V from latents.
    """
    if not isinstance(heads.v, TritonHeads) or heads.v.values is None:
        return None
    return LatentSizes(heads.rank, heads.plain, q.shape[2] - heads.plain, heads.v.values.shape[1])


def choose_decompressed(lens: Ints, contexts: Ints, sizes: LatentSizes) -> NDArray[np.bool_]:
    """Return for which sequences K and V are computed from cached latents ("decompressed"), (S,) bool.

    This is done for sequences that need fewer operations if decompressed, and have at most as many keys as the step has
    tokens. If such sequences have fewer than LEAST_TOKENS queries together, the result is False for all.

    Args:
        lens: (S,), the number of queries of each of S sequences.
        contexts: (S,), the number of keys of each sequence.
        sizes: The sizes of the layer.
    """
    cheaper: NDArray[np.bool_] = sizes.is_decompressing_cheaper(lens, contexts)
    found = cheaper & (contexts <= lens.sum())
    return found if lens[found].sum() >= LEAST_TOKENS else np.zeros_like(found)


def group_by_keys(sequences: Ints, contexts: Ints, most: int) -> list[Ints]:
    """Divide sequences into groups with at most `most` keys each.

    Args:
        sequences: (n,), the indices of the sequences in the step.
        contexts: (S,), the number of keys of each sequence of the step, at most `most`.
        most: The maximum number of keys of a group.
    """
    found: list[list[int]] = []
    room = 0
    for sequence in sequences.tolist():
        keys = int(contexts[sequence])
        if keys > room:
            found.append([])
            room = most
        found[-1].append(sequence)
        room -= keys
    return [np.array(group, np.int64) for group in found]
