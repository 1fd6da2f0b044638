"""The model that a section runs, on dummy weights: loaded once for all sections of a process that run it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.kv.memory import GPU_RESERVE, GPU_RESERVE_SHARE, cache_blocks
from batchinfer.engine.load import build as building
from batchinfer.engine.load.build import LoadedModel, load_model
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.shapes import shape_config
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.parameters import parameter_count
from batchinfer_kernels.arithmetic import Dtype
from batchinfer_kernels.cost import Peaks
from tests.gpu_suite.coded_weights import CodedWeights, in_blocks
from tests.gpu_suite.section import BANDWIDTH, Model, Setting

TINY_MODEL = "tiny"
DTYPE: Dtype = "bfloat16"
TINY_DTYPE: Dtype = "float32"  # tokens are to be the same as others'
# Tokens of the longest row of any section: the one among short ones, its answer and what is run beside it
LONGEST, TINY_LONGEST = 16_384 + 256, 48
TINY_ROWS, TINY_TOKENS = 2, 16  # of a step


@dataclass(frozen=True, slots=True)
class Fit:
    """How a GPU's memory was divided when the model was loaded, in bytes."""

    free: int  # once the weights were loaded
    steps: int  # that the largest steps were measured to take
    cache: int


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    model: LoadedModel
    fit: Fit


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
    """Of the model's dtype, and of the codes of its weights. In a rehearsal plain ones: nothing is told that depends on
    them.

    Raises Unavailable where they were not measured.
    """
    if setting.rehearsal:
        return Peaks(1.0, 1.0)
    wanted = {DTYPE, BANDWIDTH, *([codes_dtype(setting)] if _of(setting).quantization != "none" else [])}
    if not wanted <= set(setting.peaks):
        raise Unavailable("the peaks of this GPU were not measured, and without them no step is sized")
    return Peaks(setting.peaks[DTYPE], setting.peaks[BANDWIDTH], setting.peaks.get(codes_dtype(setting)))


def codes_dtype(setting: Setting) -> str:
    """The dtype whose peak products of codes are held against."""
    return "int8" if _of(setting).quantization in ("none", "int8") else "float8_e4m3fn"


def loaded_model(setting: Setting) -> LoadedModel:
    """The same for all sections of a process that run it."""
    return _loaded(setting.rehearsal, _of(setting), peaks(setting)).model


def source(setting: Setting) -> ModelSource:
    """Dummy weights by the model's name, with codes where the section's model has some."""
    plain, model = shape_config(model_name(setting)), _of(setting)
    if setting.rehearsal and not model.is_plain:
        plain = replace(plain, layers=plain.layers[:1])  # the interpreter is slow, and layers are alike
    spec = plain.caching(model.kv_cache)
    spec = in_blocks(spec) if model.quantization == "stored" else spec
    weights = CodedWeights if model.quantization == "stored" else DummyWeights
    return ModelSource(spec, parameter_count(plain), lambda *place: weights(spec, *place))


def memory(setting: Setting) -> dict[str, Any]:
    """What is left of the memory that the cache was not given, beside what is kept back for what no step shows; to be
    asked once everything has run. A rehearsal has no memory of its own."""
    loaded = _loaded(setting.rehearsal, _of(setting), peaks(setting))
    told: dict[str, Any] = {"kind": "memory", "model": model_name(setting)}
    if setting.rehearsal:
        return told
    fit, left = loaded.fit, int(torch.cuda.mem_get_info()[0])
    kept_back = fit.free - fit.steps - fit.cache
    return {
        **told,
        "weight_bytes": loaded.model.info.weight_bytes,
        "free_bytes": fit.free,
        "step_bytes": fit.steps,
        "cache_bytes": fit.cache,
        "reserve_bytes": GPU_RESERVE + int(fit.free * GPU_RESERVE_SHARE),
        "kept_back_bytes": kept_back,
        "left_bytes": left,
        "unforeseen_bytes": kept_back - left,
    }


def _of(setting: Setting) -> Model:
    """All models of a rehearsal that have the same arithmetic are one."""
    model = setting.model or Model(TINY_MODEL)
    if not setting.rehearsal:
        return model
    return Model(TINY_MODEL, quantization=model.quantization, kv_cache=model.kv_cache)


@cache
def _loaded(rehearsal: bool, model: Model, found: Peaks) -> _Loaded:
    setting = Setting(rehearsal, 0.0, "", model=model)
    gc.collect()
    if rehearsal:
        _stand_in()
    else:
        torch.cuda.empty_cache()  # of what kernels were measured on
    longest = TINY_LONGEST if rehearsal else model.longest or LONGEST
    config = EngineConfig(
        model=Path(model_name(setting)),
        dtype=dtype_of(setting),
        device="cuda",
        max_model_len=longest,
        longest=longest,
        max_num_seqs=TINY_ROWS if rehearsal else model.rows,
        max_num_batched_tokens=(TINY_TOKENS if model.is_plain else TINY_TOKENS // 4) if rehearsal else None,
        kv_memory=model.kv_memory,
        peaks=None if rehearsal else found,
        quantization=model.quantization,
        kv_cache=model.kv_cache,
    )
    with _noted_fits() as fits:
        loaded = load_model(config, source(setting))
    (fit,) = fits
    return _Loaded(loaded, replace(fit, cache=loaded.info.kv_bytes))


def _stand_in() -> None:
    """The model is built as for a GPU: Triton's operators, one step looked ahead, steps captured."""
    from tests.batchinfer.engine import interpreted_gpu

    interpreted_gpu.stand_in(setattr)


@contextmanager
def _noted_fits() -> Iterator[list[Fit]]:
    """How caches were sized."""
    found: list[Fit] = []

    def noting(*, block_bytes: int, free: int, needed: int, **given: Any) -> int:
        blocks = cache_blocks(block_bytes=block_bytes, free=free, needed=needed, **given)
        found.append(Fit(free, needed, blocks * block_bytes))
        return blocks

    with patch.object(building, "cache_blocks", noting):
        yield found
