"""The index of a job: all rows with their work keys. It is complete once index.json exists.

index/part-*.parquet        one row per answer of each input row, in input order
tokens/tokens.bin           the prompts
passthrough/part-*.parquet  the columns of output.columns, for the same rows as the index
content-free/part-*.parquet the prompt without content that calibrates labels; it is not part of the result
index.json                  the marker, written last
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps, write_json
from batchinfer.input.input_file import InputFile
from batchinfer.input.prompts.arguments.unread import unread_text
from batchinfer.store.index.requested import PARTS, AnswerSchema, RequestedOutputs
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.index.token_store import TokenStore

INDEX_FORMAT = 3
UNREAD_CALLS = (
    "rows have tools, and the chat template does not show how the model writes calls: they stay in generated_text; "
    "name the style in prompt.tool_calls, or set it to none"
)
MARKER = "index.json"
ENDPOINT = pa.field("endpoint", pa.string())  # only in an index of OpenAI requests
# Whether the prompt opens the reasoning: NO_MARKER, OPEN or CLOSED. Only with a checkpoint that marks its reasoning
OPENING = pa.field("reasoning_opening", pa.int8())
# The tools of a row, as JSON written by `known_tools`. Only in an index of a job whose rows may call tools
TOOLS = pa.field("tools", pa.string())
# The labels of a row that names its own, as a JSON list
LABELS = pa.field("labels", pa.string())
# The length of a request's vector, null for the model's length. Only if a request sets one
DIMENSIONS = pa.field("dimensions", pa.int32())
# The number of the input row, and of the answer to it. Only if rows have several answers
INPUT_ROW, SAMPLE = pa.field("input_row", pa.int64()), pa.field("sample_index", pa.int32())
INDEX_SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("file", pa.string()),
        ("row_index", pa.int64()),
        ("custom_id", pa.string()),
        ("key", pa.binary(32)),
        # null for error rows, and for rows with a stored answer that an earlier run prepared
        ("token_offset", pa.int64()),
        ("token_count", pa.int32()),
        ("params", pa.string()),  # `SamplingParams.to_json()`
        ("greedy", pa.bool_()),
        ("expected_tokens", pa.int32()),
        ("error_code", pa.string()),
        ("error_class", pa.string()),
        ("error_message", pa.string()),
        ("retryable", pa.bool_()),
    ]
)


def attempt_columns(attempt: int) -> tuple[str, str, str]:
    """Return the names of the index columns for an attempt: work key, sampling parameters, maximum tokens.

    Their values are null for a row without such an attempt.

    Args:
        attempt: The number of the attempt, from 1.
    """
    if attempt == 1:
        return "key", "params", "expected_tokens"
    return f"key_{attempt}", f"params_{attempt}", f"expected_tokens_{attempt}"


def distinct_columns(attempts: int) -> list[str]:
    """Return the index columns whose values hardly ever repeat. They are written without dictionaries.

    Args:
        attempts: Maximum attempts per row. Each has a column with work keys.
    """
    keys = [attempt_columns(attempt)[0] for attempt in range(1, attempts + 1)]
    return ["row_id", "row_index", "custom_id", "token_offset", INPUT_ROW.name, *keys]


def index_schema(
    endpoints: bool,
    attempts: int = 1,
    openings: bool = False,
    tools: bool = False,
    labels: bool = False,
    samples: bool = False,
    dimensions: bool = False,
) -> pa.Schema:
    """Return the columns of an index.

    Args:
        endpoints: True if the rows are OpenAI requests.
        attempts: Maximum attempts per row.
        openings: True if the model may reason before it answers.
        tools: True if rows may have tools.
        labels: True if rows may name their own labels.
        samples: True if rows may have several answers.
        dimensions: True if rows may set the length of their vectors.
    """
    further = [(ENDPOINT, endpoints), (OPENING, openings), (TOOLS, tools), (LABELS, labels)]
    further += [(INPUT_ROW, samples), (SAMPLE, samples), (DIMENSIONS, dimensions)]
    fields = [*INDEX_SCHEMA, *(field for field, there in further if there)]
    for attempt in range(2, attempts + 1):
        first = zip(attempt_columns(attempt), attempt_columns(1), strict=True)
        fields += [pa.field(name, INDEX_SCHEMA.field(like).type) for name, like in first]
    return pa.schema(fields)


class Layout:
    """The paths of the files in the folder of an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index"  # folder of the index parts
        self.passthrough = folder / "passthrough"  # folder of the passthrough parts
        self.content_free = folder / "content-free"  # folder of the prompt without content
        self.tokens = folder / "tokens" / "tokens.bin"  # the prompts
        self.marker = folder / MARKER  # marks the index as complete
        # Removed when the index is complete
        self.spill = folder / "spill"
        self.spool = folder / "spool"  # passthrough columns whose types are not known yet


class BestOf(NamedTuple):
    """How many samples of each input row are computed and published.

    Attributes:
        published: The number of published samples. The best ones are chosen.
        computed: The number of computed samples.
        lists: True if the published samples are lists in one result row, instead of one result row each.
    """

    published: int
    computed: int
    lists: bool = False

    @property
    def rows(self) -> int:
        """Return the number of result rows per input row: 1 if the samples are lists, else `published`."""
        return 1 if self.lists else self.published


class PendingSegments(NamedTuple):
    """The segments of the kept index that this run wrote.

    The next run can reuse them once their rows are published.

    Attributes:
        identity: A hash of everything, except the input, that determines the rows.
        rows: The folder and the number of rows of each segment, in row order. They follow the reused
            segments.
    """

    identity: str
    rows: tuple[tuple[str, int], ...]


def _pending(value: Sequence[Any]) -> PendingSegments:
    identity, *rows = value
    return PendingSegments(str(identity), tuple((str(folder), int(count)) for folder, count in rows))


@dataclass(frozen=True)
class Index(RequestedOutputs):
    """The complete index of a job: all rows with their prompts and work keys. Open it with `Index.open(folder)`.

    Attributes:
        folder: The folder of the index.
        identity: A hash of everything that determines the index.
        rows: Number of rows: one per answer of each input row.
        error_rows: Number of rows that could not become requests.
        total_tokens: Tokens of all prompts.
        inputs: The input files.
        sha256: Digests by path, only of input files that were read to their end.
        output: Name of the kind of answers, such as tokens or vectors.
        unread_arguments: Arguments of rows that the chat template does not read, with the number of rows that
            set them.
        attempts: Maximum attempts per row; more than one with a ladder (on_invalid).
        unread_calls: True if rows have tools, and nothing says how the model writes calls.
        known_rows: Number of rows without tokens, because their answers were stored when the input was read.
        samples: True if consecutive rows may belong to the same input row.
        expected: The passthrough column with the expected answers.
        best: How many samples are published, and how. None: all samples, with one result row per sample.
        engine_class: True if the result has a column for the machine class of each answer.
        reused: The first rows, reused from the last run. Empty for an index from `open`.
        segments: The segments that the next run can reuse once the rows are published.
    """

    folder: Path
    identity: str
    rows: int
    error_rows: int
    total_tokens: int
    inputs: tuple[InputFile, ...]
    sha256: dict[str, str]
    output: str = "tokens"
    unread_arguments: dict[str, int] = field(default_factory=dict)
    attempts: int = 1
    unread_calls: bool = False
    known_rows: int = 0
    samples: bool = False
    expected: str | None = None
    best: BestOf | None = None
    engine_class: bool = False
    # Not stored in the marker
    reused: ReusedRows = field(default=NO_REUSED_ROWS, compare=False)
    segments: PendingSegments | None = field(default=None, compare=False)

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Open the complete index in a folder.

        Raises:
            StorageError: The folder has no complete index, or one with a newer format.
        """
        marker = Layout(folder).marker
        try:
            value = json.loads(marker.read_text("utf-8"))
            return cls._from_json(folder, value)
        except FileNotFoundError:
            raise StorageError(f"{folder}: no complete index here; run the job again") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StorageError(f"{marker}: unreadable ({error}); remove {folder}") from None

    @classmethod
    def _from_json(cls, folder: Path, value: dict[str, Any]) -> Index:
        if value["format"] > INDEX_FORMAT:
            raise StorageError(
                f"{folder}: index format {value['format']}, this version knows up to {INDEX_FORMAT}; remove the folder"
            )
        inputs = [{**entry} for entry in value["inputs"]]
        digests = {entry["path"]: entry.pop("sha256") for entry in inputs}
        stored = {one.name: value[key] for one in _stored_fields() if (key := _key(one.name)) in value}
        return cls(
            folder=folder,
            inputs=tuple(InputFile(**entry) for entry in inputs),
            sha256={path: digest for path, digest in digests.items() if digest},
            **{name: _converted(_READ, name, one) for name, one in stored.items()},
        )

    @classmethod
    def find(cls, folder: Path, identity: str) -> Index | None:
        """Return the complete index in a folder, or None if there is none or its identity differs.

        Args:
            folder: The folder of the index.
            identity: A hash of everything that determines the index.
        """
        if not Layout(folder).marker.exists():
            return None
        found = cls.open(folder)
        return found if found.identity == identity else None

    def write_marker(self, ops: FileOps) -> None:
        """Mark the index as complete by writing index.json.

        All other files must be on disk. Raises StorageError.
        """
        value: dict[str, Any] = {"format": INDEX_FORMAT, "logprobs": None, "answers": None}
        value["inputs"] = [{**f.to_json(), "sha256": self.sha256.get(f.path)} for f in self.inputs]
        for stored in _stored_fields():
            one = getattr(self, stored.name)
            if one != stored.default and one != {}:
                value[_key(stored.name)] = _converted(_WRITE, stored.name, one)
        if self.known_rows:  # a later run rebuilds this index
            value.pop(_key("segments"), None)
        write_json(Layout(self.folder).marker, value, ops)

    @property
    def kept_logprobs(self) -> int | None:
        """Return the maximum number of log-probabilities per token that the engine must return for a row.

        0: only the generated tokens need theirs, for the column `confidence`. None: no row needs any.
        """
        return self.logprobs if self.confidence is None else self.logprobs or 0

    @property
    def notices(self) -> list[str]:
        """Return messages for users about arguments that the chat template ignores, and unparsed tool calls."""
        ignored = unread_text(self.unread_arguments)
        found = [] if ignored is None else [ignored]
        return [*found, UNREAD_CALLS] if self.unread_calls else found

    @property
    def row_ids(self) -> str:
        """Return the name of the index column with the values of the result's column row_id."""
        return INPUT_ROW.name if self.samples else "row_id"

    @property
    def input_rows(self) -> int:
        """Return the number of the job's input rows, error rows included.

        A row with several answers counts once.
        """
        if not self.samples or not self.rows:
            return self.rows
        column = pq.read_table(self.index_parts[-1], columns=[INPUT_ROW.name]).column(0)
        return int(column[-1].as_py()) + 1

    @property
    def index_dir(self) -> Path:
        """Return the folder with the index's Parquet parts."""
        return Layout(self.folder).index

    @cached_property
    def index_parts(self) -> Sequence[Path]:
        """Return the paths of the index's Parquet parts, in row order."""
        return sorted(self.index_dir.glob("part-*.parquet"))

    @cached_property
    def content_free_parts(self) -> Sequence[Path]:
        """Return the part with the content-free prompt, or an empty list if labels are not calibrated."""
        return sorted(Layout(self.folder).content_free.glob("part-*.parquet"))

    @cached_property
    def passthrough_parts(self) -> Sequence[Path]:
        """Return the parts with row_id and the passthrough columns, in row order.

        Empty without such columns.
        """
        return sorted(Layout(self.folder).passthrough.glob("part-*.parquet"))

    @cached_property
    def passthrough_schema(self) -> pa.Schema:
        """Return the names and types of the passthrough columns, without row_id.

        These columns are copied from the input to the result.
        """
        if not self.passthrough_parts:
            return pa.schema([])
        found = pq.read_schema(self.passthrough_parts[0]).remove_metadata()
        return pa.schema([field for field in found if field.name != "row_id"])

    @cached_property
    def tokens(self) -> TokenStore:
        """Return the store of the prompts' token ids."""
        return TokenStore(Layout(self.folder).tokens)

    def check_inputs_unchanged(self) -> None:
        """Check that no input file of the index has changed.

        Raises:
            InputCorrupt: A file changed since it was read.
            InputMissing: A file was removed.
        """
        for file in self.inputs:
            file.check_unchanged(self.sha256.get(file.path))


# The names that differ in the marker. Fields with their default are not written there
_KEYS = {"samples": "several_samples", "segments": "stretches"}
_READ: Mapping[str, Callable[[Any], Any]] = {
    "answers": lambda value: AnswerSchema(**value),
    "best": lambda value: BestOf(*value),
    "confidence": tuple,
    "segments": _pending,
    **{name: kind.from_json for name, kind in PARTS.items()},
}
_WRITE: Mapping[str, Callable[[Any], Any]] = {
    "answers": asdict,
    "best": lambda best: list(best)[: 3 if best.lists else 2],
    "segments": lambda segments: [segments.identity, *segments.rows],
    **{name: kind.to_json for name, kind in PARTS.items()},
}


def _stored_fields() -> list[Field[Any]]:
    return [one for one in fields(Index) if one.name not in ("folder", "inputs", "sha256", "reused")]


def _key(name: str) -> str:
    return _KEYS.get(name, name)


def _converted(how: Mapping[str, Callable[[Any], Any]], name: str, value: Any) -> Any:
    return how[name](value) if name in how and value is not None else value
