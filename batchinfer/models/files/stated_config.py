"""Reads config.json of a checkpoint, with what old quantised checkpoints state in a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchinfer.models.files.config_fields import load_if_there, load_json_object

CONFIG = "config.json"
QUANTIZATION = "quantization_config"
STATED_IN = "stated_in"  # the file that a quantization_config is from, if it is not config.json


def stated_config(folder: Path) -> dict[str, Any]:
    """Return the values of config.json. A `quantization_config` that it lacks is read from the file in which AutoGPTQ
    or AutoAWQ kept it before 2024. Raises JobFileError, and SecurityRefusal for what is no regular file."""
    raw = load_json_object(folder / CONFIG)
    if QUANTIZATION in raw:
        return raw
    for name, converted in OLD_FILES.items():
        found = load_if_there(folder / name)
        if found:
            return {**raw, QUANTIZATION: {**converted(found), STATED_IN: name}}
    return raw


def _of_autogptq(found: Mapping[str, Any]) -> dict[str, Any]:
    """AutoGPTQ's keys are those of today. It wrote a layout for Marlin as an attribute of its own."""
    marlin = {"checkpoint_format": "marlin"} if found.get("is_marlin_format") else {}
    return {"quant_method": "gptq", **found, **marlin}


def _of_autoawq(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "awq", **found}


OLD_FILES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "quantize_config.json": _of_autogptq,
    "quant_config.json": _of_autoawq,
}
