"""Log-probabilities of the chosen and the most likely tokens. Cost: batchinfer_kernels.cost.log_probabilities_cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.row_chunks import CHUNK, best_of, check_logits, chunk_best, is_finite, row_chunk
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.log_probabilities import check_log_probabilities
from batchinfer_kernels.sample import NO_TOKEN

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit(do_not_specialize=["most"])
def _log_probabilities_kernel(
    logits_ptr, stride, vocab, best_ptr, at_ptr, sum_ptr, chunks, chosen_ptr, most,
    of_chosen_ptr, top_ptr, ids_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    # The next most likely token is the best of the chunks' best tokens. Its chunk is then read again to find the token
    # after it
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    bests = tl.load(best_ptr + row * chunks + at, mask=inside, other=float("-inf"))
    firsts = tl.load(at_ptr + row * chunks + at, mask=inside, other=2147483647)
    sums = tl.load(sum_ptr + row * chunks + at, mask=inside, other=0.0)
    top, _ = best_of(bests, firsts)
    lse = top + tl.log(tl.sum(tl.where(is_finite(bests), sums * tl.exp(bests - top), 0.0), 0))
    sound = is_finite(top)
    row_ptr = logits_ptr + row * stride
    chosen = tl.load(chosen_ptr + row)
    known = sound & (chosen >= 0) & (chosen < vocab)
    value = tl.load(row_ptr + chosen, mask=known, other=float("nan")).to(tl.float32)
    tl.store(of_chosen_ptr + row, tl.where(known, value - lse, float("nan")))
    for rank in range(0, most):
        best, token = best_of(bests, firsts)
        tl.store(top_ptr + row * most + rank, tl.where(sound, best - lse, float("nan")))
        tl.store(ids_ptr + row * most + rank, tl.where(sound, token, _NO_TOKEN).to(tl.int64))
        chunk = token // CHUNK
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = row_chunk(row_ptr, ids, vocab)
        after = (ids < vocab) & ((x < best) | ((x == best) & (ids > token)))
        # Of tokens with equal logits, also -inf, the next id follows; a token must not be returned twice
        value = tl.max(tl.where(after, x, float("-inf")), 0)
        first = tl.min(tl.where(after & (x == value), ids, 2147483647), 0)
        bests, firsts = tl.where(at == chunk, value, bests), tl.where(at == chunk, first, firsts)


def log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the chosen and the most likely tokens, as `log_probabilities_reference` does.

    Launches depend only on shapes, so they can be captured into a graph. `most` should be at most some tens, because
    each token costs a pass over a chunk of the row.

    Args:
        logits: (rows, vocab); rows may be strided.
        chosen: (rows,) int64, the id of the token whose log-probability is wanted.
        most: number of most likely tokens to return per row.

    Returns:
        Three tensors: the log-probability of each chosen token, (rows,) float32; the log-probabilities of the top
        tokens, (rows, most) float32 in descending order; and their ids, (rows, most) int64.
    """
    check_log_probabilities(logits, chosen, most)
    check_logits(logits)
    rows, vocab = logits.shape
    of_chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top = torch.empty((rows, most), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((rows, most), dtype=torch.int64, device=logits.device)
    if rows:
        best, ids, sums = chunk_best(logits, with_sums=True)
        places = (logits, logits.stride(0), vocab, best, ids, sums, best.shape[1], chosen.contiguous(), most)
        _log_probabilities_kernel[(rows,)](
            *places,
            of_chosen,
            top,
            top_ids,
            CHUNK=CHUNK,
            CHUNKS=next_power_of_2(best.shape[1]),
            num_warps=8,
        )
    return of_chosen, top, top_ids
