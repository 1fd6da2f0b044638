"""Penalties and bans, applied to logits in place. Cost: batchinfer_kernels.cost.penalise_cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.row_chunks import check_logits
from batchinfer_kernels.penalties import Penalties

# Tokens of a row that are processed at a time
TILE = 1024
_SEEN = tl.constexpr(1 << 30)


@triton.jit
def _token(tokens_ptr, at, length, vocab):
    token = tl.load(tokens_ptr + at, mask=at < length, other=-1)
    return token, (token >= 0) & (token < vocab)


@triton.jit(do_not_specialize=["bans"])
def _penalise_kernel(
    logits_ptr, stride, vocab, rows_ptr, tokens_ptr, starts_ptr, prompt_lens_ptr, lengths_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, banned_ptr, bans, counts_ptr,
    TILE: tl.constexpr,
):  # fmt: skip
    # Occurrences of each token are counted in `counts`. The occurrence that first resets the count to 0 changes the
    # logit, so all counts are 0 in the end
    index = tl.program_id(0).to(tl.int64)
    logits_ptr += tl.load(rows_ptr + index).to(tl.int64) * stride
    counts_ptr += index * vocab
    tokens_ptr += tl.load(starts_ptr + index)
    prompt, length = tl.load(prompt_lens_ptr + index), tl.load(lengths_ptr + index)
    repetition = tl.load(repetition_ptr + index)
    presence, frequency = tl.load(presence_ptr + index), tl.load(frequency_ptr + index)
    first = tl.where(repetition == 1.0, prompt, 0)  # only the repetition penalty covers the prompt
    for start in range(first, length, TILE):
        at = start + tl.arange(0, TILE)
        token, real = _token(tokens_ptr, at, length, vocab)
        tl.atomic_or(counts_ptr + token, _SEEN, mask=real & (at < prompt))
        tl.atomic_add(counts_ptr + token, 1, mask=real & (at >= prompt))
    tl.debug_barrier()
    for start in range(first, length, TILE):
        token, real = _token(tokens_ptr, start + tl.arange(0, TILE), length, vocab)
        count = tl.atomic_and(counts_ptr + token, 0, mask=real)  # Triton has no atomic exchange for AMD
        mine = real & (count != 0)
        x = tl.load(logits_ptr + token, mask=mine, other=0.0).to(tl.float32)
        factor = tl.zeros_like(x) + repetition
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        said = count & (_SEEN - 1)
        x = tl.where(said > 0, x - (presence + frequency * said.to(tl.float32)), x)
        tl.store(logits_ptr + token, x.to(logits_ptr.dtype.element_ty), mask=mine)
    tl.debug_barrier()
    for start in range(0, bans, TILE):
        at = start + tl.arange(0, TILE)
        token, real = _token(banned_ptr + index * bans, at, bans, vocab)
        nothing = tl.full((TILE,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
        tl.store(logits_ptr + token, nothing, mask=real)


def penalise(logits: Tensor, penalties: Penalties, counts: Tensor | None = None) -> None:
    """Apply penalties to logits and set banned tokens to -inf, in place, as `penalise_reference` does.

    A row without tokens and bans is not changed.

    Args:
        logits: (rows, vocab); rows may be strided.
        penalties: the penalties of n rows.
        counts: (at least n, vocab) int32 zeros, a buffer that is zero again afterwards; allocated if not given.
    """
    penalties.check(logits)
    check_logits(logits)
    n, vocab = len(penalties.rows), logits.shape[1]
    if counts is None:
        counts = torch.zeros((n, vocab), dtype=torch.int32, device=logits.device)
    if counts.dim() != 2 or counts.shape[0] < n or counts.shape[1] != vocab or counts.dtype != torch.int32:
        raise ValueError(f"counts are {tuple(counts.shape)} {counts.dtype}, expected ({n}, {vocab}) int32")
    if not counts.is_contiguous():
        raise ValueError("counts are not contiguous")
    if n:
        _penalise_kernel[(n,)](
            logits,
            logits.stride(0),
            vocab,
            penalties.rows,
            penalties.tokens,
            penalties.starts,
            penalties.prompt_lens,
            penalties.lengths,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
            penalties.banned,
            penalties.banned.shape[1],
            counts,
            TILE=TILE,
            num_warps=4,
            enable_fp_fusion=False,  # for the same bits as on a CPU
        )
