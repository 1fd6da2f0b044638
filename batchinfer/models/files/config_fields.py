"""Reads typed values from a checkpoint's JSON files, and collects mistakes instead of stopping at the first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from batchinfer.core.errors import JobFileError, Mistake, SecurityRefusal

_T = TypeVar("_T")
MAX_JSON_BYTES = 64 * 2**20  # index files of the largest public checkpoints have about 10 MB
WHERE = "model.path"
SHOWN = 80  # characters of a wrong value that a message quotes
CONFIG = "config.json"
QUANTIZATION = "quantization_config"
STATED_IN = "stated_in"  # added to a quantization_config: its file, if that is not config.json


def shown(value: object) -> str:
    """Return the repr of a value for an error message. It is truncated to SHOWN characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def checkpoint_error(path: Path, *messages: str, hint: str | None = None) -> JobFileError:
    """Return the error for a checkpoint that cannot be run. Its messages refer to the key model.path of the job file.

    Args:
        path: The file or folder that is invalid.
        messages: The errors.
        hint: Advice for the user, added to each message.
    """
    return JobFileError(str(path), [Mistake(WHERE, message, hint=hint) for message in messages])


def load_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        JobFileError: The file is too large, is not JSON, or is not an object.
    """
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
    """Return the JSON object in a file; {} if the file does not exist.

    Raises:
        JobFileError: The file is too large, is not JSON, or is not an object.
        SecurityRefusal: The path is not a regular file.
    """
    if not path.exists():
        return {}
    if not path.is_file():
        raise SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")
    return load_json_object(path)


class Fields:
    """Reads typed values from a JSON object, and appends an error message to `mistakes` for each invalid value.

    Instead of an invalid value, the default or the smallest valid value is returned. Therefore, callers must check
    `mistakes` before they use any value.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        name: str,
        mistakes: list[str],
        theirs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Wrap a JSON object.

        Args:
            raw: The JSON object.
            name: The name of the file, for messages.
            mistakes: Receives an error message for each invalid value.
            theirs: The names of keys in the file, for messages, by the names under which callers read them. Keys that
                are missing here have the same name in both.
        """
        self.raw = raw
        self.name = name
        self.mistakes = mistakes
        self._theirs = theirs

    def rename_keys(self, theirs: Mapping[str, str]) -> Fields:
        """Return a reader of the same JSON object in which some keys have other names.

        Args:
            theirs: The names of keys in the file, by the names under which callers will read them.
        """
        usual = {key: self.raw[own] for key, own in theirs.items() if own in self.raw}
        return Fields({**self.raw, **usual}, self.name, self.mistakes, theirs)

    def _wrong(self, key: str, wanted: str) -> None:
        found = f"is {shown(self.raw[key])}" if key in self.raw else "is missing"
        self.mistakes.append(f"{self.name}: {self._theirs.get(key, key)} {found}; wanted {wanted}")

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 2**24) -> int:
        """Return the integer at a key of the JSON object, in [low, high]. Other values are errors.

        Args:
            key: The key.
            default: The result if the key is missing or null. None: this is an error.
            low: The smallest valid value.
            high: The largest valid value.
        """
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self._wrong(key, f"an integer from {low} to {high}")
        return default if default is not None else low

    def optional_integer(self, key: str, low: int = 1, high: int = 2**31 - 1) -> int | None:
        """Return the integer at a key of the JSON object, in [low, high]; None if it is missing or null."""
        return None if self.raw.get(key) is None else self.integer(key, low=low, high=high)

    def number(self, key: str, default: float | None = None, above: float = 0.0, high: float = 1e30) -> float:
        """Return the number at a key of the JSON object, in (above, high]. Other values are errors.

        Args:
            key: The key.
            default: The result if the key is missing or null. None: this is an error.
            above: The exclusive lower bound.
            high: The largest valid value.
        """
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and above < value <= high:
            return float(value)
        self._wrong(key, f"a number above {above:g} and up to {high:g}")
        return default if default is not None else math.nextafter(above, math.inf)

    def optional_number(self, key: str, high: float = 1e30) -> float | None:
        """Return the number at a key of the JSON object, in [0, high]; None if it is missing or null."""
        if self.raw.get(key) is None:
            return None
        return self.number(key, above=math.nextafter(0.0, -1.0), high=high)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return the numbers in the list at a key of the JSON object, all of them finite and above 0."""
        value = self.raw.get(key)
        if isinstance(value, list) and all(type(v) in (int, float) and 0 < v < 1e30 for v in value):
            return tuple(map(float, value))
        self._wrong(key, "a list of numbers above 0")
        return ()

    def boolean(self, key: str, default: bool) -> bool:
        """Return the boolean at a key of the JSON object; `default` if it is missing or null."""
        return self._of_type(key, bool, "true or false", default)

    def text(self, key: str, default: str) -> str:
        """Return the string at a key of the JSON object; `default` if it is missing or null."""
        return self._of_type(key, str, "a string", default)

    def _of_type(self, key: str, kind: type[_T], wanted: str, default: _T) -> _T:
        value = self.raw.get(key)
        if isinstance(value, kind):
            return value
        if value is not None:
            self._wrong(key, wanted)
        return default

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """Return the token ids at a key of the JSON object, an integer or a list; None if it is missing or null."""
        value = self.raw.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            self._wrong(key, "a token id or a list of token ids")
            return ()
        return tuple(ids)


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder.

    If it has no `quantization_config`, one is added from the file in which AutoGPTQ or AutoAWQ stored it before 2024.

    Raises:
        JobFileError: A file is too large, is not JSON, or is not an object.
        SecurityRefusal: A file is not a regular file.
    """
    raw = load_json_object(folder / CONFIG)
    if QUANTIZATION in raw:
        return raw
    for name, converted in OLD_FILES.items():
        found = load_if_there(folder / name)
        if found:
            return {**raw, QUANTIZATION: {**converted(found), STATED_IN: name}}
    return raw


def _of_autogptq(found: Mapping[str, Any]) -> dict[str, Any]:
    marlin = {"checkpoint_format": "marlin"} if found.get("is_marlin_format") else {}
    return {"quant_method": "gptq", **found, **marlin}


def _of_autoawq(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "awq", **found}


OLD_FILES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "quantize_config.json": _of_autogptq,
    "quant_config.json": _of_autoawq,
}
