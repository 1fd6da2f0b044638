"""Chooses the attention of prompts on a GPU: batchinfer's kernel, or an installed library that is faster.

All are timed when a model is loaded, on steps of the job's sizes, with each kind of attention layer of the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from statistics import median
from subprocess import CalledProcessError

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill
from batchinfer.models.ops.prompts.flashinfer import FlashInferPrefill
from batchinfer.models.ops.prompts.gluon import GluonPrefill
from batchinfer.models.ops.prompts.prefill import AnyPrefill
from batchinfer.models.ops.prompts.trial import (
    FEW,
    LAYERS,
    MANY,
    PARTS,
    Clock,
    PromptOps,
    PromptSizes,
    Trial,
    seconds_of,
)
from batchinfer.models.spec.spec import AttentionRules

_log = logging.getLogger(__name__)

LIBRARIES: tuple[type[AnyPrefill], ...] = (FlashInferPrefill, FlashAttentionPrefill, GluonPrefill)
# Number of timed calls of each, alternating, and the seconds for all. The first calls, which compile, do not count.
ROUNDS, BUDGET_S = 5, 2.0
# A library must take less than this share of the kernel's time: smaller differences may be noise
MARGIN = 0.97
# Largest difference of results, with entries of at most about 1, both rounded to the dtype
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
OURS = "batchinfer's kernel"
# Exceptions of an installed library that is broken, or has an unknown interface
BROKEN = (
    *(ImportError, AttributeError, TypeError, ValueError, AssertionError, NotImplementedError),
    *(RuntimeError, OSError, CalledProcessError),
)


def prefill_contest(
    ops: Ops,
    sizes: PromptSizes,
    device: torch.device,
    layers: Mapping[AttentionRules, int],
    clock: Clock = time.perf_counter,
) -> PromptContest | None:
    """Return a contest that finds the fastest attention of prompts: batchinfer's kernel or an installed library.

    Returns None if no library can be used. The reason why an installed library is not used is logged.

    Args:
        ops: The operators of the model.
        sizes: The size of the job's largest step of prompts.
        device: The device of the model.
        layers: The number of layers per kind of attention.
        clock: Returns the time in seconds.
    """
    if not isinstance(ops, PromptOps):
        return None
    able = [library for library in LIBRARIES if _is_able(library, ops, sizes, device, layers)]
    return PromptContest(ops, sizes, device, layers, able, clock) if able else None


def _is_able(
    library: type[AnyPrefill],
    ops: PromptOps,
    sizes: PromptSizes,
    device: torch.device,
    layers: Mapping[AttentionRules, int],
) -> bool:
    if library.version() is None:
        return False
    reason = library.why_not(ops.shape, sizes.block_size, device)
    if reason is None and not any(map(library.supports, layers)):
        reason = "it does not support the attention of any layer, or its quantised cache"
    if reason is not None and library.is_installed:
        _log.info("%s is installed and not used: %s", library.name, reason)
    return reason is None


class PromptContest:
    """A contest for the fastest attention of prompts, between batchinfer's kernel and libraries."""

    def __init__(
        self,
        ops: PromptOps,
        sizes: PromptSizes,
        device: torch.device,
        layers: Mapping[AttentionRules, int],
        libraries: list[type[AnyPrefill]],
        clock: Clock,
    ) -> None:
        """Prepare the contest.

        Args:
            ops: The operators of the model.
            sizes: The size of the job's largest step of prompts.
            device: The device of the model.
            layers: The number of layers per kind of attention.
            libraries: The libraries that support the model.
            clock: Returns the time in seconds.
        """
        assert isinstance(ops, Ops)
        self._ops: Ops = ops
        self._prompts: PromptOps = ops
        self._sizes, self._device, self._clock = sizes, device, clock
        self._layers, self._libraries = layers, {library.name: library for library in libraries}
        # The libraries with the same results as batchinfer's kernel, or None before they were tried
        self._sound: dict[str, Ops] | None = None

    def decide(self) -> str:
        """Time all libraries and batchinfer's kernel, and return the name of the fastest; OURS for batchinfer's kernel.

        The result is OURS, too, if memory runs out, or a library breaks while it is timed.
        """
        self._sound = {}
        try:
            steps = self._steps()
            tried = {name: self._try_library(name, steps) for name in self._libraries}
            self._sound = {name: ops for name, ops in tried.items() if ops is not None}
            took = self._time({OURS: self._ops, **self._sound}, steps) if self._sound else {}
        except BROKEN as error:
            self._warn_untimed(error)
            return OURS
        if not took:
            return OURS
        fastest = min(self._sound, key=lambda name: took[name])
        chosen = fastest if took[fastest] < MARGIN * took[OURS] else OURS
        _log.info(
            "prompts are read by %s: of steps of %d tokens %s",
            *(
                chosen,
                self._sizes.tokens,
                ", ".join(self._describe(*each) for each in reversed(took.items())),
            ),
        )
        return chosen

    def winner(self, chosen: str) -> Ops:
        """Return the operators with the attention of prompts that `decide` chose, here or in another engine.

        If the library cannot be used here, a warning is logged, and the operators keep batchinfer's kernel.

        Args:
            chosen: The result of `decide`: the name of a library, or OURS.
        """
        sound = self._sound
        if sound is None:
            _log.info("prompts are read by %s, which another engine of this run has timed", chosen)
        if chosen == OURS:
            return self._ops
        if sound is None and chosen in self._libraries:
            try:
                return self._try_library(chosen, self._steps()) or self._ops
            except BROKEN as error:
                self._warn_untimed(error)
                return self._ops
        if sound is None or chosen not in sound:
            _log.warning("%s cannot be used here; batchinfer's own kernel reads prompts", chosen)
            return self._ops
        return sound[chosen]

    def _steps(self) -> list[Trial]:
        return [Trial.timed(self._prompts, self._sizes, part, self._device) for part in PARTS]

    def _warn_untimed(self, error: BaseException) -> None:
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        names = " and ".join(self._libraries)
        _log.warning(f"{names} could not be tried ({found}); batchinfer's own kernel reads prompts")

    def _describe(self, name: str, seconds: float) -> str:
        version = self._libraries[name].version() if name in self._libraries else None
        return f"{name}{'' if version is None else f' {version}'} takes {1e3 * seconds:.2f} ms a layer"

    def _try_library(self, name: str, steps: list[Trial]) -> Ops | None:
        """Return operators with a library's attention of prompts; None if its results differ from batchinfer's kernel.

        A difference is logged.

        Args:
            name: The name of the library.
            steps: Steps on which to compare the results. Short steps are added.
        """
        library, device = self._libraries[name], self._device
        known = [rules for rules in self._layers if library.supports(rules)]
        try:
            prefill = library(self._prompts.shape, self._sizes.block_size, device)
            theirs = self._prompts.with_prefill(prefill)
            short = (Trial.short(self._prompts, self._sizes, count, device) for count in (FEW, MANY))
            for step in (*steps, *short):
                for rules in known:
                    _check(step.run(self._ops, rules), step.run(theirs, rules))
        except BROKEN as error:
            _warn(library, error)
            return None
        return theirs

    def _time(self, contestants: Mapping[str, Ops], steps: list[Trial]) -> dict[str, float]:
        """Return the mean seconds per layer that all steps take together, by name of the contestant.

        Args:
            contestants: Operators with the attention of prompts to time, by name.
            steps: The steps.
        """
        began, layers = self._clock(), self._layers
        took: dict[tuple[str, AttentionRules], list[float]]
        took = {(name, rules): [] for name in contestants for rules in layers}
        for _ in range(ROUNDS):
            for (name, rules), times in took.items():
                run = partial(_run_all, contestants[name], rules, steps)
                times.append(seconds_of(run, self._device, self._clock))
            if self._clock() - began > BUDGET_S:
                break
        count = LAYERS * sum(layers.values())
        return {
            name: sum(layers[rules] * median(took[name, rules]) for rules in layers) / count
            for name in contestants
        }


def _run_all(ops: Ops, rules: AttentionRules, steps: list[Trial]) -> None:
    for step in steps:
        step.run(ops, rules)


def _warn(library: type[AnyPrefill], error: BaseException) -> None:
    _log.warning(
        "%s %s is installed and cannot be used (%s: %s); batchinfer's own kernel reads prompts; %s",
        *(library.name, library.version(), type(error).__name__, str(error).strip().partition("\n")[0]),
        library.remedy(),
    )


def _check(ours: Tensor, theirs: Tensor) -> None:
    off = float((ours.float() - theirs.float()).abs().max())
    if not off <= TOLERANCE[ours.dtype]:  # also True for NaN
        raise ValueError(
            f"its results differ from batchinfer's by {off:.3g}, more than {TOLERANCE[ours.dtype]:g}"
        )
