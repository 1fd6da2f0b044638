"""The one place that decides which operators a model gets."""

from __future__ import annotations

import logging

import torch

from batchinfer.ops.cpu_ops import CpuOps
from batchinfer.ops.interface import Ops
from batchinfer.ops.torch_ops import TorchOps
from batchinfer_kernels.cpu.build import NoCompiler
from batchinfer_kernels.cpu.compiled import CompiledOperators

_log = logging.getLogger(__name__)


def choose_ops(device: torch.device, dtype: torch.dtype, group: int, head_dim: int) -> Ops:
    """Compiled operators on a CPU that has a compiler, for the dtypes and sizes that they cover; else torch's.

    `group` is the number of query heads a KV head. Falling back on a CPU is logged, and `ops` in the report says it.
    """
    if device.type != "cpu":
        return TorchOps()
    if not CpuOps.can_run(dtype, group, head_dim):
        _log.warning(
            "the compiled CPU operators do not cover %s with heads of %d; torch's are used", dtype, head_dim
        )
        return TorchOps()
    try:
        return CpuOps(CompiledOperators(), group)
    except NoCompiler as error:
        _log.warning("%s; torch's operators are used, which are several times slower", error)
        return TorchOps()
