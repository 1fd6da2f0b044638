"""The interface of libraries and special kernels for attention of prompts over batchinfer's KV cache blocks.

They only compute chunks of at least two queries. Single queries, and shared prefixes, are left to batchinfer's kernels.
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
ALIGNED_BYTES = 16  # bytes that GPUs load at once


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """The rows of a step that a library for prompts computes: from the first to the last chunk of at least two queries.

    Sequences with a single query between these chunks are included, but with one key only. Another kernel computes
    their results again.

    Attributes:
        first: The first of these rows of the step's queries.
        last: The end of the rows (exclusive).
        lens: (n,), the number of queries of each of n sequences.
        contexts: (n,), the number of keys of each sequence, including the keys of its queries.
        sequences: (n,), the index of each sequence in the step.
        tables: The block tables of the step, in the host's memory.
    """

    first: int
    last: int
    lens: Longs
    contexts: Longs
    sequences: Longs
    tables: StepTables

    @classmethod
    def of(cls, inputs: AttentionInputs) -> PromptRows | None:
        """Return the rows of a step that a library for prompts can compute.

        Returns None if no chunk has at least two queries, or if the host has no block tables.

        Args:
            inputs: The inputs of the step.
        """
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
    """Return where each of n consecutive parts with these sizes begins, and the total size, (n + 1,).

    Args:
        counts: (n,), the sizes.
    """
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def upload(values: NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy values to a device from pinned memory, so that the host does not wait.

    Args:
        values: The values.
        device: The device.
    """
    staged = torch.from_numpy(values)
    return staged.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else staged


def capability(device: torch.device) -> int | None:
    """Return the major compute capability of a GPU, such as 9; None for another device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None


def is_aligned(cache: Tensor) -> bool:
    """Return True if each row of the cache's last dimension begins at a multiple of ALIGNED_BYTES."""
    at = (cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:-1]))
    return cache.stride(-1) == 1 and all(place % ALIGNED_BYTES == 0 for place in at)


class PromptPrefill(ABC, Generic[Pages]):
    """An implementation of attention for chunks of prompts, by a library or a special kernel, for one model.

    The type `Pages` is the plan of a step in the form that the library needs.

    Attributes:
        name: The name of the library, for messages.
        distribution: The name of the package that contains the library.
        extra: The suffix of the operators' name in the report. For a library, also the pip extra that installs it.
        is_installed: True if users install the library themselves. If it is not used, the reason is logged.
        DTYPES: The supported dtypes of queries.
    """

    name: ClassVar[str]
    distribution: ClassVar[str]
    extra: ClassVar[str]
    is_installed: ClassVar[bool] = True
    DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    @abstractmethod
    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        """Import the library and prepare its kernels for a model.

        A missing package, or a version without the expected functions, raises the exceptions in `contest.BROKEN`.

        Args:
            shape: The attention of the model.
            block_size: The number of tokens in a block.
            device: The device of the model.
        """

    @classmethod
    def version(cls) -> str | None:
        """Return the version of the installed library; None if it is not installed.

        It is not imported, as this takes seconds.
        """
        try:
            return version(cls.distribution)
        except PackageNotFoundError:
            return None

    @classmethod
    def remedy(cls) -> str:
        """Return advice for the user if the library is broken, for a message."""
        return (
            f"run `pip install '.[{cls.extra}]'` in the clone of batchinfer, or uninstall {cls.distribution}"
        )

    @classmethod
    def why_not(cls, shape: AttentionShape, block_size: int, device: torch.device) -> str | None:
        """Return the reason why a model cannot use the library; None if it can.

        Args:
            shape: The attention of the model.
            block_size: The number of tokens in a block.
            device: The device of the model.
        """
        if shape.deterministic:
            return "engine.deterministic is true"
        if shape.latent:
            return "the model's cache keeps latents"
        if not shape.causal:
            return "the model is an encoder, whose tokens attend to later tokens too"
        if shape.dtype not in cls.DTYPES:
            return f"it has no kernels for {str(shape.dtype).removeprefix('torch.')}"
        return cls.why_not_here(shape.head_dim, block_size, device)

    @classmethod
    @abstractmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        """Return the reason why the library does not support the sizes or the device; None if it does.

        Args:
            head_dim: The size of a head.
            block_size: The number of tokens in a block.
            device: The device of the model.
        """

    @classmethod
    @abstractmethod
    def supports(cls, rules: AttentionRules) -> bool:
        """Return True if the library supports layers with this kind of attention.

        Args:
            rules: The kind of attention: its window, soft cap, sinks, and the dtype of a quantised cache.
        """

    @abstractmethod
    def can_read(self, cache: LayerCache) -> bool:
        """Return True if the library supports the dtype and the layout of this KV cache."""

    def covers(self, cache: LayerCache, rules: ScoreRules) -> bool:
        """Return True if the library can compute a layer's attention.

        Args:
            cache: The KV cache of the layer.
            rules: The scale, window, soft cap, sinks and bias of scores.
        """
        asked = AttentionRules(rules.window, rules.soft_cap, rules.sinks is not None)
        return rules.bias is None and self.supports(asked) and self.can_read(cache)

    @abstractmethod
    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> Pages | None:
        """Return the library's plan of a step's prompt chunks; None if there are no chunks for the library.

        Args:
            inputs: The inputs of the step.
            windows: The sliding windows of the layers; None for a layer without a window.
        """

    @abstractmethod
    def run(self, pages: Pages, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        """Compute the attention of the planned chunks in one layer, and write it to their rows of `out`.

        Args:
            pages: The result of `plan`.
            q: (tokens, query heads, head size), for all tokens of the step.
            cache: The layer's cache.
            rules: The scale, window, soft cap, sinks and bias of scores.
            out: Receives the result, with the shape of `q`. Rows of single queries may be changed too, and must be
                computed afterwards.
        """


AnyPrefill = PromptPrefill[Any]
