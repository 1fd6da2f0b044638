"""How the tokens of a step attend to latents on a GPU: with K and V of each head, made of the latents, or without.

Heads of K and V are smaller than a latent, so that a prompt's tokens have less to multiply with them. They are made
once for all tokens of a sequence that a step has; where these are few beside what is cached, as in decoding, or as
drafts are verified, making them would take longer (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1.2).
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

# Tokens of a step below which its launches, five more a layer, would take longer than what they save. Not measured.
LEAST_TOKENS = 256
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Decompressed:
    """Sequences whose K and V are made at the same time. slots: (N,) int64, where the latents of all their tokens lie;
    items: (n, 5) int32, of `decompressed_attention`."""

    slots: Tensor
    items: Tensor

    def attend(self, q: Tensor, cache: LayerCache, heads: LatentHeads, scale: float, out: Tensor) -> None:
        """Write the results of these sequences' tokens to `out`."""
        k, v = plain_weights(heads)
        latents = cache.k.view(-1, cache.k.shape[3]).index_select(0, self.slots)
        of_heads = latents[:, : heads.rank].expand(len(k), -1, -1)  # which no product copies
        made = torch.bmm(of_heads, k), torch.bmm(of_heads, v.mT)
        decompressed_attention(q, *made, latents[:, heads.rank :], self.items, scale, out)


@dataclass(frozen=True, slots=True, eq=False)
class LatentWork:
    """A step's attention: rows of q (n,) int64 that attend to the latents themselves by the plan, all if None; and what
    is decompressed, a group of sequences after the other."""

    absorbed: AttentionPlan | None
    rows: Tensor | None
    decompressed: Sequence[Decompressed]


class LatentPlan(AttentionPlan):
    """The plan of a step that no graph replays. What is decompressed is decided when the first layer asks, whose sizes
    it depends on."""

    padded_tokens = 0

    def __init__(
        self, inputs: AttentionInputs, block_size: int, plan: Callable[[AttentionInputs], AttentionPlan]
    ) -> None:
        """`plan`: plans attention to the latents themselves."""
        self._inputs, self._block_size, self._plan = inputs, block_size, plan
        self._work: dict[LatentSizes | None, LatentWork] = {}

    def work(self, q: Tensor, heads: LatentHeads) -> LatentWork:
        """Return what is to be done with the tokens of a layer with these heads."""
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
        """Return the inputs of some of the sequences, as far as attention reads them."""
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

    def _plan_group(self, group: Ints, lens: Ints, contexts: Ints, dtype: torch.dtype) -> Decompressed:
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
        return Decompressed(blocks * self._block_size + places[2], copy_to_device(items, self._device))

    @property
    def _device(self) -> torch.device:
        return self._inputs.block_tables.device


def plain_weights(heads: LatentHeads) -> tuple[Tensor, Tensor]:
    """Return (heads, rank, P) and (heads, V, rank), in floats; `decompressed_sizes` says that they are."""
    assert isinstance(heads.k, TritonHeads)
    assert isinstance(heads.v, TritonHeads)
    assert heads.k.values is not None
    assert heads.v.values is not None
    return heads.k.values, heads.v.values


def decompressed_sizes(q: Tensor, heads: LatentHeads) -> LatentSizes | None:
    """Return the sizes on which it depends what is decompressed; None: the weights of heads are quantised, and are
    multiplied with queries and results alone."""
    if not isinstance(heads.v, TritonHeads) or heads.v.values is None:
        return None
    return LatentSizes(heads.rank, heads.plain, q.shape[2] - heads.plain, heads.v.values.shape[1])


def choose_decompressed(lens: Ints, contexts: Ints, sizes: LatentSizes) -> NDArray[np.bool_]:
    """Return for which sequences K and V are made, (S,): those that it takes fewer operations, if they have enough
    tokens together. None has more keys than the step has tokens, so that a step takes as much memory as one that reads
    whole prompts."""
    pays: NDArray[np.bool_] = sizes.is_decompressing_cheaper(lens, contexts)
    found = pays & (contexts <= lens.sum())
    return found if lens[found].sum() >= LEAST_TOKENS else np.zeros_like(found)


def group_by_keys(sequences: Ints, contexts: Ints, most: int) -> list[Ints]:
    """Divide sequences into groups with up to `most` keys each, none of which has more by itself."""
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
