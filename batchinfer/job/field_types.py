"""Types of job-file values other than plain numbers: paths, sizes, `auto`."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic import ValidationInfo as Info

from batchinfer.core.exact_json import RepeatedName, read_exactly, write_exactly
from batchinfer.core.hub import NoModel, locate_adapter, locate_model
from batchinfer.core.plain_json import NotPlain, plain_json
from batchinfer.core.sampling import (
    BOUNDS,
    DERIVED,
    INT32_MAX,
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    OTHER_NAMES,
    SamplingParams,
)
from batchinfer.core.tool_calls import CALL_STYLES, CallStyleName
from batchinfer.core.tools import TOOL_NAME, BadTools, check_tools
from batchinfer.core.values.token_biases import RIGHT as RIGHT_BIASES
from batchinfer.core.values.token_biases import token_biases
from batchinfer.job.deadline import TIME_FORMATS, next_moment
from batchinfer.job.file import absolute
from batchinfer.job.schema_file import no_schema
from batchinfer.job.wording import ValidValues, describe_value
from batchinfer.job.yaml_tree import shorten

MAX_BYTES = 2**50
MIN_SQL_BYTES = 2**26  # with less, DuckDB cannot run real queries
MIN_KV_BYTES = 2**20  # smaller than a block of any real model; probably a number without a unit

# Common encodings that Python's incremental decoders support, by their names in Python
_PAGES = (
    "437",
    "850",
    "852",
    "855",
    "857",
    "862",
    "866",
    "874",
    "932",
    "949",
    "950",
    *map(str, range(1250, 1259)),
)
ENCODINGS = frozenset({
    "utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "big5", "gbk", "gb2312", "gb18030", "shift_jis", "euc_jp",
    "euc_kr", "koi8-r", "koi8-u", "mac-roman", "hp-roman8", "tis-620",
    *(f"iso8859-{part}" for part in range(1, 17) if part != 12), *(f"cp{page}" for page in _PAGES),
})  # fmt: skip
ENCODING_NAMES = (
    "utf-8", "utf-16", "latin-1", "cp1252", "shift_jis", "gb18030", "euc-kr", "koi8-r", "windows-1252", "iso-8859-15",
    "big5", "euc-jp", "mac-roman", "ascii", *(f"iso-8859-{part}" for part in range(1, 17) if part != 12),
    *(f"cp{page}" for page in _PAGES),
)  # fmt: skip

SAMPLING_PARAMETERS = tuple(field.name for field in fields(SamplingParams) if field.name not in DERIVED)
_ROW_PARAMETERS = (*SAMPLING_PARAMETERS, "n")  # parameters that a row may set

MAX_ARGUMENT = 1 << 20  # characters; the maximum size of a job file
_RIGHT_ARGUMENTS = "it must be a mapping from arguments to values, as in {enable_thinking: false}"
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _ray_address(value: object) -> object:
    # Addresses of Ray's client (ray://) are rejected: nodes have no IDs there. pydantic rejects ().
    if not isinstance(value, str) or value == "auto":
        return value
    host, colon, port = value.rpartition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", host) or not re.fullmatch(r"[0-9]{1,5}", port):
        return ()  # fits no type, so the field's own message is used
    return value if 1 <= int(port) <= 65535 else ()


def _label_pairs(value: object) -> object:
    if not isinstance(value, dict):
        return value
    for name, wanted in value.items():
        if not isinstance(wanted, str) or not wanted:
            raise ValueError(f"found {describe_value(wanted)} for {name}; it must be the text of a label")
    return tuple(value.items())


def _folder(info: Info) -> Path:
    return info.context["folder"] if info.context else Path.cwd()


def _anchored(text: str, info: Info) -> str:
    # Paths are relative to the folder of the job file
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"found the address {shorten(text)}; buckets and URLs are not supported: a path must be on one of this "
            "machine's disks, local or mounted; copy inputs there first, and results from there afterwards"
        )
    if text.startswith("~"):
        raise ValueError("found a path that begins with ~, which only a shell knows; write ${HOME} instead")
    return absolute(_folder(info), text)


def _to_path(value: object, info: Info) -> object:
    return Path(_anchored(value, info)) if isinstance(value, str) and value else value


def _to_model(value: object, info: Info) -> object:
    # `check` reports a missing model
    if not isinstance(value, str) or not value:
        return value
    path = Path(_anchored(value, info))
    try:
        return locate_model(value, path)
    except NoModel:
        return path


def _to_adapter(value: object, info: Info) -> object:
    return locate_adapter(value, Path(_anchored(value, info))) if isinstance(value, str) and value else value


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
        raise ValueError(f"found the text {shorten(text)}; it must be a size such as 512MiB or 4GiB")
    return size


def _memory(value: object) -> object:
    # "auto", bytes (int) or a share of the memory (float); pydantic rejects ()
    if isinstance(value, str):
        value = value if value == "auto" else _bytes(value)
    if value == "auto" or (isinstance(value, int) and MIN_KV_BYTES <= value <= MAX_BYTES):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        return ()
    return float(value)


def _min_rows(value: object) -> object:
    # A number of rows (int) or a share of rows (float); pydantic rejects ()
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 1 <= value <= INT32_MAX else ()
    return value if isinstance(value, float) and 0 < value < 1 else ()


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _size(value: object) -> object:
    return _bytes(value) if isinstance(value, str) else value


def _pairs(value: object) -> object:
    return _checked_pairs(value, _check_parameter)


def _argument_pairs(value: object) -> object:
    return _checked_pairs(value, _check_argument)


def _checked_pairs(value: object, check: Callable[[object], None]) -> object:
    given: list[tuple[Any, Any]]
    if isinstance(value, dict):
        given = list(value.items())
    elif isinstance(value, tuple | list):
        given = [(one[0], one[1]) if _is_pair(one) else (one, one) for one in value]
    else:
        return value
    for at, (name, column) in enumerate(given):
        check(name)
        if not isinstance(column, str) or not column:
            raise ValueError(
                f"found {describe_value(column)} for {name}; it must be the name of a column of the input"
            )
        if name in [earlier for earlier, _ in given[:at]]:
            raise ValueError(f"names {name} twice; give one column for each parameter")
    return tuple((name, column) for name, column in given)


def _marks(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if value.keys() != {"begin", "end"}:
        given = ", ".join(map(str, value)) or "no keys"
        raise ValueError(f"found a mapping with {given}; it must have the two keys begin and end")
    return value["begin"], value["end"]


def _distinct_marks(value: Any) -> Any:
    if not isinstance(value, str) and value[0] == value[1]:
        raise ValueError(f"found {describe_value(value[0])} as begin and as end; give two different texts")
    return value


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _check_parameter(name: object) -> None:
    if name not in _ROW_PARAMETERS:
        known = OTHER_NAMES.get(str(name))
        near = [known] if known else difflib.get_close_matches(str(name), _ROW_PARAMETERS, 1)
        better = f"did you mean {near[0]}?" if near else f"there are {', '.join(_ROW_PARAMETERS)}"
        raise ValueError(f"{describe_value(name)} is not a sampling parameter; {better}")


def _check_argument(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"found {describe_value(name)}; it must be the name of an argument, such as enable_thinking"
        )


def _from_json_text(value: object, right: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return read_exactly(value)
    except (ValueError, RecursionError):
        raise ValueError(f"found {describe_value(value)}; {right}") from None


def _arguments_text(value: object) -> object:
    # Arguments that are null are omitted
    value = _from_json_text(value, _RIGHT_ARGUMENTS)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"found {describe_value(value)}; {_RIGHT_ARGUMENTS}")
    given = {name: one for name, one in value.items() if one is not None}
    for name, one in given.items():
        _check_argument(name)
        try:
            plain_json(one, MAX_ARGUMENT)
        except NotPlain as error:
            raise ValueError(f"{name} {error}") from None
    return write_exactly(given) if given else None


def _tools_text(value: object) -> object:
    value = _from_json_text(value, "it must be a list of tools")
    if value is None:
        return None
    try:
        tools = check_tools(value, MAX_ARGUMENT)
    except (BadTools, NotPlain) as error:
        raise ValueError(f"{error}") from None
    return write_exactly(tools) if tools else None


def _sql_memory(value: object) -> object:
    # "auto" or a size in bytes; pydantic rejects ()
    size = value if value == "auto" else _size(value)
    number = isinstance(size, int) and not isinstance(size, bool) and MIN_SQL_BYTES <= size <= MAX_BYTES
    return size if size == "auto" or number else ()


def _encoding(value: object) -> object:
    # Python has one name per encoding: latin-1 becomes iso8859-1
    if not isinstance(value, str) or not value:
        return value
    try:
        name = codecs.lookup(value).name
    except (LookupError, ValueError):
        name = ""
    if name not in ENCODINGS:
        near = difflib.get_close_matches(value.lower(), ENCODING_NAMES, 1)
        hint = (
            f"did you mean {near[0]}?" if near else f"known are, for example, {', '.join(ENCODING_NAMES[:8])}"
        )
        raise ValueError(f"found {describe_value(value)}, which is no encoding that can be read; {hint}")
    return name


def _delimiter(value: object) -> object:
    return _character(
        {"tab": "\t", "auto": "auto"}.get(value, value) if isinstance(value, str) else value, "auto"
    )


def _quote(value: object) -> object:
    return _character(value, "none")


def _character(value: object, word: str) -> object:
    # A single ASCII character or the text `word`; pydantic rejects ()
    if not isinstance(value, str) or value == word:
        return value
    return value if len(value) == 1 and value.isascii() and value not in "\0\r\n" else ()


def _schema_text(value: object) -> object:
    if value is None:
        return value
    if isinstance(value, str):
        try:
            value = read_exactly(value)
        except RepeatedName as error:
            raise ValueError(f"the schema {error}") from None
        except (ValueError, RecursionError):
            raise ValueError(
                f"found {describe_value(value)}, which is not JSON; write the schema as a mapping, "
                "or name its file in output.schema_file"
            ) from None
    if (problem := no_schema(value)) is not None:
        raise ValueError(problem)
    return write_exactly(value)


def _biases(value: object) -> object:
    return value if value is None else token_biases(value)


def _no_removed_source(value: object) -> object:
    if isinstance(value, list | tuple) and "lookahead" in value:
        raise ValueError("lookahead was removed; use prompt, answers or earlier")
    return value


def _deadline(text: str) -> str:
    try:
        next_moment(text, datetime.now().astimezone())
    except (ValueError, OverflowError):
        raise ValueError(f"found the text {shorten(text)}; it must be {TIME_FORMATS}") from None
    return text


def bounded(name: str) -> Any:
    """Return a pydantic annotation for the type of a sampling parameter's field, with the parameter's valid range.

    Args:
        name: The name of the parameter.
    """
    bounds = BOUNDS[name]
    return Field(gt=bounds.low, le=bounds.high) if bounds.above else Field(ge=bounds.low, le=bounds.high)


Text = Annotated[str, Field(min_length=1)]
Column = Annotated[Text, ValidValues("the name of a column of the input")]
PathField = Annotated[
    Path,
    BeforeValidator(_to_path, json_schema_input_type=Text),
    ValidValues("a path, relative to the job file's folder"),
]
ModelPath = Annotated[
    Path,
    BeforeValidator(_to_model, json_schema_input_type=Text),
    ValidValues("a path, relative to the job file's folder, or a model's name, as in org/name"),
]
AdapterPath = Annotated[
    Path,
    BeforeValidator(_to_adapter, json_schema_input_type=Text),
    ValidValues("a path, relative to the job file's folder, or an adapter's name, as in org/name"),
]
Whole = Annotated[int, Field(ge=1, le=INT32_MAX)]
Auto = Literal["auto"]
# Draft sources that a job may name. A draft model or heads have a section instead.
JobDraftSource = Literal["prompt", "answers", "earlier"]
AUTO_DRAFTS: tuple[JobDraftSource, ...] = get_args(JobDraftSource)
JobDraftSources = Annotated[
    tuple[JobDraftSource, ...], Field(min_length=1), BeforeValidator(_no_removed_source)
]
DRAFTS = ValidValues(
    f"auto, off, a list of any of {', '.join(get_args(JobDraftSource))}, or a section with the key model or heads"
)
Name = Annotated[
    str,
    Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$"),
    ValidValues("a name of 1 to 200 characters, in one line"),
]
DeadlineText = Annotated[
    Text,
    AfterValidator(_deadline),
    ValidValues(TIME_FORMATS),
]
OneOrMorePaths = Annotated[
    Text | Annotated[tuple[Text, ...], Field(min_length=1)],
    AfterValidator(_anchor_all),
    ValidValues("a path, a glob, or a list of them"),
]
MaxLength = Annotated[
    int | None,
    Field(ge=1, le=INT32_MAX),
    BeforeValidator(_auto_to_none, json_schema_input_type=Auto | Whole | None),
    ValidValues("a whole number from 1 to 2,147,483,647, or auto"),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    tuple[StopText, ...],
    Field(max_length=MAX_STOPS),
    BeforeValidator(
        _listed,
        json_schema_input_type=StopText | Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS)],
    ),
    ValidValues(f"a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters, or one such text"),
]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_biases, json_schema_input_type=dict[Annotated[str, Field(pattern="^[0-9]+$")], float]),
    ValidValues(RIGHT_BIASES),
]
Words = Annotated[
    tuple[StopText, ...],
    Field(max_length=MAX_BAD_WORDS),
    BeforeValidator(
        _listed,
        json_schema_input_type=StopText | Annotated[tuple[StopText, ...], Field(max_length=MAX_BAD_WORDS)],
    ),
    ValidValues(
        f"a list of at most {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_CHARS} characters, or one such text"
    ),
]
Choice = Annotated[
    tuple[Text, ...],
    ValidValues("a list of texts, none of them empty"),
]
JsonSchema = Annotated[
    str,
    BeforeValidator(_schema_text, json_schema_input_type=dict[str, Any]),
    ValidValues("a JSON Schema: a mapping such as {type: object, properties: {…}}"),
]
KvMemory = Annotated[
    Auto | int | float,
    BeforeValidator(_memory, json_schema_input_type=Text | Annotated[float, Field(gt=0)]),
    ValidValues("auto, a size from 1MiB such as 4GiB, or a share of the memory above 0 and up to 1"),
]
SqlMemory = Annotated[
    Auto | int,
    BeforeValidator(_sql_memory, json_schema_input_type=Text | Annotated[int, Field(ge=MIN_SQL_BYTES)]),
    ValidValues("auto, or a size from 64MiB such as 4GiB"),
]
Bytes = Annotated[
    int,
    Field(ge=1, le=MAX_BYTES),
    BeforeValidator(_size, json_schema_input_type=Text | Annotated[int, Field(ge=1, le=MAX_BYTES)]),
    ValidValues("a size such as 16MiB"),
]
RayAddress = Annotated[
    Text,
    BeforeValidator(_ray_address),
    ValidValues("auto, or HOST:PORT of the cluster's head, such as 10.0.0.1:6379"),
]
Labels = Annotated[
    tuple[tuple[str, str], ...],
    BeforeValidator(_label_pairs, json_schema_input_type=dict[str, Text]),
    ValidValues("a mapping from labels of nodes to their values, as in {ray.io/accelerator-type: H100}"),
]
Engines = Annotated[int, Field(ge=1, le=256)]
MinRows = Annotated[
    int | float,
    BeforeValidator(
        _min_rows,
        json_schema_input_type=Annotated[int, Field(ge=1, le=INT32_MAX)]
        | Annotated[float, Field(gt=0, lt=1)],
    ),
    ValidValues("a number of rows from 1, such as 1000, or a share above 0 and below 1, such as 0.9"),
]
Encoding = Annotated[
    Text,
    BeforeValidator(_encoding),
    ValidValues("the name of an encoding, such as utf-8, latin-1 or cp1252"),
]
Delimiter = Annotated[
    Text,
    BeforeValidator(_delimiter),
    ValidValues("auto, tab, or one ASCII character that ends no line, such as ; or |"),
]
Quote = Annotated[
    Text,
    BeforeValidator(_quote),
    ValidValues("none, or one ASCII character that ends no line, such as \" or '"),
]
ReasoningMarks = Annotated[
    Literal["auto", "none"] | tuple[Text, Text],
    AfterValidator(_distinct_marks),
    BeforeValidator(
        _marks, json_schema_input_type=Literal["auto", "none"] | dict[Literal["begin", "end"], Text]
    ),
    ValidValues("auto, none, or the texts around the reasoning, as in {begin: <think>, end: </think>}"),
]
ToolCalls = Annotated[
    Literal["auto", "none"] | CallStyleName,
    ValidValues(f"auto, none, or one of {', '.join(CALL_STYLES)}"),
]
ToolChoice = Annotated[
    str, ValidValues("auto, required, or the name of a tool"), Field(pattern=f"^{TOOL_NAME}$")
]
_NAMES = {"enum": list(_ROW_PARAMETERS)}
_Parameters = tuple[Annotated[str, Field(json_schema_extra={**_NAMES})], ...]
_Columns = Annotated[dict[str, Text], Field(json_schema_extra={"propertyNames": {**_NAMES}})]
TemplateArguments = Annotated[
    str | None,
    BeforeValidator(_arguments_text, json_schema_input_type=dict[str, Any] | None),
    ValidValues("a mapping from arguments of the chat template to values, as in {enable_thinking: false}"),
]
Tools = Annotated[
    str | None,
    BeforeValidator(_tools_text, json_schema_input_type=list[dict[str, Any]] | None),
    ValidValues("a list of function tools, as in [{type: function, function: {name: …, parameters: {…}}}]"),
]
ArgumentColumns = Annotated[
    tuple[tuple[str, str], ...],
    BeforeValidator(_argument_pairs, json_schema_input_type=tuple[Text, ...] | dict[str, Text]),
    ValidValues(
        "a list of arguments whose columns have the same names, as in [enable_thinking], "
        "or a mapping from arguments to columns, as in {enable_thinking: think_col}"
    ),
]
FromColumns = Annotated[
    tuple[tuple[str, str], ...],
    BeforeValidator(_pairs, json_schema_input_type=_Parameters | _Columns),
    ValidValues(
        "a list of sampling parameters whose columns have the same names, as in [max_tokens], "
        "or a mapping from parameters to columns, as in {temperature: temp_col}"
    ),
]
