"""The base class of all sections of a job file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from batchinfer.job.yaml_tree import shorten


class Section(BaseModel):
    """Base class of the sections of a job file: immutable, without unknown keys or silent conversions of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def option_lines(self, defaults: bool) -> Iterator[str]:
        """Yield a line `key: value` for each option of the section.

        Args:
            defaults: If False, options with their default value are left out.
        """
        for key, value in self:
            info = type(self).model_fields[key]
            if defaults or value != info.get_default():
                yield f"    {info.alias or key}: {option_text(key, value)}"


def option_text(key: str, value: object) -> str:
    """Return the value of the option `key` as text for users."""
    if value is None:
        return "auto" if key == "max_model_len" else "none"
    if key in ("json_schema", "template_arguments", "tools") and isinstance(value, str):
        return shorten(value)
    if key in ("kv_memory", "sql_memory", "max_line_bytes") and isinstance(value, int):
        return f"{value:,} bytes"
    if isinstance(value, Path):
        return str(value)
    if key == "adapters" and isinstance(value, dict):
        return ", ".join(f"{name}: {path}" for name, path in value.items()) or "none"
    if key.endswith("from_columns") and isinstance(value, tuple):
        return json.dumps(dict(value), ensure_ascii=False) if value else "none"
    if isinstance(value, str) and re.fullmatch(r"[\w./:*-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False)
