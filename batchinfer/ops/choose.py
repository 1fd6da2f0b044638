"""The one place that decides which operators a model gets."""

from __future__ import annotations

import logging

import torch

from batchinfer.errors import Unavailable
from batchinfer.ops.cpu_ops import CpuOps, Quantization
from batchinfer.ops.interface import Ops
from batchinfer.ops.torch_ops import TorchOps
from batchinfer_kernels.cpu.build import NoCompiler
from batchinfer_kernels.cpu.compiled import CompiledOperators

_log = logging.getLogger(__name__)


def choose_ops(
    device: torch.device,
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    quantization: Quantization = "none",
    deterministic: bool = False,
) -> Ops:
    """Compiled operators on a CPU that has a compiler, for the dtypes and sizes that they cover; else torch's.

    `group` is the number of query heads a KV head. Falling back on a CPU is logged, and `ops` in the report says it.
    Raises Unavailable where torch's would have to do, and cannot: they neither quantise nor promise row-invariance.
    """
    missing = _why_not_compiled(device, dtype, group, head_dim)
    if missing is None:
        try:
            return CpuOps(CompiledOperators(), group, quantization, deterministic)
        except NoCompiler as error:
            missing = str(error)
    wanted = "model.quantization: int8" if quantization != "none" else "engine.deterministic: true"
    if quantization != "none" or deterministic:
        raise Unavailable(f"{wanted} needs the compiled CPU operators: {missing}")
    if device.type == "cpu":
        _log.warning("%s; torch's operators are used, which are several times slower", missing)
    return TorchOps()


def _why_not_compiled(device: torch.device, dtype: torch.dtype, group: int, head_dim: int) -> str | None:
    if device.type != "cpu":
        return f"they do not run on {device.type}"
    if not CpuOps.can_run(dtype, group, head_dim):
        return f"they do not cover {dtype} with {group} query heads of {head_dim} a KV head"
    return None
