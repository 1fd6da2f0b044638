"""Chooses the fastest operators when a model is loaded, with one choice for all engines of a run.

On a GPU, batchinfer's kernels multiply float8 weights, experts, and gate and up; a library may do so for larger numbers
of rows. Both are timed with the weights of one layer of each shape.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.prompts.contest import BROKEN, MARGIN, prefill_contest
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.ops.queued_time import QueuedTime
from batchinfer.models.spec.spec import AttentionRules

_log = logging.getLogger(__name__)

# Rows of a step: small and large decode batches, and prompts
ROWS = (64, 256, 1024, 8192)
ODD_ROWS = 7  # the library must support odd numbers of rows too
# Number of timed calls of each kernel, alternating, and the seconds per shape. The first calls do not count.
ROUNDS, BUDGET_S = 5, 0.5
# Largest difference of results relative to the largest result: on Hopper, sums of float8 keep about 13 bits
TOLERANCE = 2e-2
Chosen = dict[str, int | None]  # form of a layer → minimum number of rows for the library, or None for never


class LibraryChoice(Protocol):
    """A packed layer with two implementations: batchinfer's kernel, and a library that may be faster for many rows.

    Attributes:
        library_name: The name of the library, for messages.
        least_library_rows: The minimum number of rows for the library. None: the kernel computes all numbers of rows.
    """

    library_name: str
    least_library_rows: int | None

    @property
    def form(self) -> str:
        """Return a text with all properties of the layer that its duration depends on, such as its shape.

        Layers with equal texts get the same `least_library_rows`.
        """

    def trial(self, rows: int, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return two functions that compute the layer for random rows: by batchinfer's kernel, and by the library.

        Args:
            rows: The number of rows.
            device: The device of the layer.
        """


@runtime_checkable
class ProductOps(Protocol):
    """Operators that list the packed layers which a library can compute as well as batchinfer's kernel."""

    @property
    def library_layers(self) -> Sequence[LibraryChoice] | None:
        """Return the packed layers that a library can also compute; None if results must not depend on timing."""


def product_contest(ops: Ops, most_rows: int, device: torch.device) -> ProductContest | None:
    """Return a contest that measures from how many rows on a library multiplies faster than batchinfer's kernels.

    The contest may have no layers. The result is None if the operators have no such choice, or if results must not
    depend on timing.

    Args:
        ops: The operators with the packed layers.
        most_rows: The number of tokens of the largest step.
        device: The device of the layers.
    """
    layers = ops.library_layers if isinstance(ops, ProductOps) else None
    return None if layers is None else ProductContest(layers, most_rows, device)


class ProductContest:
    """A contest between batchinfer's kernels and a library for each shape of a model's layers.

    Both are timed for several numbers of rows.
    """

    def __init__(
        self,
        layers: Sequence[LibraryChoice],
        most_rows: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare the contest.

        Args:
            layers: The packed layers that the library can also compute.
            most_rows: The number of tokens of the largest step.
            device: The device of the layers.
            clock: Returns the time in seconds.
        """
        self._layers, self._most, self._device, self._clock = layers, most_rows, device, clock
        self._timer = QueuedTime(device, clock)
        self._samples = {layer.form: layer for layer in layers}
        self._tried = False

    def decide(self) -> Chosen:
        """Time one layer of each form, and return the minimum number of rows for the library, by form.

        The number is None if batchinfer's kernel computes all numbers of rows, because the library is slower or fails.
        Failures are logged.
        """
        self._tried = True
        return {form: self._least_rows(form, layer) for form, layer in self._samples.items()}

    def apply(self, chosen: Chosen) -> None:
        """Set `least_library_rows` of each layer according to `chosen`.

        The value is None for forms that `chosen` lacks, and if the library fails on this machine.

        Args:
            chosen: The result of `decide`, here or in another engine.
        """
        if not self._tried:
            chosen = {form: least for form, least in chosen.items() if least is None or self._works(form)}
        for layer in self._layers:
            layer.least_library_rows = chosen.get(layer.form)

    def _least_rows(self, form: str, layer: LibraryChoice) -> int | None:
        counts = sorted({min(rows, self._most) for rows in ROWS})
        try:
            self._ways(layer, min(ODD_ROWS, self._most))
            faster = [self._is_faster(layer, rows) for rows in counts]
        except BROKEN as error:
            _warn(layer, error)
            return None
        slower = [rows for rows, wins in zip(counts, faster, strict=True) if not wins]
        above = [rows for rows in counts if not slower or rows > slower[-1]]
        least = above[0] if above else None
        _log.info(
            "%s: %s multiplies %s",
            *(form, layer.library_name, "no rows" if least is None else f"{least} rows and more"),
        )
        return least

    def _works(self, form: str) -> bool:
        layer = self._samples.get(form)
        try:
            if layer is not None:
                for rows in (ODD_ROWS, ROWS[0]):
                    self._ways(layer, rows)
        except BROKEN as error:
            if layer is not None:
                _warn(layer, error)
            return False
        return True

    def _ways(self, layer: LibraryChoice, rows: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return functions that compute a layer by batchinfer's kernel and by the library, after comparing results.

        Args:
            layer: The layer.
            rows: The number of random rows.

        Raises:
            ValueError: The results differ.
        """
        ours, theirs = layer.trial(rows, self._device)
        _check(ours(), theirs())
        return ours, theirs

    def _is_faster(self, layer: LibraryChoice, rows: int) -> bool:
        ways = self._ways(layer, rows)
        began, took = self._clock(), ([], [])  # type: tuple[float, tuple[list[float], list[float]]]
        for _ in range(ROUNDS):
            for way, times in zip(ways, took, strict=True):
                times.append(self._timer.seconds_of(way))
            if self._clock() - began > BUDGET_S / len(ROWS):
                break
        return median(took[1]) < MARGIN * median(took[0])


def _warn(layer: LibraryChoice, error: BaseException) -> None:
    said = str(error).strip().partition("\n")[0]
    _log.warning(
        "%s cannot multiply %s (%s: %s); batchinfer computes it by itself, which may be slower; a version that "
        "docs/gpu.md names may help",
        *(layer.library_name, layer.form, type(error).__name__, said),
    )


def _check(ours: Tensor, theirs: Tensor) -> None:
    largest = float(ours.float().abs().max())
    off = float((ours.float() - theirs.float()).abs().max())
    if not off <= TOLERANCE * largest:  # also True for NaN
        raise ValueError(
            f"its results differ from batchinfer's by {off:.3g} where the largest are {largest:.3g}"
        )


def fastest_operators(
    ops: Ops,
    sizes: PromptSizes,
    device: torch.device,
    layers: Mapping[AttentionRules, int],
    agreed: Callable[[Callable[[], str]], str],
) -> Ops:
    """Time batchinfer's kernels and libraries, and return operators that use the fastest ones.

    The returned operators have the fastest attention of prompts. The fastest matrix product of each packed layer is set
    in place.

    Args:
        ops: The operators with the model's packed layers.
        sizes: The size of the job's largest step of prompts.
        device: The device of the model.
        layers: The number of layers per kind of attention.
        agreed: Calls a function in one engine, and returns its result, a JSON text, in all engines of the run, so that
            all use the same kernels. Returns "{}" if that engine died.
    """
    prompts = prefill_contest(ops, sizes, device, layers)
    products = product_contest(ops, sizes.tokens, device)
    if prompts is None and products is None:
        return ops

    def decide() -> str:
        chosen: dict[str, Any] = {}
        if prompts is not None:
            chosen["prompts"] = prompts.decide()
        if products is not None:
            chosen["products"] = products.decide()
        if device.type == "cuda":  # raises errors of kernels before anything is chosen
            torch.cuda.synchronize(device)
        return json.dumps(chosen)

    chosen = json.loads(agreed(decide))
    if not chosen:
        _log.warning("an engine died while kernels were compared; in this run batchinfer's own are used")
    if products is not None:
        products.apply(chosen.get("products", {}))
    return ops if prompts is None or "prompts" not in chosen else prompts.winner(chosen["prompts"])
