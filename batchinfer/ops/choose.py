"""The one place that decides which operators a model gets."""

from __future__ import annotations

import importlib.util
import logging

import torch

from batchinfer.errors import Unavailable
from batchinfer.ops.cpu_ops import CpuOps
from batchinfer.ops.interface import Ops, Quantization
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
    kv_heads: int = 1,
) -> Ops:
    """Compiled operators on a CPU that has a compiler, Triton's on a GPU, for the dtypes and sizes that they cover;
    else torch's.

    `group` is the number of query heads a KV head; how a GPU's work is split depends on `kv_heads`. Falling back is
    logged, and `ops` in the report says it. Raises Unavailable where torch's would have to do, and cannot: they neither
    quantise nor promise row-invariance.
    """
    wanted = [] if quantization == "none" else ["model.quantization: int8"]
    wanted += ["engine.deterministic: true"] if deterministic else []
    sizes, arithmetic = (dtype, group, head_dim), (quantization, deterministic)
    if device.type == "cpu":
        needed, found = "compiled CPU operators", _compiled(*sizes, *arithmetic)
    else:
        needed, found = "Triton operators", _triton(*sizes, *arithmetic, kv_heads)
    if isinstance(found, Ops):
        return found
    if wanted:
        raise Unavailable(f"{wanted[0]} needs the {needed}: {found}")
    _log.warning("%s; torch's operators are used, which are several times slower", found)
    return TorchOps()


def _compiled(
    dtype: torch.dtype, group: int, head_dim: int, quantization: Quantization, deterministic: bool
) -> Ops | str:
    """The operators, or why there are none."""
    if not CpuOps.can_run(dtype, group, head_dim):
        return f"they do not cover {dtype} with {group} query heads of {head_dim} a KV head"
    try:
        return CpuOps(CompiledOperators(), group, quantization, deterministic)
    except NoCompiler as error:
        return str(error)


def _triton(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    quantization: Quantization,
    deterministic: bool,
    kv_heads: int,
) -> Ops | str:
    """The same for a GPU. Triton is imported only here: it looks for a driver."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from batchinfer.ops.triton_ops import TritonOps
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

    if not TritonOps.can_run(dtype, group, head_dim):
        return f"they do not cover {dtype} with {group} query heads of {head_dim} a KV head"
    shape = AttentionShape(dtype, group * kv_heads, kv_heads, head_dim, deterministic)
    return TritonOps(shape, quantization)
