"""Typed reading of a checkpoint's JSON: every wrong value is noted, none is fatal by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from batchinfer.core.errors import JobFileError, Mistake, SecurityRefusal

MAX_JSON_BYTES = 64 * 2**20  # index files of the largest public checkpoints have some 10 MB
WHERE = "model.path"
SHOWN = 80  # characters of a wrong value that a message quotes
CONFIG = "config.json"
QUANTIZATION = "quantization_config"
STATED_IN = "stated_in"  # the file that a quantization_config is from, if it is not config.json


def shown(value: object) -> str:
    """A value as a message quotes it: JSON-like and short."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def checkpoint_error(path: Path, *messages: str, hint: str | None = None) -> JobFileError:
    """The error of a checkpoint that cannot be run: the job named the wrong one."""
    return JobFileError(str(path), [Mistake(WHERE, message, hint=hint) for message in messages])


def load_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises JobFileError when it is too big, not JSON, or not an object."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise checkpoint_error(path, f"{path.name} has {size} bytes; at most {MAX_JSON_BYTES} are read")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise checkpoint_error(path, f"{path.name} is not valid JSON: {shown(str(error))}") from error
    if not isinstance(raw, dict):
        raise checkpoint_error(path, f"{path.name} holds {shown(raw)}; a JSON object is needed")
    return raw


def load_if_there(path: Path) -> dict[str, Any]:
    """`load_json_object` of a file that a checkpoint may lack: an empty object then. Raises JobFileError, and
    SecurityRefusal for what is no regular file."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")
    return load_json_object(path)


class Fields:
    """Reads typed values out of one JSON object and notes what is wrong in `mistakes`.

    A wrong value is answered with the default (or the lower bound), so that reading goes on and all mistakes
    are found; whoever reads checks `mistakes` before using anything.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        name: str,
        mistakes: list[str],
        theirs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`theirs`: what the file calls a key that is asked for by another name."""
        self.raw = raw
        self.name = name
        self.mistakes = mistakes
        self._theirs = theirs

    def renamed(self, theirs: Mapping[str, str]) -> Fields:
        """The same object, whose keys are asked for by usual names: usual → the file's own. Messages name its own."""
        usual = {key: self.raw[own] for key, own in theirs.items() if own in self.raw}
        return Fields({**self.raw, **usual}, self.name, self.mistakes, theirs)

    def _wrong(self, key: str, wanted: str) -> None:
        found = f"is {shown(self.raw[key])}" if key in self.raw else "is missing"
        self.mistakes.append(f"{self.name}: {self._theirs.get(key, key)} {found}; wanted {wanted}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**24) -> int:
        """An integer in low … high; without a default it must be there. null counts as absent."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self._wrong(key, f"an integer from {low} to {high}")
        return default if default is not None else low

    def optional_integer(self, key: str, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """As `integer`, None when absent or null."""
        return None if self.raw.get(key) is None else self.integer(key, low=low, high=high)

    def number(self, key: str, default: float | None = None, above: float = 0.0, high: float = 1e30) -> float:
        """A finite number in (above, high]; without a default it must be there. null counts as absent."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and above < value <= high:
            return float(value)
        self._wrong(key, f"a number above {above:g} and up to {high:g}")
        return default if default is not None else math.nextafter(above, math.inf)

    def optional_number(self, key: str, high: float = 1e30) -> float | None:
        """A finite number in [0, high]; None when absent or null."""
        if self.raw.get(key) is None:
            return None
        return self.number(key, above=math.nextafter(0.0, -1.0), high=high)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self.raw.get(key)
        if isinstance(value, list) and all(type(v) in (int, float) and 0 < v < 1e30 for v in value):
            return tuple(map(float, value))
        self._wrong(key, "a list of numbers above 0")
        return ()

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; null counts as absent."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(key, "true or false")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        """A string; null counts as absent."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong(key, "a string")
            return default
        return value

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """One token id or a list of them; None when absent or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            self._wrong(key, "a token id or a list of token ids")
            return ()
        return tuple(ids)


def read_config_json(folder: Path) -> dict[str, Any]:
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
