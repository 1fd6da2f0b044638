"""Chooses who computes the attention of prompts on a GPU: our kernel, or FlashInfer where it is installed and faster.

Both are timed when a model is loaded, on steps of the job's sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from batchinfer.models.ops import flashinfer_prefill
from batchinfer.models.ops.flashinfer_prefill import FlashInferPrefill
from batchinfer.models.ops.interface import AttentionInputs, LayerCache, Ops
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.step_tables import StepTables

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

_log = logging.getLogger(__name__)

# A step's attention is planned once and run in this many layers
LAYERS = 4
# Each is timed so often, in turns, while the time lasts; the first calls, which compile, do not count
ROUNDS, BUDGET_S = 5, 2.0
# It replaces our kernel where it takes less than this share of its time: less may be noise
MARGIN = 0.97
# Keys of a sequence on which they are timed: what is faster there is so for more. Their memory is bounded by it.
MOST_KEYS = 32_768
# The longest rows, and rows of an eighth, which most are more like: a step then has several
PARTS = (1, 8)
# Of results with entries around 1 and less, both rounded to the dtype
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@runtime_checkable
class PromptOps(Protocol):
    """Operators whose attention of prompts can be replaced."""

    @property
    def shape(self) -> AttentionShape:
        """The sizes of attention in the model that they are made for."""

    @property
    def latent(self) -> bool:
        """Whether its cache keeps latents."""

    def with_prefill(self, prefill: FlashInferPrefill) -> Ops:
        """Return the same operators, with prompts read by `prefill`."""


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """A job's largest step of prompts."""

    tokens: int
    longest: int  # tokens of a sequence
    block_size: int


OURS, THEIRS = "batchinfer's kernel", "FlashInfer"
# What an installed FlashInfer may raise that is broken, or not as batchinfer knows it
BROKEN = (
    *(ImportError, AttributeError, TypeError, ValueError, AssertionError),
    *(RuntimeError, OSError, CalledProcessError),
)


def prefill_contest(
    ops: Ops,
    sizes: PromptSizes,
    device: torch.device,
    plain: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> PromptContest | None:
    """Return what chooses between our kernel and FlashInfer, if that is installed and can read prompts; else None.

    `plain`: whether a layer has attention without a window, soft cap and sinks. What keeps an installed FlashInfer from
    being used is logged: as a warning where it is broken, or not as batchinfer knows it.
    """
    if not isinstance(ops, PromptOps) or not flashinfer_prefill.is_installed():
        return None
    reason = flashinfer_prefill.why_not(ops.shape, ops.latent)
    if reason is None and not plain:
        reason = "every layer has a window, a soft cap, sinks, or codes in its cache"
    if reason is not None:
        _log.info("FlashInfer is installed and not used: %s", reason)
        return None
    return PromptContest(ops, sizes, device, clock)


class PromptContest:
    """Our kernel against FlashInfer."""

    def __init__(
        self, ops: PromptOps, sizes: PromptSizes, device: torch.device, clock: Callable[[], float]
    ) -> None:
        assert isinstance(ops, Ops)
        self._ops: Ops = ops
        self._prompts: PromptOps = ops
        self._sizes, self._device, self._clock = sizes, device, clock
        self._theirs: Ops | None = None  # once it has shown that it computes the same
        self._decided = False

    def decide(self) -> str:
        """Who is faster here."""
        self._decided = True
        try:
            prefill, theirs, steps = self._tried()
            took = _timed(self._ops, theirs, steps, self._device, self._clock)
        except BROKEN as error:
            _warn(error)
            return OURS
        self._theirs = theirs
        chosen = THEIRS if took[1] < MARGIN * took[0] else OURS
        _log.info(
            "prompts are read by %s: of steps of %d tokens FlashInfer %s takes %.2f ms a layer, "
            "batchinfer's kernel %.2f ms",
            *(chosen, self._sizes.tokens, prefill.version, 1e3 * took[1], 1e3 * took[0]),
        )
        return chosen

    def winner(self, chosen: str) -> Ops:
        """The operators of what was chosen, here or in another engine."""
        if not self._decided:
            _log.info("prompts are read by %s, which another engine of this run has timed", chosen)
        if chosen == OURS:
            return self._ops
        try:
            return self._theirs or self._tried()[1]
        except BROKEN as error:
            _warn(error)
            return self._ops

    def _tried(self) -> tuple[FlashInferPrefill, Ops, list[_Trial]]:
        """FlashInfer, which has computed the same as our kernel on these steps. Raises what is BROKEN."""
        prefill = FlashInferPrefill(self._prompts.shape, self._sizes.block_size, self._device)
        theirs = self._prompts.with_prefill(prefill)
        steps = [_Trial.random(self._prompts, self._sizes, part, self._device) for part in PARTS]
        for step in steps:
            _check(step.run(self._ops), step.run(theirs))
        return prefill, theirs, steps


def _warn(error: BaseException) -> None:
    _log.warning(
        "FlashInfer %s is installed and cannot be used (%s: %s); batchinfer's own kernel reads prompts; install "
        "a version that batchinfer[flashinfer] names, or uninstall it",
        *(_version(), type(error).__name__, str(error).strip().partition("\n")[0]),
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(flashinfer_prefill.DISTRIBUTION)
    except PackageNotFoundError:
        return "of an unknown version"


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    """A step of prompts with random values, on which both are timed."""

    inputs: AttentionInputs
    q: Tensor
    cache: LayerCache

    @classmethod
    def random(cls, ops: PromptOps, sizes: PromptSizes, part: int, device: torch.device) -> _Trial:
        """Make a trial of as many sequences of a `part` of the longest as a step takes, or of the end of one, if none
        fits whole."""
        shape, block = ops.shape, sizes.block_size
        context = max(2, min(sizes.longest, MOST_KEYS) // part)
        queries = max(2, min(context, sizes.tokens))
        count = max(1, sizes.tokens // queries)
        width = -(-context // block)
        tables = torch.arange(count * width, dtype=torch.int32).reshape(count, width)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        query_lens, context_lens = [queries] * count, [context] * count
        step_tables = StepTables.of(tables.numpy())
        inputs = AttentionInputs(nothing, nothing, tables.to(device), query_lens, context_lens, step_tables)
        assert isinstance(ops, Ops)
        kept = CacheSpec(shape.kv_heads, shape.head_dim)
        cache = ops.allocate_cache(kept, count * width, block, shape.dtype, device)
        cache.k.normal_()
        cache.v.normal_()
        q = torch.randn(count * queries, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device)
        return cls(inputs, q, cache)

    def run(self, ops: Ops) -> Tensor:
        """All that a step takes of its attention: a plan, and some layers; the result of the last."""
        plan = ops.plan_attention(self.inputs, self.cache.block_size, frozenset([None]))
        for _ in range(LAYERS):
            result = ops.attention(self.q, self.cache, plan, self.q.shape[2] ** -0.5)
        return result


def _timed(
    ours: Ops, theirs: Ops, steps: list[_Trial], device: torch.device, clock: Callable[[], float]
) -> tuple[float, float]:
    """Seconds a layer of all steps, of ours and of theirs."""
    began, took = clock(), ([], [])  # type: tuple[float, tuple[list[float], list[float]]]
    for _ in range(ROUNDS):
        for ops, times in zip((ours, theirs), took, strict=True):
            times.append(seconds_of(partial(_run_all, ops, steps), device, clock))
        if clock() - began > BUDGET_S:
            break
    return median(took[0]) / LAYERS, median(took[1]) / LAYERS


def _run_all(ops: Ops, steps: list[_Trial]) -> None:
    for step in steps:
        step.run(ops)


def seconds_of(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Return how long it takes, until the device is done."""
    _synchronize(device)
    began = clock()
    run()
    _synchronize(device)
    return clock() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check(ours: Tensor, theirs: Tensor) -> None:
    """Raises ValueError for results that differ by more than rounding does."""
    off = float((ours.float() - theirs.float()).abs().max())
    if not off <= TOLERANCE[ours.dtype]:  # not a number, too
        raise ValueError(
            f"its results differ from batchinfer's by {off:.3g}, more than {TOLERANCE[ours.dtype]:g}"
        )
