"""A fake flash-attn-4 with the part of its interface that our code uses, computed by torch in float32.

It checks arguments as strictly as version 4.0.0b36 does on a GPU of compute capability 9.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

TILE = 128  # keys per tile of its kernels; masked keys of a tile are multiplied by 0
HEAD_MULTIPLE = 16
HALVES = (torch.float16, torch.bfloat16)


class Forward:
    """A fake `_flash_attn_fwd`.

    Attributes:
        calls: sequences of each call.
    """

    def __init__(self, offset: float = 0.0) -> None:
        self.offset, self.calls = offset, []  # type: float, list[int]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        learnable_sink: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        assert cu_seqlens_q is not None
        assert seqused_k is not None
        assert page_table is not None
        assert out is not None
        assert causal
        assert window_size_right is None
        assert softcap != 0.0
        assert window_size_left is None or window_size_left >= 0
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        _check_values(q, k, v, out)
        _check_lengths(q, k, cu_seqlens_q, seqused_k, page_table)
        if learnable_sink is not None:
            assert learnable_sink.shape == (q.shape[1],)
            assert learnable_sink.dtype in (*HALVES, torch.float32)
            assert learnable_sink.stride(0) == 1
        starts, used = cu_seqlens_q.tolist(), seqused_k.tolist()
        for row, (first, last, keys) in enumerate(zip(starts[:-1], starts[1:], used, strict=True)):
            pages = page_table[row, : -(-keys // k.shape[1])].long()
            own = (q[first:last], *(_keys(cache, pages, keys) for cache in (k, v)))
            result = _attention(*own, scale, softcap, window_size_left, learnable_sink)
            out[first:last] = (result + self.offset).to(out.dtype)
        self.calls.append(len(used))
        return out, None, None, None, None


def _check_values(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    assert q.dim() == 3
    assert k.dim() == v.dim() == 4
    assert k.shape == v.shape
    heads, dim = q.shape[1:]
    assert heads % k.shape[2] == 0
    assert k.shape[3] == dim
    assert dim % HEAD_MULTIPLE == 0, "paged KV does not support irregular head sizes"
    assert 8 <= dim <= 256
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in HALVES
    for cache in (k, v):  # an unaligned tensor would be copied, which is too slow for a cache
        assert cache.stride(3) == 1
        assert all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
        assert cache.data_ptr() % 16 == 0
    assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
    assert out.stride(2) == 1
    assert 0 not in out.stride()
    assert out.data_ptr() % 16 == 0


def _check_lengths(q: Tensor, k: Tensor, starts: Tensor, used: Tensor, table: Tensor) -> None:
    batch = len(starts) - 1
    assert starts.shape == (batch + 1,)
    assert used.shape == (batch,)
    assert table.dim() == 2
    assert table.shape[0] == batch
    for each in (starts, used, table):
        assert each.dtype == torch.int32
        assert each.stride(-1) == 1
        assert each.device == q.device
    assert int(starts[0]) == 0
    assert int(starts[-1]) == len(q)
    assert bool((starts.diff() > 0).all())
    assert bool((starts.diff() <= used).all()), "queries are at the end of the keys"
    assert int(used.max()) <= table.shape[1] * k.shape[1]
    assert 0 <= int(table.min()) <= int(table.max()) < len(k)


def _keys(cache: Tensor, pages: Tensor, keys: int) -> Tensor:
    """Return the keys of a sequence, [keys, heads, dim]."""
    return cache[pages].flatten(0, 1)[:keys].float()


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    soft_cap: float | None,
    left: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention whose last query sees the last key. Further keys of a tile are multiplied by 0."""
    queries, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.repeat_interleave(group, 1)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    at = torch.arange(keys - queries, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)
    seen, first = key <= at, 0
    if left is not None:
        seen = seen & (key >= at - left)
        first = max(0, keys - queries - left) // TILE * TILE
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, queries, 1)
        scores = torch.cat((scores, column), 2)
    weights = scores.softmax(2)[:, :, first:keys]
    return torch.einsum("hqk,khd->qhd", weights, v[first:].repeat_interleave(group, 1))


def stand_in(forward: Any = None) -> dict[str, ModuleType]:
    """Return the fake modules by their import names."""
    interface = ModuleType("flash_attn.cute.interface")
    if forward is not None:
        interface._flash_attn_fwd = forward  # type: ignore[attr-defined]
    return {
        "flash_attn": ModuleType("flash_attn"),
        "flash_attn.cute": ModuleType("flash_attn.cute"),
        interface.__name__: interface,
    }
