"""The arithmetic of a job, and the context of its work keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchinfer.engine.config import NUMERICS_VERSION
from batchinfer.machine.hardware import arithmetic_text
from batchinfer.models.checkpoint.checkpoint import OWN, Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cost import ModelCost

# What the context of a work key says by leaving it out. These never change: a stored key would mean another value.
_ABSENT: Mapping[str, Any] = {
    "quantization": "none",
    "deterministic": False,
    "kv_cache_dtype": "auto",
    "block_size": "auto",
    "device": "cpu",
    "tiles": False,
    "arm": "",
    "integer_codes": False,
    "smoothed": False,
    "calibrated": False,
    "wide_activations": False,
    "coded_tiles": False,
    "int4_experts": False,
    "modelling": OWN,
    "columns": 0,
    "output": "tokens",
}
_SAME_VALUES = ("stored-mxfp4", "stored-sparse")  # as once they are dequantised, or filled up


@dataclass(frozen=True, slots=True)
class Numerics:
    """Decides the answers of a model: how it computes, and how long rows may be."""

    device: Device
    dtype: Dtype
    max_model_len: int
    quantization: Quantization = "none"
    deterministic: bool = False
    block_size: int | Literal["auto"] = "auto"
    tiles: bool = False  # whether the CPU grants its matrix tiles
    arm: str = ""  # how an Arm CPU adds up; empty elsewhere
    kv_cache: KvCacheDtype = "auto"
    calibrates: bool = False  # whether weights become int4 by a calibration

    @property
    def text(self) -> str:
        """Describe the arithmetic for people: `bfloat16 with int8 weights, deterministic`."""
        return arithmetic_text(self.dtype, self.quantization, self.kv_cache, self.deterministic)

    @property
    def itemsize(self) -> int:
        """Return the bytes of a value that is not quantised."""
        return 4 if self.dtype == "float32" else 2

    def model_cost(self, checkpoint: StoredModel) -> ModelCost:
        """Return what steps of the model cost, without adapters."""
        codes = self.quantization, self.kv_cache
        return checkpoint.cost(self.itemsize, *codes, self.device, self.deterministic)

    def context(
        self,
        checkpoint: StoredModel,
        model_fingerprint: str,
        tokenizer_fingerprint: str,
        columns: int = 0,
        output: str = "tokens",
    ) -> bytes:
        """sha256 over everything but the row itself that can change an answer; the first part of every work key.

        An option at its default is absent, so that one which is added later throws no stored answer away. `columns`:
        the version of the rules by which answers are checked against typed columns; 0: they have none. An answer
        that another job stored unchecked could not be published, and one that is refused is an answer elsewhere.
        `output`: the kind of answers.
        """
        parts = {
            "model": model_fingerprint,
            "tokenizer": tokenizer_fingerprint,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "eos": sorted(checkpoint.spec.eos_token_ids),
            "numerics": NUMERICS_VERSION,
        }
        options = {**self._options(), "modelling": checkpoint.modelling, "columns": columns, "output": output}
        # experts were in int8 once where the rest is in int4
        options["int4_experts"] = self.quantization == "int4" and _has_experts(checkpoint)
        parts |= {name: value for name, value in options.items() if value != _ABSENT[name]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    def _options(self) -> dict[str, Any]:
        """Return the options that can change an answer and have a default. Blocks, a device's operators, matrix tiles
        and Arm's vectors decide the order of additions, which counts only where the bits are promised."""
        options: dict[str, Any] = {
            # what MXFP4 stands for is multiplied, to the bit, whether it is dequantised before or then; zeros change no
            # sum, whether they are added or not
            "quantization": "none" if self.quantization in _SAME_VALUES else self.quantization,
            "deterministic": self.deterministic,
            "kv_cache_dtype": self.kv_cache,
            "calibrated": self.calibrates,
            # a CPU quantises activations to int8 for weights in int4, a GPU does not
            "wide_activations": self.device == "cuda" and self.quantization in ("int4", "stored-int4"),
        }
        if self.deterministic:
            options |= {"block_size": self.block_size, "device": self.device}
            # in float32 all sums are those of vectors
            options["tiles"] = self.tiles and self.dtype == "bfloat16"
            options["arm"] = self.arm
            # outlier channels were rounded as they are once, and are made smaller now
            options["smoothed"] = self.quantization == "int8"
            # a GPU adds up what it widens in registers in tiles of other sizes
            options["coded_tiles"] = (self.device, self.quantization) == ("cuda", "stored-mxfp4")
            # a CPU widened the cache's codes to bfloat16 once, and multiplies them as integers now
            options["integer_codes"] = (self.device, self.kv_cache, self.dtype) == ("cpu", "int8", "bfloat16")
        return options


def _has_experts(checkpoint: StoredModel) -> bool:
    return isinstance(checkpoint, Checkpoint) and any(each.experts for each in checkpoint.spec.linears())
