"""A stand-in for a GPU on machines without one: Triton's kernels are interpreted.

Only calls to CUDA are replaced: the device, its memory and graphs. A replayed graph runs the captured calls
again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from tests.kernels.gpu import interpreter

# Also here: a job's engine is a separate process, which imports this module
if interpreter.is_wanted():
    interpreter.switch_on()

import torch

from batchinfer.engine.load import cache_fit, dummy_steps, layer_heads, loaded_model, process_setup
from batchinfer.engine.load.build import LoadedWeights, load_weights
from batchinfer.engine.ranks import rank_groups
from batchinfer.engine.tensors import graph_sizes
from batchinfer.models import sources
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.ops import choose
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from tests.batchinfer import costed_engine
from tests.batchinfer.engine.driver import PreemptingAhead
from tests.batchinfer.engine.launched_references import launch_references
from tests.batchinfer.engine.taped import QuicklyTaped, Taped, TapedGroup

DEVICE = "cpu" if interpreter.is_wanted() else "cuda"
Replace = Callable[[Any, str, Any], None]


class NoMeter:
    """Stands in for the meter of a GPU's memory, with no memory in use."""

    def free(self) -> int:
        return 1 << 30

    def restart(self) -> None:
        """Do nothing, as no memory is counted."""

    def peak(self) -> int:
        return 0


def _as_on_a_gpu(_: torch.device, *arithmetic: Any, **more: Any) -> Ops:
    return choose_ops(torch.device("cuda"), *arithmetic, **more)


def stand_in(replace: Replace, compiles: bool = True, quick: bool = False) -> None:
    """Replace calls to CUDA by stand-ins, or do nothing if a GPU is present.

    Args:
        replace: called as `replace(module, name, value)`.
        compiles: if True, the warm-up also runs the steps that only compile kernels.
        quick: if True, skip the profile run and the warm-up of captures, and replace the slowest interpreted
            kernels as `launch_references` does.
    """
    if DEVICE == "cuda":
        return
    replace(process_setup, "_device", lambda _: torch.device("cpu"))
    choosing = [sources, layer_heads]
    if "transformers" in sys.modules:  # which takes the longest to import, and few engines' processes need
        choosing.append(importlib.import_module("batchinfer.models.foreign.source"))
    for module in choosing:
        replace(module, "choose_ops", _as_on_a_gpu)
    replace(cache_fit, "GpuMeter", lambda _: NoMeter())
    replace(cache_fit, "GpuRecorder", QuicklyTaped if quick else Taped)
    replace(rank_groups, "TorchGroup", TapedGroup)
    if not compiles:
        replace(dummy_steps, "sizes_between", lambda *_: [])
    if quick:
        replace(dummy_steps.DummySteps, "profile", lambda *_: 0)
        launch_references(replace)


def triton_ops(model: Checkpoint, deterministic: bool = False) -> Any:
    """Make Triton's operators for a model in float32."""
    from batchinfer.models.ops.triton_ops import TritonOps
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

    attention = model.spec.attention
    sizes = (attention.q_heads, attention.kv_heads, attention.head_dim)
    shape = AttentionShape(torch.float32, *sizes, deterministic, latent=attention.cache.latent)
    return TritonOps(shape)


def build(*arguments: Any, **named: Any) -> LoadedWeights:
    """Load a job's weights like `load_weights`, without steps that only compile kernels."""
    stand_in(setattr, compiles=False)
    return load_weights(*arguments, **named)


def build_quick(*arguments: Any, **named: Any) -> LoadedWeights:
    """Load weights on the stand-in GPU, with `quick` stand-ins."""
    stand_in(setattr, compiles=False, quick=True)
    return load_weights(*arguments, **named)


def build_capturing_later(*arguments: Any, **named: Any) -> LoadedWeights:
    """Load weights on the stand-in GPU with captures for contexts of up to 16 tokens before the first step.

    Graphs for longer contexts are captured later. The stand-ins are `quick`.
    """
    for module in (graph_sizes, dummy_steps):
        module.MIN_CONTEXT_BOUND = 16  # type: ignore[attr-defined]
    stand_in(setattr, compiles=False, quick=True)
    return load_weights(*arguments, **named)


def build_drafting(*arguments: Any, **named: Any) -> LoadedWeights:
    """Load like `build`, with steps that take their roofline: drafts do not depend on the machine's speed."""
    stand_in(setattr, compiles=False, quick=True)
    for module in (graph_sizes, dummy_steps):
        module.MIN_CONTEXT_BOUND = 16  # type: ignore[attr-defined]
    return costed_engine.build(*arguments, **named)


def build_without_triton(*arguments: Any) -> LoadedWeights:
    """Load like `build` on a machine without Triton."""
    choose.importlib.util.find_spec = lambda _: None  # type: ignore[attr-defined]
    return build(*arguments)


def build_preempting(*arguments: Any, **named: Any) -> LoadedWeights:
    """Load weights like `build_capturing_later`, with a scheduler that preempts sequences."""
    loaded_model.Scheduler = PreemptingAhead  # type: ignore[attr-defined]
    return build_capturing_later(*arguments, **named)


def build_uncaptured(*arguments: Any, **named: Any) -> LoadedWeights:
    """Load like `build` a model whose steps cannot be captured."""
    sources.ModelSource.can_be_captured = False
    return build_preempting(*arguments, **named)
