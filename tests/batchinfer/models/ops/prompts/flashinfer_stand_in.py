"""A fake FlashInfer with the part of its interface that our code uses, computed by the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference


class PagedPrefill:
    """A fake BatchPrefillWithPagedKVCacheWrapper following its documentation (0.6 and 0.7).

    Attributes:
        made: the instances.
    """

    made: list[PagedPrefill]  # of the class that `stand_in` makes
    offset = 0.0  # added to each result

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.is_contiguous()
        assert float_workspace_buffer.numel() >= 128 << 20
        assert kv_layout == "HND"
        self.plans, self.runs = 0, 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(t.dtype == torch.int32 and t.dim() == 1 and t.is_contiguous() for t in given)
        batch = len(paged_kv_last_page_len)
        assert len(qo_indptr) == len(paged_kv_indptr) == batch + 1
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        queries, pages = qo_indptr.diff(), paged_kv_indptr.diff()
        assert bool((queries >= 0).all())
        assert bool((pages >= 1).all())
        assert bool((paged_kv_last_page_len >= 1).all())
        assert bool((paged_kv_last_page_len <= page_size).all())
        keys = (pages - 1) * page_size + paged_kv_last_page_len
        assert bool((queries <= keys).all()), "causal attention sees the queries' own keys"
        assert num_qo_heads % num_kv_heads == 0
        assert causal
        assert kv_data_type == q_data_type
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.shape = (int(qo_indptr[-1]), num_qo_heads, head_dim_qk)
        self.block = (num_kv_heads, page_size, head_dim_qk)
        self.dtype, self.queries, self.keys = q_data_type, queries.tolist(), keys.tolist()
        self.tables = torch.zeros(batch, int(pages.max()), dtype=torch.int32)
        for row, (start, count) in enumerate(zip(paged_kv_indptr.tolist(), pages.tolist(), strict=False)):
            self.tables[row, :count] = paged_kv_indices[start : start + count]
        self.plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        k, v = paged_kv_cache
        assert tuple(q.shape) == self.shape
        assert q.stride(2) == 1
        assert q.dtype == k.dtype == v.dtype == self.dtype
        assert tuple(k.shape[1:]) == tuple(v.shape[1:]) == self.block
        assert k.stride() == v.stride()
        assert k.stride(3) == 1
        assert int(self.tables.max()) < len(k)
        assert out is not None
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
        assert out.is_contiguous()
        self.runs += 1
        tables = self.tables.to(k.device)
        result = paged_attention_reference(q, k, v, tables, self.queries, self.keys, ScoreRules(self.scale))
        return out.copy_(result + self.offset)


def stand_in(**changed: Any) -> SimpleNamespace:
    """Return the fake module.

    Args:
        changed: changed attributes of its class; None for a missing one.
    """
    kind = type("Kind", (PagedPrefill,), {"made": [], **changed})
    return SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=kind, __version__="0.7.2")
