"""The reference of sampling, from logits to token ids: temperature, top-k, top-p, min-p, and one draw by inversion."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from batchinfer_kernels.arithmetic import NO_TOKEN as NO_TOKEN
from batchinfer_kernels.philox import uniforms

MIN_TEMPERATURE = 1e-30  # a float32 holds it; one that float32 rounds to 0 would divide 0 by 0
# Drawing needs about 40 bytes a logit; 32 rows of a vocabulary of 150,000 are 190 MB.
ROWS_AT_ONCE = 32
# How many tokens are sorted first, and then. Sorting all of 150,000 took 45 ms a row, choosing and sorting 1024 of them
# 1 ms; few nuclei are larger.
CANDIDATES = (1024, 16384)


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

    def rows(self, indices: Tensor) -> RowSampling:
        """The arguments of some of the rows."""
        return RowSampling(*(getattr(self, field.name)[indices] for field in fields(self)))


def sample_reference(logits: Tensor, sampling: RowSampling | None = None) -> Tensor:
    """The token of each row, (rows,) int64; ROWS_AT_ONCE rows are drawn at a time, which bounds the memory.

    logits: (rows, vocab), of any floating-point type. The order: temperature, top-k, top-p over what that left
    (Holtzman et al., 2020), min-p against the most likely token, one draw. Equally likely tokens rank by their ids; the
    token that crosses top_p is kept. Without `sampling`, or at temperature 0, the argmax. NO_TOKEN where a row's
    maximum is not finite. Raises ValueError when shapes or dtypes do not fit.
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
    """(rows, vocab) float64 of rows that are all drawn: 0 where filtered, not normalised."""
    # the greatest logit becomes 0 first, so that no temperature, however small, divides a score to infinity
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
    """As float64, with 0 outside top-k, then with 0 outside the nucleus of the rest.

    Sorts only the most likely tokens of each row: more of them where what is kept may reach beyond.
    """
    vocab = probabilities.shape[1]
    # a row's sum must not depend on the other rows: `sum` may cut a long row into parts
    total = probabilities.cumsum(-1, dtype=torch.float64)[:, -1]
    kept = torch.zeros_like(probabilities, dtype=torch.float64)
    left = torch.arange(len(probabilities), device=kept.device)
    for some in (*(n for n in CANDIDATES if n < vocab), vocab):
        ordered, ids = _ranked(probabilities[left], some)
        found = _nucleus(ordered.double(), total[left], top_k[left], top_p[left])
        kept[left] = torch.zeros_like(kept[left]).scatter_(-1, ids, found)
        # of tokens as likely as the last candidate some may not be candidates
        last = ordered.gather(-1, (found > 0).sum(-1, keepdim=True).sub_(1).clamp_(min=0))[:, 0]
        left = left[((last <= ordered[:, -1]) | (top_k[left] > some)) & (some < vocab)]
        if not len(left):
            break
    return kept


def _ranked(probabilities: Tensor, some: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the `some` greatest of each row in descending order, the lower id of equals first."""
    if some == probabilities.shape[1]:
        values, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        return values, ids
    values, ids = probabilities.topk(some, sorted=False)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    return values, ids.gather(-1, order)


def _nucleus(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities (rows, some) in descending order, 0 from where top-k or top-p ends; changes `ordered`."""
    some = ordered.shape[1]
    most = torch.where(top_k > 0, top_k, some)
    ordered.masked_fill_(torch.arange(some, device=ordered.device)[None] >= most[:, None], 0.0)
    cumulated = ordered.cumsum(-1)
    mass = top_p * torch.where(top_k > 0, cumulated[:, -1], total)
    outside = (cumulated.sub_(ordered) >= mass[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return ordered.masked_fill_(outside, 0.0)


def _draw(logits: Tensor, sampling: RowSampling) -> Tensor:
    """Draw by inversion: the first token whose cumulated probability exceeds the draw."""
    cumulated = kept_probabilities(logits, sampling).cumsum(-1)
    total = cumulated[:, -1]
    target = uniforms(sampling.keys, sampling.positions) * total
    # u × total may round to total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]
