"""Samples one row at a time, as a plain reference for the batched operators."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.sample import MIN_TEMPERATURE, NO_TOKEN, RowSampling

_MULTIPLIERS, _WEYL, _WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


def uniform(key: list[int], position: int) -> float:
    """Return a uniform number in [0, 1) with 53 bits from Philox-4x32-10 (Salmon et al., SC 2011).

    Args:
        key: four words: the generator's key, and the upper half of its counter. The lower half is (position,
            0).
    """
    words = [word & _WORD for word in key]
    counter, (k0, k1) = [position & _WORD, 0, words[2], words[3]], words[:2]
    for _ in range(10):
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> 32) ^ counter[1] ^ k0,
            second & _WORD,
            (first >> 32) ^ counter[3] ^ k1,
            first & _WORD,
        ]
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return float((counter[0] >> 5) * (1 << 26) + (counter[1] >> 6)) / float(1 << 53)


def sample(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Return the token of each row, (rows,) int64."""
    best, chosen = logits.max(-1)
    for row in range(logits.shape[0]):
        if sampling.temperature[row] > 0 and best[row].isfinite():
            chosen[row] = _draw(logits[row].float(), sampling, row)
    return torch.where(best.isfinite(), chosen, NO_TOKEN)


def kept(logits: Tensor, sampling: RowSampling, row: int) -> Tensor:
    """Return probabilities (vocab,) float64 of one row, 0 if filtered; not normalised."""
    scale = max(float(sampling.temperature[row]), MIN_TEMPERATURE)
    probabilities = ((logits - logits.max()) / scale).softmax(-1).double()
    top_k, top_p, min_p = int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row])
    if top_k > 0 or top_p < 1.0:
        probabilities = _filtered(probabilities, top_k, top_p)
    return probabilities.masked_fill(probabilities < min_p * probabilities.max(), 0.0)


def _filtered(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    ordered, order = probabilities.sort(stable=True, descending=True)
    if top_k > 0:
        ordered[top_k:] = 0.0
    if top_p < 1.0:
        before = ordered.cumsum(-1) - ordered
        outside = before >= top_p * ordered.sum()
        outside[0] = False
        ordered[outside] = 0.0
    return torch.zeros_like(probabilities).scatter(-1, order, ordered)


def _draw(logits: Tensor, sampling: RowSampling, row: int) -> int:
    cumulated = kept(logits, sampling, row).cumsum(-1)
    total = cumulated[-1]
    target = uniform(sampling.keys[row].tolist(), int(sampling.positions[row])) * total
    # u × total may round to total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(cumulated, target[None], right=True))
