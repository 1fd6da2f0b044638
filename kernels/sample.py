"""The reference of sampling: temperature, top-k, top-p, min-p and one draw by inversion of the cumulative sum."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from batchinfer_kernels.arithmetic import NO_TOKEN as NO_TOKEN
from batchinfer_kernels.philox import uniforms

MIN_TEMPERATURE = 1e-30  # representable in float32; a smaller one could round to 0 and compute 0 / 0
# Bounds memory: a draw needs about 40 bytes per logit, 190 MB for 32 rows of a vocabulary of 150,000
ROWS_AT_ONCE = 32
# Numbers of tokens to sort, tried in turn. Sorting all of 150,000 took 45 ms per row, selecting and sorting 1024 took
# 1 ms; few nuclei are larger
CANDIDATES = (1024, 16384)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling parameters of each row. All tensors are contiguous and on the logits' device.

    Attributes:
        temperature: (rows,) float32; 0 selects the argmax, whatever the other parameters are.
        top_k: (rows,) int32; 0 for no limit.
        top_p: (rows,) float64; 1 for no limit.
        min_p: (rows,) float64; 0 for no limit.
        keys: (rows, 4) int32, the seed of the row's random numbers: two words of the key of Philox, and the upper half
            of its counter.
        positions: (rows,) int32, the index of the new token in its sequence, which is the lowest word of the counter.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    positions: Tensor

    def check(self, logits: Tensor) -> None:
        """Raise ValueError unless the tensors have the documented shapes and dtypes for logits (rows, vocab)."""
        if logits.dim() != 2 or not logits.shape[1]:
            raise ValueError(f"logits are {tuple(logits.shape)}, expected (rows, vocab)")
        rows, wanted = logits.shape[0], dict.fromkeys(("top_k", "keys", "positions"), torch.int32)
        wanted |= {"temperature": torch.float32, "top_p": torch.float64, "min_p": torch.float64}
        for name in (field.name for field in fields(self)):
            tensor, shape = getattr(self, name), (rows, 4) if name == "keys" else (rows,)
            if tensor.shape != shape or tensor.dtype != wanted[name] or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {wanted[name]}"
                )

    def rows(self, indices: Tensor) -> RowSampling:
        """Return the parameters of the rows at `indices`."""
        return RowSampling(*(getattr(self, field.name)[indices] for field in fields(self)))


def sample_reference(logits: Tensor, sampling: RowSampling | None = None) -> Tensor:
    """Sample a token from each row of logits: (rows,) int64, NO_TOKEN if a row's greatest logit is not finite.

    Logits are divided by the temperature. Then top-k, top-p (Holtzman et al., 2020) and min-p remove tokens, in this
    order. Top-p applies to the probabilities after top-k; min-p is relative to the most likely token. Equally likely
    tokens rank by their ids. The token that reaches top_p is kept.

    Args:
        logits: (rows, vocab), of any floating-point dtype.
        sampling: parameters of the rows; None or a temperature of 0 selects the argmax.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    best, chosen = logits.max(-1)
    finite = best.isfinite()
    if sampling is not None:
        sampling.check(logits)
        drawn = ((sampling.temperature > 0) & finite).nonzero()[:, 0]
        for rows in torch.split(drawn, ROWS_AT_ONCE):
            chosen[rows] = _draw(logits[rows], sampling.rows(rows))
    return torch.where(finite, chosen, NO_TOKEN)


def kept_probabilities(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Return the probabilities of tokens, 0 for tokens that top-k, top-p or min-p exclude: (rows, vocab) float64.

    They are not normalised again, so their sum may be below 1. All temperatures must be above 0.
    """
    # Subtract the maximum first, because dividing by a small temperature could overflow
    wide = logits.float()
    below = wide - wide.amax(-1, keepdim=True)
    found = below.div_(sampling.temperature.clamp(min=MIN_TEMPERATURE)[:, None]).softmax(-1)
    del below, wide
    filtered = ((sampling.top_k > 0) | (sampling.top_p < 1.0)).nonzero()[:, 0]
    kept = found.double()
    if len(filtered):
        kept[filtered] = _keep_top(found[filtered], sampling.top_k[filtered], sampling.top_p[filtered])
    least = sampling.min_p * kept.amax(-1)
    return kept.masked_fill_(kept < least[:, None], 0.0)


def _keep_top(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    # Sorts only the most likely tokens of a row, and more of them if the nucleus may be larger
    vocab = probabilities.shape[1]
    # cumsum, because `sum` may split a long row, which would change its bits with the number of rows
    total = probabilities.cumsum(-1, dtype=torch.float64)[:, -1]
    kept = torch.zeros_like(probabilities, dtype=torch.float64)
    left = torch.arange(len(probabilities), device=kept.device)
    for some in (*(n for n in CANDIDATES if n < vocab), vocab):
        ordered, ids = _ranked(probabilities[left], some)
        found = _nucleus(ordered.double(), total[left], top_k[left], top_p[left])
        kept[left] = torch.zeros_like(kept[left]).scatter_(-1, ids, found)
        # Tokens as likely as the last candidate may be missing among the candidates
        last = ordered.gather(-1, (found > 0).sum(-1, keepdim=True).sub_(1).clamp_(min=0))[:, 0]
        left = left[((last <= ordered[:, -1]) | (top_k[left] > some)) & (some < vocab)]
        if not len(left):
            break
    return kept


def _ranked(probabilities: Tensor, some: int) -> tuple[Tensor, Tensor]:
    if some == probabilities.shape[1]:
        values, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        return values, ids
    values, ids = probabilities.topk(some, sorted=False)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(-1, order)


def _nucleus(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    some = ordered.shape[1]
    most = torch.where(top_k > 0, top_k, some)
    ordered.masked_fill_(torch.arange(some, device=ordered.device)[None] >= most[:, None], 0.0)
    cumulated = ordered.cumsum(-1)
    mass = top_p * torch.where(top_k > 0, cumulated[:, -1], total)
    outside = (cumulated.sub_(ordered) >= mass[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return ordered.masked_fill_(outside, 0.0)


def _draw(logits: Tensor, sampling: RowSampling) -> Tensor:
    cumulated = kept_probabilities(logits, sampling).cumsum(-1)
    total = cumulated[:, -1]
    target = uniforms(sampling.keys, sampling.positions) * total
    # u × total may round up to total, which no cumulative probability exceeds
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]
