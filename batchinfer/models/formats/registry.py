"""The quantisation formats by their `quant_method` in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchinfer.models.files.config_fields import QUANTIZATION, STATED_IN, shown
from batchinfer.models.formats import compressed, torchao
from batchinfer.models.formats.awq import awq_format
from batchinfer.models.formats.bitsandbytes import bitsandbytes_format
from batchinfer.models.formats.compressed import compressed_format
from batchinfer.models.formats.encoded_tensor import EncodedTensors, Stored, StoredFormat
from batchinfer.models.formats.fp8 import fp8_format
from batchinfer.models.formats.gptq import gptq_format
from batchinfer.models.formats.mxfp4 import mxfp4_format
from batchinfer.models.formats.nvfp4 import modelopt_format
from batchinfer.models.formats.torchao import torchao_format

_COMPRESSION = "compression_config"
# (quantization_config of config.json, list that receives messages) → the format, or None if it is unsupported
Parse = Callable[[Mapping[str, Any], list[str]], StoredFormat | None]
FORMATS: Mapping[str, Parse] = {
    "mxfp4": mxfp4_format,
    "fp8": fp8_format,
    "fbgemm_fp8": fp8_format,
    "modelopt": modelopt_format,
    compressed.NAME: compressed_format,
    "gptq": gptq_format,
    "awq": awq_format,
    "bitsandbytes": bitsandbytes_format,
    torchao.NAME: torchao_format,
}


def stored_format(raw: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Return the quantisation format that config.json names.

    Args:
        raw: The contents of config.json.
        mistakes: Receives error messages if the format is unsupported or invalid.

    Returns:
        The format; None if weights are floats, or if a message was added.
    """
    stated = raw.get(QUANTIZATION) or _of_compression(raw.get(_COMPRESSION))
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        mistakes.append(f"config.json: {QUANTIZATION} is {shown(stated)}; wanted an object")
        return None
    where = stated.get(STATED_IN) or f"config.json: {QUANTIZATION}"
    method = stated.get("quant_method")
    parse = FORMATS.get(method) if isinstance(method, str) else None
    if parse is None:
        mistakes.append(
            f"{where}: weights quantized by quant_method {shown(method)} are not supported; float weights "
            f"and {', '.join(FORMATS)} are, with model.quantization: int8 where memory is short"
        )
        return None
    wrong: list[str] = []
    found = parse(stated, wrong)
    mistakes += [f"{where}: {text}" for text in wrong]
    return found


def _of_compression(found: object) -> object:
    # compressed-tensors before 2024 omits the quant_method
    return (
        {"quant_method": compressed.NAME, STATED_IN: _COMPRESSION, **found}
        if isinstance(found, Mapping)
        else found
    )


def find_encoded_tensors(stored: StoredFormat | None, tensors: Stored) -> EncodedTensors:
    """Return the weights among a checkpoint's tensors that are stored in a quantised or sparse format.

    Args:
        stored: The format. None: all weights are floats, and the result is empty.
        tensors: The stored tensors by name.
    """
    return EncodedTensors() if stored is None else stored.find(tensors)
