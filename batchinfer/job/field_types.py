"""The kinds of values that a job file holds beyond plain numbers: paths, sizes, `auto`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import ValidationInfo as Info

from batchinfer.job.file import absolute
from batchinfer.job.wording import Right
from batchinfer.job.yaml_tree import shorten

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
MAX_BYTES = 2**50
MIN_KV_BYTES = 2**20  # less holds no block of any real model: a number without its unit

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _folder(info: Info) -> Path:
    return info.context["folder"] if info.context else Path.cwd()


def _anchored(text: str, info: Info) -> str:
    """A path as written → absolute; refuses what would silently mean another place."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"found the address {shorten(text)}; only files on this machine's disks are read and written"
        )
    if text.startswith("~"):
        raise ValueError("found a path that begins with ~, which only a shell knows; write ${HOME} instead")
    return absolute(_folder(info), text)


def _to_path(value: object, info: Info) -> object:
    return Path(_anchored(value, info)) if isinstance(value, str) and value else value


def _anchor_all(value: str | tuple[str, ...], info: Info) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return _anchored(value, info)
    return tuple(_anchored(text, info) for text in value)


def _auto_to_none(value: object) -> object:
    return None if value == "auto" else value


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ValueError(f"found the text {shorten(text)}; right would be a size such as 512MiB or 4GiB")
    return size


def _memory(value: object) -> object:
    """auto, a size (→ bytes, int) or a share (→ float). () fits no type, so that the field's own words answer."""
    if isinstance(value, str):
        value = value if value == "auto" else _bytes(value)
    if value == "auto" or (isinstance(value, int) and MIN_KV_BYTES <= value <= MAX_BYTES):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        return ()
    return float(value)


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _size(value: object) -> object:
    return _bytes(value) if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]
Column = Annotated[Text, Right("the name of a column of the input")]
PathField = Annotated[
    Path,
    BeforeValidator(_to_path, json_schema_input_type=Text),
    Right("a path, relative to the job file's folder"),
]
Whole = Annotated[int, Field(ge=1, le=INT32_MAX)]
Auto = Literal["auto"]
Name = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$"),
    Right("a name of 1 to 200 characters, in one line"),
]
OneOrMorePaths = Annotated[
    Text | Annotated[tuple[Text, ...], Field(min_length=1)],
    AfterValidator(_anchor_all),
    Right("a path, a glob, or a list of them"),
]
MaxLength = Annotated[
    int | None,
    Field(ge=1, le=INT32_MAX),
    BeforeValidator(_auto_to_none, json_schema_input_type=Auto | Whole | None),
    Right("a whole number from 1 to 2,147,483,647, or auto"),
]
StopText = Annotated[str, Field(min_length=1, max_length=512)]
# The limits on stops are those of a row's own `stop` (data/sampling_fields.py).
Stops = Annotated[
    tuple[StopText, ...],
    Field(max_length=16),
    BeforeValidator(
        _listed, json_schema_input_type=StopText | Annotated[tuple[StopText, ...], Field(max_length=16)]
    ),
    Right("a list of at most 16 texts of 1 to 512 characters, or one such text"),
]
KvMemory = Annotated[
    Auto | int | float,
    BeforeValidator(_memory, json_schema_input_type=Text | Annotated[float, Field(gt=0)]),
    Right("auto, a size from 1MiB such as 4GiB, or a share of the memory above 0 and up to 1"),
]
Bytes = Annotated[
    int,
    Field(ge=1, le=MAX_BYTES),
    BeforeValidator(_size, json_schema_input_type=Text | Annotated[int, Field(ge=1, le=MAX_BYTES)]),
    Right("a size such as 16MiB"),
]
