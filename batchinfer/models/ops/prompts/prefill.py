"""The interface of libraries, and of kernels for one GPU's kind, that read prompts over our blocks.

They are given the chunks of several queries alone; single queries, and what these share, stay with our kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.step_tables import StepTables

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

Pages = TypeVar("Pages")
Longs = NDArray[np.int64]
ALIGNED_BYTES = 16  # that GPUs load at once


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Rows [first, last) of a step's queries: from the first chunk of several queries to the last.

    A single query between chunks is among the rows, with one key: what comes of it is overwritten by the kernel that it
    belongs to.
    """

    first: int
    last: int
    lens: Longs  # (n,): queries of each of the n sequences
    contexts: Longs  # (n,): keys of each, those of its queries included
    sequences: Longs  # (n,): which of the step's they are
    tables: StepTables

    @classmethod
    def of(cls, inputs: AttentionInputs) -> PromptRows | None:
        """Return the rows; None for a step without chunks of several queries, or whose tables the host cannot read."""
        lens = np.asarray(inputs.query_lens, np.int64)
        several = np.flatnonzero(lens > 1)
        if inputs.host_tables is None or not len(several):
            return None
        span = slice(int(several[0]), int(several[-1]) + 1)
        first, own = int(lens[: span.start].sum()), lens[span]
        contexts = np.where(own > 1, np.asarray(inputs.context_lens, np.int64)[span], 1)
        sequences = np.arange(span.start, span.stop)
        return cls(first, first + int(own.sum()), own, contexts, sequences, inputs.host_tables)


def offsets(counts: Longs) -> NDArray[np.int32]:
    """Return where each of n pieces of these sizes begins, and where the last ends, (n + 1,)."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def upload(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return the values on the device, copied from pinned memory without waiting."""
    staged = torch.from_numpy(values)
    return staged.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else staged


def capability(device: torch.device) -> int | None:
    """Return the major compute capability of a GPU; None for another device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None


def is_aligned(cache: Tensor) -> bool:
    """Whether all rows of values begin at multiples of what GPUs load at once."""
    at = (cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:-1]))
    return cache.stride(-1) == 1 and all(place % ALIGNED_BYTES == 0 for place in at)


class PromptPrefill(ABC, Generic[Pages]):
    """Kernels for a model of one shape. Its constructor raises what importing the package, or a version of
    it that lacks something, raises.
    """

    name: ClassVar[str]  # that people know it by
    distribution: ClassVar[str]  # what pip calls it, or what it comes with
    extra: ClassVar[str]  # in `ops`; of a library also the extra of batchinfer that installs it
    is_installed: ClassVar[bool] = True  # somebody did install it, and is told why it is not used
    DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    @abstractmethod
    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None: ...

    @classmethod
    def version(cls) -> str | None:
        """Return the installed version; None: it is not installed. Imports nothing, as that takes seconds."""
        try:
            return version(cls.distribution)
        except PackageNotFoundError:
            return None

    @classmethod
    def remedy(cls) -> str:
        """Return what helps where it is broken."""
        return (
            f"run `pip install '.[{cls.extra}]'` in the clone of batchinfer, or uninstall {cls.distribution}"
        )

    @classmethod
    def why_not(cls, shape: AttentionShape, block_size: int, device: torch.device) -> str | None:
        """Return the reason why a model cannot use it; None if it can."""
        if shape.deterministic:
            return "engine.deterministic is true"
        if shape.latent:
            return "the model's cache keeps latents"
        if not shape.causal:
            return "the model is an encoder, whose tokens see later ones, too"
        if shape.dtype not in cls.DTYPES:
            return f"it has no kernels for {str(shape.dtype).removeprefix('torch.')}"
        return cls.why_not_here(shape.head_dim, block_size, device)

    @classmethod
    @abstractmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        """Return the reason why it cannot compute heads of this size from blocks of this size on this device."""

    @classmethod
    @abstractmethod
    def supports(cls, rules: AttentionRules) -> bool:
        """Whether it computes layers with these rules."""

    @abstractmethod
    def can_read(self, cache: LayerCache) -> bool:
        """Whether it reads this cache as it lies."""

    def covers(self, cache: LayerCache, rules: ScoreRules) -> bool:
        """Whether it computes a layer with these rules over this cache."""
        asked = AttentionRules(rules.window, rules.soft_cap, rules.sinks is not None)
        return rules.bias is None and self.supports(asked) and self.can_read(cache)

    @abstractmethod
    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> Pages | None:
        """Return what it reads in a step, for layers of these windows; None if there is nothing for it."""

    @abstractmethod
    def run(self, pages: Pages, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        """Write the rows of `out` that belong to the pages; q and out: (T, q_heads, head_dim)."""


AnyPrefill = PromptPrefill[Any]
