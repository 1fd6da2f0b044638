"""From logits to token ids: temperature, top-k, top-p, min-p, and one draw by inversion."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

NO_TOKEN = -1  # the row's logits are not numbers
MIN_TEMPERATURE = 1e-30  # a float32 holds it; one that float32 rounds to 0 would divide 0 by 0
_MULTIPLIERS, _WEYL, _WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token of each row is chosen; everything on the logits' device and contiguous."""

    temperature: Tensor  # (rows,) float32; 0: the argmax, whatever the other filters are
    top_k: Tensor  # (rows,) int32; 0: all
    top_p: Tensor  # (rows,) float64; 1: all
    min_p: Tensor  # (rows,) float64; 0: all
    keys: Tensor  # (rows, 4) int32: the words of the generator's key and of the upper half of its counter
    positions: Tensor  # (rows,) int32: the lowest word of the counter

    def check(self, logits: Tensor) -> None:
        """Raises ValueError when shapes or dtypes do not fit logits (rows, vocab)."""
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


def uniform_reference(key: list[int], position: int) -> float:
    """One uniform in [0, 1) with 53 bits: Philox-4x32-10 (Salmon et al., SC 2011).

    key: four words, of which the first two are the generator's key and the others the upper half of its counter, whose
    lower half is (position, 0).
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


def sample_reference(logits: Tensor, sampling: RowSampling | None = None) -> Tensor:
    """The token of each row, (rows,) int64, one row after the other.

    logits: (rows, vocab), of any floating-point type. The order: temperature, top-k, top-p over what that left
    (Holtzman et al., 2020), min-p against the most likely token, one draw. Equally likely tokens rank by their ids; the
    token that crosses top_p is kept. Without `sampling`, or at temperature 0, the argmax. NO_TOKEN where a
    row's maximum is not finite. Raises ValueError when shapes or dtypes do not fit.
    """
    if sampling is not None:
        sampling.check(logits)
    best, chosen = logits.max(-1)
    for row in range(logits.shape[0]):
        if sampling is not None and sampling.temperature[row] > 0 and best[row].isfinite():
            chosen[row] = _draw(logits[row].float(), sampling, row)
    return torch.where(best.isfinite(), chosen, NO_TOKEN)


def kept_reference(logits: Tensor, sampling: RowSampling, row: int) -> Tensor:
    """Probabilities (vocab,) float64 of one row, 0 where filtered; not normalised."""
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
    cumulated = kept_reference(logits, sampling, row).cumsum(-1)
    total = cumulated[-1]
    target = uniform_reference(sampling.keys[row].tolist(), int(sampling.positions[row])) * total
    # u × total may round to total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(cumulated, target[None], right=True))
