"""The arithmetic of a model: the types that it is computed in, and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer_kernels.arithmetic import KvCacheDtype


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The dtype of activations, the device, and the other settings of the engine's arithmetic."""

    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    tiles: bool = False  # as in EngineConfig
    kv_cache: KvCacheDtype = "auto"  # as the job asks for it; the model's spec says what each layer keeps
