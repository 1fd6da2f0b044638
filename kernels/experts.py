"""The experts of a mixture-of-experts layer (Shazeer et al., 2017): choosing them and combining their results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.routing import Routing


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The experts that each of T tokens uses, and the weights of their results.

    Attributes:
        experts: (T, chosen) int64, the numbers of the experts.
        weights: (T, chosen) float32, the weight of each expert's result.
        counts: (experts,) int32, the number of tokens that use each expert; None if not counted.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The R rows of a step, one per token and chosen expert, sorted by expert and then by token.

    Attributes:
        order: (R,) int64, the token and choice of each sorted row, as token × experts per token + index of the choice.
        starts: (experts + 1,) int64, the first sorted row of each expert; the last value is R.
    """

    order: Tensor
    starts: Tensor


def choose_experts(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
    """Choose the experts of each of T tokens from the router's logits, in float32.

    torch.topk breaks ties, as in transformers. The host does not wait for a GPU.

    Args:
        logits: (T, experts).
        routing: the rule by which experts are chosen and weighted.
        correction: (experts,), added to the scores for the choice; required if and only if `routing.corrected`.
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
    """Raise ValueError if the logits do not match `routing.experts`, or the correction is missing or superfluous."""
    if logits.dim() != 2 or logits.shape[1] != routing.experts:
        raise ValueError(f"logits are {tuple(logits.shape)}, there are {routing.experts} experts")
    if (correction is not None) != routing.corrected:
        given = "no correction of the scores" if correction is None else "a correction of the scores"
        raise ValueError(f"{given} was passed, but routing.corrected is {routing.corrected}")


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each value, float32. Equal values give equal bits, whatever their position in the tensor.

    It is computed in float64 and rounded, because torch.sigmoid on a CPU uses other instructions for the last values of
    a tensor.
    """
    return x.double().sigmoid().to(x.dtype)


def _within_groups(scores: Tensor, routing: Routing) -> Tensor:
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
        # 1e-20, because a sum of sigmoids can be 0
        scores = scores / (scores.sum(-1, keepdim=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0))
    return scores if routing.scale == 1 else scores * routing.scale


def group_by_expert(experts: Tensor, count: int) -> Groups:
    """Sort the rows of a step by expert; there is one row per token and chosen expert.

    The host does not wait for a GPU.

    Args:
        experts: (T, chosen) int64, the experts of each token, all below `count`.
        count: number of experts.
    """
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
    """Return the weighted sum of the results of each token's experts: (T, N).

    The result of an expert is down(act(gate(x)) * up(x)), rounded to x's dtype after each product. The results are
    added in float32, in the order of the choice.

    Args:
        x: (T, K), T tokens of K inputs.
        gate_up: (E, 2 I, K), the gate of each of E experts above its up projection.
        down: (E, N, I), with N outputs.
        choice: the experts that each token uses, with their weights.
        activation: activation of the gate.
        gate_up_bias: (E, 2 I), or None.
        down_bias: (E, N), or None.
    """
    check_choice(x, choice)
    groups = group_by_expert(choice.experts, len(gate_up))
    rows = x[groups.order // choice.experts.shape[1]]
    inner = grouped_matmul_reference(rows, gate_up, groups.starts, gate_up_bias, activation=activation)
    made = grouped_matmul_reference(inner, down, groups.starts, down_bias)
    return combine_reference(made, groups.order, choice.weights)


def combine_reference(made: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the results of each token's experts: (T, N), added in float32.

    Args:
        made: (R, N), the results of rows sorted by expert.
        order: (R,) int64, `Groups.order`: the token and choice of each row, as token × chosen + index of the choice.
        weights: (T, chosen) float32; R is T × chosen.
    """
    by_token = torch.empty_like(made)
    by_token[order] = made
    by_token = by_token.view(*weights.shape, made.shape[1])
    total = by_token[:, 0].float() * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total = total + by_token[:, place].float() * weights[:, place : place + 1]
    return total.to(made.dtype)


def check_choice(x: Tensor, choice: Choice) -> None:
    """Raise ValueError unless `choice` has one row of experts and weights for each row of x."""
    experts, weights = choice.experts, choice.weights
    if experts.dim() != 2 or len(experts) != len(x) or experts.dtype != torch.int64:
        raise ValueError(f"experts are {tuple(experts.shape)} {experts.dtype}, there are {len(x)} rows")
    if weights.shape != experts.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights are {tuple(weights.shape)} {weights.dtype}, experts {tuple(experts.shape)}"
        )
