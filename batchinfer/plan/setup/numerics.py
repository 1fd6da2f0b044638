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

# Options that the context omits if they have these values. Never change one: stored keys would get another meaning.
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
    "version": 1,
}
# The version of the arithmetic of quantised weights, by device. Increase it when results change: answers get new work
# keys, and `plan` and `run` say how many stored answers of earlier versions run again. Version 1 adds nothing to keys.
# Version 2: int8 weights, and the int8 output head of int4 models, are transformed by a Hadamard matrix; on CPUs,
# activations for int4 weights have a scale per group
VERSIONS: Mapping[Quantization, Mapping[Device, int]] = {
    "int4": {"cpu": 2, "cuda": 2},
    "int8": {"cpu": 2, "cuda": 2},
    "stored-int4": {"cpu": 2, "cuda": 1},
}
_SAME_VALUES = ("stored-mxfp4", "stored-sparse")  # equal to the dequantised or dense values


@dataclass(frozen=True, slots=True)
class Numerics:
    """Everything about a model's computation that affects answers: arithmetic and maximum length.

    Attributes:
        device: "cpu" or "cuda".
        dtype: The data type of activations, and of weights that are not quantised.
        max_model_len: Maximum number of tokens of prompt and answer together.
        quantization: The quantisation of weights.
        deterministic: Whether equal requests must give equal bits, whatever else is in the batch.
        block_size: Tokens per block of the KV cache.
        tiles: Whether the CPU has matrix tiles (AMX).
        arm: Identifies the order in which an Arm CPU's operators add numbers. "" on other CPUs.
        kv_cache: The data type of the KV cache.
        calibrates: Whether int4 weights are calibrated.
    """

    device: Device
    dtype: Dtype
    max_model_len: int
    quantization: Quantization = "none"
    deterministic: bool = False
    block_size: int | Literal["auto"] = "auto"
    tiles: bool = False
    arm: str = ""
    kv_cache: KvCacheDtype = "auto"
    calibrates: bool = False

    @property
    def text(self) -> str:
        """Return the arithmetic for people, such as `bfloat16 with int8 weights, deterministic`."""
        return arithmetic_text(self.dtype, self.quantization, self.kv_cache, self.deterministic)

    @property
    def version(self) -> int:
        """Return the version of the arithmetic of quantised weights, from 1. It is part of every work key."""
        return VERSIONS.get(self.quantization, {}).get(self.device, 1)

    @property
    def itemsize(self) -> int:
        """Return the number of bytes of an activation, or of a weight that is not quantised."""
        return 4 if self.dtype == "float32" else 2

    def model_cost(self, checkpoint: StoredModel) -> ModelCost:
        """Return the FLOPs and bytes of a model's steps in this arithmetic, without adapters."""
        codes = self.quantization, self.kv_cache
        return checkpoint.cost(self.itemsize, *codes, self.device, self.deterministic)

    def context(
        self,
        checkpoint: StoredModel,
        model_fingerprint: str,
        tokenizer_fingerprint: str,
        columns: int = 0,
        output: str = "tokens",
        version: int | None = None,
    ) -> bytes:
        """Return the SHA-256 of everything that determines answers, except the row.

        It is the first part of every work key. Options at their default are omitted. So answers stay valid when a later
        version adds an option.

        Args:
            checkpoint: The model.
            model_fingerprint: Digest of the weights.
            tokenizer_fingerprint: Digest of the tokenizer.
            columns: Version of the rules that check answers against typed columns. 0 without typed columns.
            output: Name of the kind of answers: "tokens", or a kind of vectors or scores.
            version: Version of the arithmetic of quantised weights. None: the current one.
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
        options["version"] = self.version if version is None else version
        # Earlier versions stored experts in int8 if the rest was int4
        options["int4_experts"] = self.quantization == "int4" and _has_experts(checkpoint)
        parts |= {name: value for name, value in options.items() if value != _ABSENT[name]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    def _options(self) -> dict[str, Any]:
        # Options that can change an answer and have a default. Blocks, operators, matrix tiles and Arm
        # vectors change the order of additions, which matters only if equal bits are promised
        # (`deterministic`).
        options: dict[str, Any] = {
            # MXFP4 values are multiplied exactly, dequantised before or during the product.
            # The zeros of sparse weights change no sum.
            "quantization": "none" if self.quantization in _SAME_VALUES else self.quantization,
            "deterministic": self.deterministic,
            "kv_cache_dtype": self.kv_cache,
            "calibrated": self.calibrates,
            # A CPU quantises activations to int8 for int4 weights, a GPU does not
            "wide_activations": self.device == "cuda" and self.quantization in ("int4", "stored-int4"),
        }
        if self.deterministic:
            options |= {"block_size": self.block_size, "device": self.device}
            # In float32, all sums use vector instructions
            options["tiles"] = self.tiles and self.dtype == "bfloat16"
            options["arm"] = self.arm
            # Earlier versions rounded outlier channels without scaling them down
            options["smoothed"] = self.quantization == "int8"
            # A GPU that dequantises in registers adds in tiles of other sizes
            options["coded_tiles"] = (self.device, self.quantization) == ("cuda", "stored-mxfp4")
            # Earlier versions widened the cached values to bfloat16 on a CPU; now integers are multiplied
            options["integer_codes"] = (self.device, self.kv_cache, self.dtype) == ("cpu", "int8", "bfloat16")
        return options


def _has_experts(checkpoint: StoredModel) -> bool:
    return isinstance(checkpoint, Checkpoint) and any(each.experts for each in checkpoint.spec.linears())
