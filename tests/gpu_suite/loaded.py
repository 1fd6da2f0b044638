"""The model that a section runs, on dummy weights: loaded once for all sections of a process that run it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from batchinfer.engine.build import LoadedModel, load_model
from batchinfer.engine.cache_tensors import allocate_caches
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.device_fit import CacheRoom, fit
from batchinfer.engine.graph_capture import Captured
from batchinfer.engine.sources import ModelSource
from batchinfer.errors import Unavailable
from batchinfer.models.decoder import Decoder
from batchinfer.models.dummy import DummyWeights
from batchinfer.models.parameters import parameter_count
from batchinfer.models.shapes import shape_config
from batchinfer_kernels.arithmetic import Dtype
from batchinfer_kernels.cost import Peaks
from tests.gpu_suite.section import BANDWIDTH, Model, Setting

TINY_MODEL = "tiny"
DTYPE: Dtype = "bfloat16"
TINY_DTYPE: Dtype = "float32"  # tokens are to be the same as others'
# Tokens of the longest row of any section: the one among short ones, its answer and what is run beside it
LONGEST, TINY_LONGEST = 16_384 + 256, 48


def model_name(setting: Setting) -> str:
    """Raises ValueError for a section without a model."""
    if setting.rehearsal:
        return TINY_MODEL
    if setting.model is None:
        raise ValueError("this section has no model to run")
    return setting.model.name


def dtype_of(setting: Setting) -> Dtype:
    return TINY_DTYPE if setting.rehearsal else DTYPE


def peaks(setting: Setting) -> Peaks:
    """Of the model's dtype. In a rehearsal plain ones: nothing is told that depends on them.

    Raises Unavailable where they were not measured.
    """
    if setting.rehearsal:
        return Peaks(1.0, 1.0)
    if not {DTYPE, BANDWIDTH} <= set(setting.peaks):
        raise Unavailable("the peaks of this GPU were not measured, and without them no step is sized")
    return Peaks(setting.peaks[DTYPE], setting.peaks[BANDWIDTH])


def loaded_model(setting: Setting) -> LoadedModel:
    """The same for all sections of a process that run it."""
    return _loaded(setting.rehearsal, setting.model, peaks(setting))


def source(setting: Setting) -> ModelSource:
    """Dummy weights by the model's name."""
    spec = shape_config(model_name(setting))
    return ModelSource(spec, parameter_count(spec), lambda *place: DummyWeights(spec, *place))


@cache
def _loaded(rehearsal: bool, model: Model | None, found: Peaks) -> LoadedModel:
    setting = Setting(rehearsal, 0.0, "", model=model)
    gc.collect()
    if not rehearsal:
        torch.cuda.empty_cache()  # of what kernels were measured on
    longest = TINY_LONGEST if rehearsal else LONGEST
    config = EngineConfig(
        model=Path(model_name(setting)),
        dtype=dtype_of(setting),
        device="cpu" if rehearsal else "cuda",
        max_model_len=longest,
        longest=longest,
        max_num_seqs=2 if rehearsal else None,
        max_num_batched_tokens=16 if rehearsal else None,
        kv_memory=2**20 if model is None else model.kv_memory,
        peaks=found,
    )
    loaded = load_model(config, source(setting))
    return _interpreted(loaded, setting) if rehearsal else loaded


def _interpreted(loaded: LoadedModel, setting: Setting) -> LoadedModel:
    """The same model as a GPU would run it: Triton's operators, one step looked ahead, decode steps captured."""
    from batchinfer.ops.triton_ops import TritonOps
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

    model, info, device = source(setting), loaded.info, torch.device("cpu")
    attention, dtype = model.spec.attention, getattr(torch, dtype_of(setting))
    ops = TritonOps(AttentionShape(dtype, attention.q_heads, attention.kv_heads, attention.head_dim))
    decoder = Decoder(model.spec, model.weights(dtype, device), ops, TINY_LONGEST, device)
    layout = loaded.runner.layout
    room = CacheRoom(
        blocks=lambda needed: info.blocks,
        allocate=lambda blocks: allocate_caches(ops, model.spec.caches, layout, blocks, dtype, device),
        longest=TINY_LONGEST,
        least=layout.sizes.alone(TINY_LONGEST, loaded.limits.max_num_batched_tokens),
    )
    runner = replace(loaded.runner, model=decoder, ops=ops, caches=[])
    fitted = fit(runner, loaded.limits, room, _NoMeter(), _captured_by_name)
    return replace(loaded, runner=fitted.runner, limits=fitted.limits, info=replace(info, ops=ops.name))


class _NoMeter:
    """Of a device without memory of its own."""

    def restart(self) -> None:
        """Nothing is counted."""

    def peak(self) -> int:
        return 0


def _captured_by_name(run: Callable[[], Tensor]) -> Captured:
    """A graph for a device that has none: what was captured is called again, and reads what it read then."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return Captured(result, replay)
