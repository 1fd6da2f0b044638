"""The model of a section on dummy weights, loaded once per process for all sections that use it."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.kv.memory import GPU_RESERVE, GPU_RESERVE_SHARE
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.shapes import shape_config
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.parameters import parameter_count
from batchinfer_kernels.arithmetic import Dtype
from batchinfer_kernels.cost import Peaks
from tests.gpu_suite.coded_weights import CodedWeights, in_blocks
from tests.suite.section import BANDWIDTH, BenchModel, BenchSection, Result

TINY_MODEL = "tiny"
DTYPE: Dtype = "bfloat16"
TINY_DTYPE: Dtype = "float32"  # tokens must equal the other engines'
# Tokens of the longest row of any section: the long row among short ones, its answer, and the rows next to it
LONGEST, TINY_LONGEST = 16_384 + 256, 48
TINY_ROWS, TINY_TOKENS = 2, 16  # rows and tokens of a step


def name_of(section: BenchSection) -> str:
    """Return the model's name, and what of it is kept in codes."""
    return replace(section.model or BenchModel(TINY_MODEL), name=model_name(section)).text


def model_name(section: BenchSection) -> str:
    if section.rehearsal:
        return TINY_MODEL
    if section.model is None:
        raise ValueError("this section has no model to run")
    return section.model.name


def dtype_of(section: BenchSection) -> Dtype:
    return TINY_DTYPE if section.rehearsal else DTYPE


def peaks(section: BenchSection) -> Peaks:
    """Return the peaks of the model's dtype and of its quantised weights, or any values in a rehearsal.

    Raises:
        Unavailable: If they were not measured.
    """
    if section.rehearsal:
        return Peaks(1.0, 1.0)
    wanted = {DTYPE, BANDWIDTH, *([codes_dtype(section)] if _of(section).quantization != "none" else [])}
    if not wanted <= set(section.peaks):
        raise Unavailable("the peaks of this GPU were not measured, and without them no step is sized")
    return Peaks(section.peaks[DTYPE], section.peaks[BANDWIDTH], section.peaks.get(codes_dtype(section)))


def codes_dtype(section: BenchSection) -> str:
    """Return the dtype whose peak applies to products of quantised values."""
    return "int8" if _of(section).quantization in ("none", "int8") else "float8_e4m3fn"


def loaded_model(section: BenchSection) -> LoadedModel:
    """Return the section's model. Sections in one process share it."""
    return _loaded(section.rehearsal, _of(section), peaks(section)).model


def source(section: BenchSection) -> ModelSource:
    """Return dummy weights by the model's name, quantised if the section's model is."""
    plain, model = shape_config(model_name(section)), _of(section)
    if section.rehearsal and not model.is_plain:
        plain = replace(
            plain, layers=plain.layers[:1]
        )  # the interpreter is slow, and layers have equal shapes
    spec = plain.with_cache_dtype(model.kv_cache)
    spec = in_blocks(spec) if model.quantization == "stored" else spec
    weights = CodedWeights if model.quantization == "stored" else DummyWeights
    return ModelSource(spec, parameter_count(plain), lambda *place: weights(spec, *place))


def memory(section: BenchSection) -> Result:
    """Return the memory that runs took since the model was loaded, and the rest.

    Call it after all runs. A rehearsal measures no memory.
    """
    loaded, left = _loaded(section.rehearsal, _of(section), peaks(section)), _free(section.rehearsal)
    info = loaded.model.info
    metrics = {
        "weight_bytes": info.weight_bytes,
        "cache_bytes": info.kv_bytes,
        "loaded_free_bytes": loaded.free,
        "reserve_bytes": GPU_RESERVE + int(GPU_RESERVE_SHARE * (loaded.free + info.kv_bytes)),
        "taken_bytes": loaded.free - left,
        "left_bytes": left,
    }
    return Result(f"memory, {model_name(section)}", metrics=metrics)


def _of(section: BenchSection) -> BenchModel:
    """Return the section's model. In a rehearsal, models with the same arithmetic share one."""
    model = section.model or BenchModel(TINY_MODEL)
    if not section.rehearsal:
        return model
    return BenchModel(TINY_MODEL, quantization=model.quantization, kv_cache=model.kv_cache)


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    model: LoadedModel
    free: int  # free bytes of the device after the cache was allocated


@cache
def _loaded(rehearsal: bool, model: BenchModel, found: Peaks) -> _Loaded:
    section = BenchSection(rehearsal, 0.0, model=model)
    gc.collect()
    if not rehearsal:
        torch.cuda.empty_cache()  # free the tensors of measured kernels
    longest = TINY_LONGEST if rehearsal else model.longest or LONGEST
    place, dtype = Path(model_name(section)), dtype_of(section)
    config = EngineConfig(
        LoadConfig(place, dtype, "cuda", quantization=model.quantization, kv_cache=model.kv_cache),
        max_model_len=longest,
        longest=longest,
        max_num_seqs=TINY_ROWS if rehearsal else model.rows,
        max_num_batched_tokens=(TINY_TOKENS if model.is_plain else TINY_TOKENS // 4) if rehearsal else None,
        kv_memory=model.kv_memory,
        peaks=None if rehearsal else found,
    )
    loaded = load_model(config, source(section))
    return _Loaded(loaded, _free(rehearsal))


def _free(rehearsal: bool) -> int:
    return 0 if rehearsal else int(torch.cuda.mem_get_info()[0])
