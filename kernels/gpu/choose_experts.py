"""A kernel that chooses the experts of each token. Cost: batchinfer_kernels.cost.routing_cost.

One program per token computes scores and takes the maximum once per chosen expert. A score and its expert's number are
packed into one integer that sorts by score: one maximum yields both, prefers the lower expert of equal scores, and puts
NaN first, which makes broken weights visible. The kernel also counts the tokens of each expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.experts import Choice, check_logits
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.routing import Routing

MAX_EXPERTS = 1024
_LEAST = tl.constexpr(-(1 << 63))


@triton.jit
def _ranked(x, number):
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(x != x, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def _number(rank):
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _within_groups(
    preferred, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, TOP_TWO: tl.constexpr
):
    SIZE: tl.constexpr = EXPERTS // GROUPS
    grouped = tl.reshape(preferred, (GROUPS, SIZE))
    inside = tl.arange(0, SIZE)
    ranks = _ranked(grouped, inside[None, :] + tl.zeros((GROUPS, SIZE), tl.int32))
    best = _number(tl.max(ranks, 1))
    of_groups = tl.sum(tl.where(inside[None, :] == best[:, None], grouped, 0.0), 1)
    if TOP_TWO:
        ranks = tl.where(inside[None, :] == best[:, None], _LEAST, ranks)
        second = _number(tl.max(ranks, 1))
        of_groups += tl.sum(tl.where(inside[None, :] == second[:, None], grouped, 0.0), 1)
    group = tl.arange(0, GROUPS)
    ranks = _ranked(of_groups, group)
    kept = tl.zeros((GROUPS,), tl.int32)
    for _ in tl.static_range(CHOSEN):
        found = _number(tl.max(ranks, 0))
        kept = tl.where(group == found, 1, kept)
        ranks = tl.where(group == found, _LEAST, ranks)
    return tl.reshape(tl.where(kept[:, None] > 0, grouped, float("-inf")), (EXPERTS,))


@triton.jit
def _choose_kernel(
    logits_ptr, stride, correction_ptr, experts_ptr, weights_ptr, counts_ptr,  # correction_ptr may be None
    experts, scale,
    SCORING: tl.constexpr, NORMALISED: tl.constexpr, CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, TOP_TWO: tl.constexpr,
    EXPERTS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    number, place = tl.arange(0, EXPERTS), tl.arange(0, PLACES)
    there = number < experts
    scores = tl.load(logits_ptr + token * stride + number, mask=there, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    preferred = scores
    if correction_ptr is not None:
        preferred += tl.load(correction_ptr + number, mask=there, other=0.0).to(tl.float32)
    if CHOSEN_GROUPS < GROUPS:
        preferred = _within_groups(preferred, EXPERTS, GROUPS, CHOSEN_GROUPS, TOP_TWO)
    ranks = tl.where(there, _ranked(preferred, number), _LEAST)
    chosen = tl.zeros((PLACES,), tl.int32)
    weights = tl.full((PLACES,), float("-inf") if SCORING == "softmax_of_chosen" else 0.0, tl.float32)
    for at in tl.static_range(CHOSEN):
        found = _number(tl.max(ranks, 0))
        chosen = tl.where(place == at, found, chosen)
        weights = tl.where(place == at, tl.sum(tl.where(number == found, scores, 0.0), 0), weights)
        ranks = tl.where(number == found, _LEAST, ranks)
    if SCORING == "softmax_of_chosen":
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    if NORMALISED:
        weights = weights / (tl.sum(weights, 0) + (1e-20 if SCORING == "sigmoid" else 0.0))
    taken = place < CHOSEN
    tl.store(experts_ptr + token * CHOSEN + place, chosen.to(tl.int64), mask=taken)
    tl.store(weights_ptr + token * CHOSEN + place, weights * scale, mask=taken)
    tl.atomic_add(counts_ptr + chosen, 1, mask=taken, sem="relaxed")


def can_choose(routing: Routing) -> bool:
    """Return True if `choose_experts` supports the routing: at most MAX_EXPERTS experts, in 2^n groups."""
    sizes = (routing.experts, routing.groups)
    whole = all(size == next_power_of_2(size) for size in sizes)
    return routing.experts <= MAX_EXPERTS and (routing.chosen_groups == routing.groups or whole)


def choose_experts(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
    """Choose the experts of each of T tokens, and count the tokens of each expert.

    The contract is that of `experts.choose_experts`, but of equally good experts the lowest number is chosen.

    Args:
        logits: (T, experts); rows may be strided.
        routing: the rule by which experts are chosen and weighted.
        correction: (experts,), added to the scores for the choice, or None.

    Raises:
        ValueError: Unless `can_choose(routing)` and shapes match.
    """
    check_logits(logits, routing, correction)
    if not can_choose(routing):
        raise ValueError(
            f"the kernel cannot choose {routing.chosen} of {routing.experts} experts in {routing.groups} groups"
        )
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens, device = len(logits), logits.device
    experts = torch.empty(tokens, routing.chosen, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, routing.chosen, dtype=torch.float32, device=device)
    counts = torch.zeros(routing.experts, dtype=torch.int32, device=device)
    size = next_power_of_2(routing.experts)
    if tokens:
        _choose_kernel[(tokens,)](
            logits, logits.stride(0), None if correction is None else correction.contiguous(),
            experts, weights, counts, routing.experts, float(routing.scale),
            SCORING=routing.scoring, NORMALISED=routing.normalised, CHOSEN=routing.chosen,
            GROUPS=routing.groups, CHOSEN_GROUPS=routing.chosen_groups, TOP_TWO=routing.group_score == "top_two",
            EXPERTS=size, PLACES=next_power_of_2(routing.chosen), num_warps=1 if size <= 256 else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return Choice(experts, weights, counts)
