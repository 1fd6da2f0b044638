"""Attention of prompts by batchinfer's kernel for GPUs of compute capability 9.0.

The kernel is written in Gluon, a language that comes with triton and may change with it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.prompts.prefill import PromptPrefill, capability, is_aligned, upload
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.paged_attention import ScoreRules

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

HOPPER = 9


@dataclass(frozen=True, slots=True, eq=False)
class PromptItems:
    """The prompt chunks of a step as work items of the Gluon kernel.

    Attributes:
        items: (n, 5) int32 on the device: sequence, first row of q, number of rows, position of the first row in its
            sequence, and end of the keys that the rows attend to.
        tables: (sequences, maximum blocks), the block tables of the step.
    """

    items: Tensor
    tables: Tensor


def has_gluon() -> bool:
    """Return True if triton has the part of its language Gluon that the kernel for prompts needs."""
    try:
        return find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


class GluonPrefill(PromptPrefill[PromptItems]):
    """Attention of prompts by the Gluon kernel `hopper_prefill`, for GPUs of compute capability 9.0.

    The kernel also supports windows, soft caps, sinks and quantised caches.
    """

    name = "batchinfer's kernel in triton's Gluon"
    distribution = "triton"
    extra = "gluon"
    is_installed = False

    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        self._attend: Any = importlib.import_module("batchinfer_kernels.gpu.hopper_prefill").hopper_prefill
        self._items: Any = importlib.import_module("batchinfer_kernels.gpu.prefill_attention").prefill_items
        # Raised if triton cannot compile the kernel; not a RuntimeError
        self._errors: Any = importlib.import_module("triton.errors").TritonError
        self._tokens = _tiles().hopper_tokens(shape.q_heads // shape.kv_heads)
        self._shape, self._block_size = shape, block_size

    @classmethod
    def remedy(cls) -> str:
        """Return advice for the user if the Gluon kernel does not work: another version of triton."""
        return "another version of triton may help"

    @classmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        """Return the reason why the Gluon kernel does not support the sizes, the GPU or triton's version.

        Returns None if it does.

        Args:
            head_dim: The size of a head.
            block_size: The number of tokens in a block.
            device: The device of the model.
        """
        if capability(device) != HOPPER:
            return "it is for GPUs of compute capability 9"
        if not has_gluon():
            return "this version of triton has no Gluon"
        reason: str | None = _tiles().why_not(head_dim, block_size)
        return reason

    @classmethod
    def supports(cls, rules: AttentionRules) -> bool:
        """Return True: the Gluon kernel supports all rules of layers."""
        return True

    def can_read(self, cache: LayerCache) -> bool:
        """Return True if the Gluon kernel can read this KV cache, given its dtype, block size and alignment."""
        values = cache.k
        if values.dtype not in (self._shape.dtype, torch.int8, torch.float8_e4m3fn):
            return False
        sizes = (self._shape.head_dim, self._block_size, None, values.element_size())
        fits = _tiles().why_not(*sizes) is None
        return fits and is_aligned(values) and is_aligned(cache.v)

    def covers(self, cache: LayerCache, rules: ScoreRules) -> bool:
        """Return True if the Gluon kernel supports the layer and its cache: no window shorter than a block."""
        short = rules.window is not None and rules.window < self._block_size
        return not short and super().covers(cache, rules)

    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> PromptItems | None:
        """Return the work items of a step's prompt chunks; None if no chunk has at least two queries.

        Args:
            inputs: The inputs of the step.
            windows: The sliding windows of the layers; None for a layer without a window.
        """
        lens = np.asarray(inputs.query_lens, np.int64)
        several = np.flatnonzero(lens > 1)
        if not len(several):
            return None
        contexts = np.asarray(inputs.context_lens, np.int64)[several]
        first_rows = (np.cumsum(lens) - lens)[several]
        items = self._items(lens[several], contexts, self._tokens, first_rows)
        items[:, 0] = several[items[:, 0]]
        return PromptItems(upload(items, inputs.block_tables.device), inputs.block_tables)

    def run(self, pages: PromptItems, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        """Compute the attention of the planned prompt chunks in one layer, and write it to their rows of `out`.

        See `PromptPrefill.run` for the arguments.

        Raises:
            RuntimeError: The kernel does not compile.
        """
        try:
            self._attend(
                *(q, cache.k, cache.v, pages.tables, pages.items, rules),
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                out=out,
            )
        except self._errors as error:
            raise RuntimeError(f"the kernel does not compile: {error}") from error


def _tiles() -> Any:
    return importlib.import_module("batchinfer_kernels.gpu.hopper_tiles")
