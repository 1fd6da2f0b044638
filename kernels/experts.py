"""The experts of a feed-forward layer (Shazeer et al., 2017): which a token goes to, and what they make of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.routing import Routing


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Each token's experts, and the weights of their results."""

    experts: Tensor  # (T, chosen) int64
    weights: Tensor  # (T, chosen) float32
    counts: Tensor | None = None  # (experts,) int32: tokens of each, where they were counted on the way


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows, one for each token and choice, sorted by expert; rows of an expert stand in the tokens' order."""

    order: Tensor  # (R,) int64: token × chosen + choice
    starts: Tensor  # (experts + 1,) int64: where each expert's rows begin


def choose_experts(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
    """logits: (T, experts); correction: (experts,) where the routing is `corrected`. The host waits for nothing.

    Everything is float32. Which of equal experts is chosen is torch.topk's choice, as in transformers.
    """
    check_logits(logits, routing, correction)
    logits = logits.float()
    if routing.scoring == "softmax_of_chosen":
        best, experts = logits.topk(routing.chosen)
        return Choice(experts, _weighted(best.softmax(-1), routing))
    scores = sigmoid(logits) if routing.scoring == "sigmoid" else logits.softmax(-1)
    preferred = scores if correction is None else scores + correction.float()
    if routing.chosen_groups < routing.groups:
        preferred = _within_groups(preferred, routing)
    experts = preferred.topk(routing.chosen).indices
    return Choice(experts, _weighted(scores.gather(1, experts), routing))


def check_logits(logits: Tensor, routing: Routing, correction: Tensor | None) -> None:
    """Raises ValueError where shapes do not fit, or a correction is missing or there for nothing."""
    if logits.dim() != 2 or logits.shape[1] != routing.experts:
        raise ValueError(f"logits are {tuple(logits.shape)}, there are {routing.experts} experts")
    if (correction is not None) != routing.corrected:
        given = "no correction of the scores" if correction is None else "a correction of the scores"
        raise ValueError(f"there is {given}, and corrected is {routing.corrected} in the routing")


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid, with the same bits for a value wherever it stands. On a CPU torch computes the last few
    values of a tensor by other instructions than the others, and the last bit may differ: computed in float64, it is
    rounded away."""
    return x.double().sigmoid().to(x.dtype)


def _within_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores of the chosen groups' experts; those of others are -inf."""
    grouped = scores.view(len(scores), routing.groups, -1)
    if routing.group_score == "max":
        of_groups = grouped.amax(-1)
    else:
        of_groups = grouped.topk(2).values.sum(-1)
    left_out = torch.ones_like(of_groups, dtype=torch.bool)
    left_out.scatter_(1, of_groups.topk(routing.chosen_groups).indices, False)
    return grouped.masked_fill(left_out[..., None], float("-inf")).flatten(1)


def _weighted(scores: Tensor, routing: Routing) -> Tensor:
    if routing.normalised:
        # The sum of sigmoids may be 0
        scores = scores / (scores.sum(-1, keepdim=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0))
    return scores if routing.scale == 1 else scores * routing.scale


def group_by_expert(experts: Tensor, count: int) -> Groups:
    """experts: (T, chosen) int64 below `count`. The host waits for nothing."""
    found, order = experts.flatten().sort(stable=True)
    return Groups(order, torch.searchsorted(found, torch.arange(count + 1, device=experts.device)))


def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    choice: Choice,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """x: (T, K); gate_up: (E, 2 I, K), gate above up; down: (E, N, I) → (T, N): the sum, over a token's experts, of
    weight × down(act(gate(x)) * up(x)), added in float32 in the order of the choice.

    Results of the products are rounded to x's dtype.
    """
    check_choice(x, choice)
    groups = group_by_expert(choice.experts, len(gate_up))
    rows = x[groups.order // choice.experts.shape[1]]
    inner = grouped_matmul_reference(rows, gate_up, groups.starts, gate_up_bias, activation=activation)
    made = grouped_matmul_reference(inner, down, groups.starts, down_bias)
    return combine_reference(made, groups.order, choice.weights)


def combine_reference(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """made: (R, N), rows sorted by expert; order: (R,) as in Groups; weights: (T, chosen) float32 → (T, N).

    Each token's rows are weighted and added in float32, in the order of the choice.
    """
    by_token = torch.empty_like(made)
    by_token[order] = made
    by_token = by_token.view(*weights.shape, made.shape[1])
    total = by_token[:, 0].float() * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total = total + by_token[:, place].float() * weights[:, place : place + 1]
    return total.to(made.dtype)


def check_choice(x: Tensor, choice: Choice) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    experts, weights = choice.experts, choice.weights
    if experts.dim() != 2 or len(experts) != len(x) or experts.dtype != torch.int64:
        raise ValueError(f"experts are {tuple(experts.shape)} {experts.dtype}, there are {len(x)} rows")
    if weights.shape != experts.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights are {tuple(weights.shape)} {weights.dtype}, experts {tuple(experts.shape)}"
        )
