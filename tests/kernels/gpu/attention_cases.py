"""Helpers for tests of attention: paged caches with poison around the readable part, kernels as functions,
launches for the compiler."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.gpu.attention_plan import AttentionShape, Room, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.attention_splits import Splits, Splitter
from batchinfer_kernels.gpu.decode_attention import decode_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_lse_reference
from tests.kernels.cpu_steps import Step, poisoned_step, rules_of
from tests.kernels.trees import mask_of, random_parents

SCALE = 0.2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Units in the last place of the dtype, at values of about 1: weights and sums are rounded once each
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case(Step):
    """A step on the GPU, whose tables end in -1."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.table

    @property
    def scaling(self) -> dict[str, Tensor | None]:
        return dict(zip(("k_scale", "v_scale"), self.scales or (None, None), strict=True))

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.q.dtype, self.q.shape[1], self.k.shape[1], self.q.shape[2])

    def outputs(self) -> dict[str, Tensor]:
        """Return poisoned outputs for the values and the log-sum-exps."""
        lse = torch.full(self.q.shape[:2], float("nan"), device=self.q.device)
        return {"out": torch.full_like(self.q, float("nan")), "lse": lse}

    def reference(self, window=None, sinks=None, **extras) -> tuple[Tensor, Tensor]:
        """Return values and log-sum-exps. A padding query, without keys, gets 0 and its sink."""
        real = torch.tensor([context > 0 for n, context in self.chunks for _ in range(n)], dtype=torch.bool)
        out, lse = torch.zeros_like(self.q), self.outputs()["lse"]
        lse[:] = float("-inf") if sinks is None else sinks
        queries = [n if context else 0 for n, context in self.chunks]
        q, *caches = self.tensors
        rules = rules_of(SCALE, window, {"sinks": sinks, **extras})
        more = {name: extras[name] for name in ("causal", "tree") if name in extras}
        out[real], lse[real] = paged_attention_lse_reference(
            q[real], *caches, queries, self.contexts, rules, **self.scaling, **more
        )
        return out, lse


def paged_case(
    chunks,
    kv_heads=2,
    group=2,
    dim=64,
    block_size=16,
    dtype=torch.float32,
    cache_dtype=None,
    seed=0,
    device="cpu",
) -> Case:
    """Return a random q and cache with shuffled blocks. Unused slots are poisoned, and tables end in -1."""
    step = poisoned_step(seed, kv_heads * group, kv_heads, dim, block_size, list(chunks), pad=-1)
    step = step.to(dtype, cache_dtype is not None, cache_dtype)
    q, k, v, table = (tensor.to(device) for tensor in (step.q, step.k, step.v, step.table))
    scales = step.scales and (step.scales[0].to(device), step.scales[1].to(device))
    return Case(q, k, v, table, step.chunks, scales)


def sharing(case: Case, block_size: int, prefixes: list[tuple[list[int], int]]) -> Case:
    """Return the case with shared prefixes: sequences use the blocks of the first one, and old blocks are
    poisoned.

    Args:
        prefixes: (sequences, keys), outer before inner ones.
    """
    for sequences, keys in prefixes:
        blocks = keys // block_size
        source = case.table[sequences[0], :blocks].clone()
        for other in sequences[1:]:
            left = case.table[other, :blocks][case.table[other, :blocks] != source].long()
            for cache in (case.k, case.v):
                cache[left] = float("nan") if cache.dtype.is_floating_point else 127
            for scale in case.scales or ():
                scale[left] = float("nan")
            case.table[other, :blocks] = source
    return case


def splits_of(contexts, case: Case, window=None, segment=None, deterministic=False, longest=None) -> Splits:
    """Return the items of single queries without shared prefixes.

    Args:
        longest: bound of contexts in a graph.
    """
    lengths = np.array(contexts, np.int64)
    splitter = Splitter(case.k.shape[1], case.q.device, deterministic, longest)
    return splitter.split(lengths, np.zeros_like(lengths), window, segment)


def prefill(case: Case, window=None, **extras) -> tuple[Tensor, Tensor]:
    named = {**case.outputs(), **case.scaling, **extras}
    prefill_attention(*case.tensors, case.queries, case.contexts, rules_of(SCALE, window, named), **named)
    return named["out"], named["lse"]


def decode(
    case: Case, window=None, segment=None, longest=None, planned=None, deterministic=False, **extras
) -> tuple[Tensor, Tensor]:
    """Run decode attention.

    Args:
        longest: bound of contexts in a graph.
        planned: the contexts before they grew.
    """
    splits = splits_of(planned or case.contexts, case, window, segment, deterministic, longest)
    named = {**case.outputs(), **case.scaling, **extras}
    rules = rules_of(SCALE, window, named)
    decode_attention(*case.tensors, case.lengths, splits, rules, deterministic=deterministic, **named)
    return named["out"], named["lse"]


def attend_sharing(
    case: Case, prefixes=(), window=None, deterministic=False, tree=None, room=None, **extras
) -> tuple[Tensor, Tensor]:
    """Run attention with shared prefixes.

    Args:
        prefixes: (sequences, keys), as in `sharing`.
    """
    outputs, shared = case.outputs(), [SharedPrefix(*p) for p in prefixes]
    shape = replace(case.shape, deterministic=deterministic)
    plan = plan_attention(case.queries, case.contexts, shape, case.q.device, shared, room, [window], tree)
    paged_attention(*case.tensors, plan, rules_of(SCALE, window, extras), **outputs, **case.scaling, **extras)
    return outputs["out"], outputs["lse"]


def attend_few(case: Case, queries=8, longest=1024, **how) -> tuple[Tensor, Tensor]:
    """Attend like a graph that verifies drafts, with up to `queries` per sequence."""
    return attend_sharing(case, room=Room(longest, sharing=None, queries=queries), **how)


def check(case: Case, attend, window=None, soft_cap=None, sinks=None, tree=None, **how: Any) -> None:
    """Compare an attention function with the reference.

    Args:
        attend: a function of this module.
        how: its further arguments.
    """
    rules = {"soft_cap": soft_cap, "sinks": sinks} | ({} if tree is None else {"tree": tree})
    found = attend(case, window=window, **rules, **how)
    for got, wanted in zip(found, case.reference(window, **rules), strict=True):
        assert_near(got, wanted, case.q.dtype)


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=False
    )


def tree_of(case: Case, *nodes: int) -> TreeMask:
    """Return the mask of a step whose last queries are random trees, with this number of nodes per sequence."""
    rng = random.Random(0)
    return mask_of(case, [random_parents(rng, count) for count in nodes])


# ---- launches for the compiler: arguments are JSON's types. `lse` is None, as in every launch of the engine


def launch_prefill(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    case, extras = compiled_case(((100, 300),), dtype, dim, group, block_size, soft_cap, codes)
    prefill(case, window, deterministic=deterministic, lse=None, **extras)


def launch_encoder(dtype, dim, group, block_size, window, distances, codes, deterministic) -> None:
    """Launch the attention of an encoder's prompt.

    Args:
        distances: if True, distances are added to scores.
    """
    case, _ = compiled_case(((300, 300),), dtype, dim, group, block_size, None, codes)
    bias = torch.zeros(2 * group, 1024) if distances else None
    prefill(case, window, causal=False, bias=bias, deterministic=deterministic, lse=None)


def launch_decode(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    """Launch decode attention with one and with several items per row."""
    case, extras = compiled_case(((1, 300),) * 2, dtype, dim, group, block_size, soft_cap, codes)
    for planned in (300, 3000):
        decode(case, window, 512, planned=[planned] * 2, deterministic=deterministic, lse=None, **extras)


def launch_prefix(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    case, extras = compiled_case(((1, 1100), (1, 1100)), dtype, dim, group, block_size, soft_cap, codes)
    shape = replace(case.shape, deterministic=deterministic)
    prefixes = [SharedPrefix([0, 1], 1024)]
    plan = plan_attention(case.queries, case.contexts, shape, "cpu", prefixes, windows=[window])
    paged_attention(*case.tensors, plan, ScoreRules(SCALE, window, **extras), **case.scaling)


def launch_tree(dtype, dim, group, block_size, soft_cap, codes, deterministic) -> None:
    """Launch attention of chunks and of a draft tree, as in a step with prompts."""
    case, extras = compiled_case(((100, 300), (8, 300)), dtype, dim, group, block_size, soft_cap, codes)
    shape, tree = replace(case.shape, deterministic=deterministic), tree_of(case, 0, 7)
    plan = plan_attention(case.queries, case.contexts, shape, "cpu", tree=tree)
    paged_attention(*case.tensors, plan, ScoreRules(SCALE, **extras), **case.scaling)


def launch_few(
    queries, dtype, dim, group, block_size, window, soft_cap, codes, deterministic, branching=False
) -> None:
    """Launch decode attention of several queries per sequence, with one and with several items per row.

    Args:
        branching: if True, queries are draft trees.
    """
    case, extras = compiled_case(((queries, 3000),) * 2, dtype, dim, group, block_size, soft_cap, codes)
    shape, room = replace(case.shape, deterministic=deterministic), Room(3000, queries=queries)
    for shorter in (3000, 300):  # rows of equal length are not split
        tree = tree_of(case, queries - 1, queries - 1) if branching else None
        plan = plan_attention(case.queries, [3000, shorter], shape, "cpu", (), room, [window], tree)
        paged_attention(*case.tensors, plan, ScoreRules(SCALE, window, **extras), **case.scaling)


def compiled_case(chunks, dtype, dim, group, block_size, soft_cap, codes) -> tuple[Case, dict[str, Any]]:
    """Return the case, and a soft cap with sinks: few models have both, but one launch covers all arguments."""
    cache_dtype = None if codes is None else getattr(torch, codes)
    case = paged_case(chunks, 2, group, dim, block_size, getattr(torch, dtype), cache_dtype)
    return case, {"soft_cap": soft_cap, "sinks": None if soft_cap is None else torch.zeros(2 * group)}
