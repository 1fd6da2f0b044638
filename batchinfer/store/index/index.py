"""The index of a job: all rows with their work keys. It is complete once index.json exists.

index/part-*.parquet        one row per answer of each input row, in input order
tokens/tokens.bin           the prompts
passthrough/part-*.parquet  the columns of output.columns, for the same rows as the index
content-free/part-*.parquet the prompt without content that calibrates labels; it is not part of the result
index.json                  the marker, written last
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.embedding import Embedding
from batchinfer.core.errors import StorageError
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.filesystem.durable import FileOps, write_json
from batchinfer.input.input_file import InputFile
from batchinfer.input.prompts.arguments.unread import unread_text
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.index.token_store import TokenStore

INDEX_FORMAT = 3
UNREAD_CALLS = (
    "rows have tools, and the chat template does not show how the model writes calls: they stay in generated_text; "
    "name the style in prompt.tool_calls, or set it to none"
)
MARKER = "index.json"
Made = TypeVar("Made")
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
    """Return the columns of an index with the key, the parameters and the maximum tokens of an attempt.

    The values are null for a row without such an attempt.
    """
    if attempt == 1:
        return "key", "params", "expected_tokens"
    return f"key_{attempt}", f"params_{attempt}", f"expected_tokens_{attempt}"


def distinct_columns(attempts: int) -> list[str]:
    """Return the columns of an index whose values hardly ever repeat."""
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
    """Return the schema of an index.

    Args:
        endpoints: The rows are OpenAI requests.
        attempts: The maximum number of attempts per row.
        openings: Answers may reason first.
        tools: Rows may have tools.
        labels: Rows may name their own labels.
        samples: Rows may have several answers.
        dimensions: Rows may set the length of their vectors.
    """
    further = [(ENDPOINT, endpoints), (OPENING, openings), (TOOLS, tools), (LABELS, labels)]
    further += [(INPUT_ROW, samples), (SAMPLE, samples), (DIMENSIONS, dimensions)]
    fields = [*INDEX_SCHEMA, *(field for field, there in further if there)]
    for attempt in range(2, attempts + 1):
        first = zip(attempt_columns(attempt), attempt_columns(1), strict=True)
        fields += [pa.field(name, INDEX_SCHEMA.field(like).type) for name, like in first]
    return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of an index's files."""

    folder: Path

    @property
    def index(self) -> Path:
        """Return the folder of the index parts."""
        return self.folder / "index"

    @property
    def passthrough(self) -> Path:
        """Return the folder of the passthrough parts."""
        return self.folder / "passthrough"

    @property
    def content_free(self) -> Path:
        """Return the folder of the prompt without content."""
        return self.folder / "content-free"

    @property
    def tokens(self) -> Path:
        """Return the file of the prompts."""
        return self.folder / "tokens" / "tokens.bin"

    @property
    def marker(self) -> Path:
        """Return the file that marks the index as complete."""
        return self.folder / MARKER


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """The JSON Schema that every answer of a job must match.

    Args:
        text: The schema.
        column: The name of the single column that holds the answer. None: each property of the schema is a column.
    """

    text: str
    column: str | None = None


class BestOf(NamedTuple):
    """How many of the samples of each row are computed, and how many of them are published.

    Args:
        published: The number of published samples, the best ones.
        computed: The number of computed samples.
        lists: The published samples of a row are lists in one row of the result.
    """

    published: int
    computed: int
    lists: bool = False

    @property
    def rows(self) -> int:
        """Return the number of result rows per input row."""
        return 1 if self.lists else self.published


class PendingSegments(NamedTuple):
    """Segments of the kept index that this run wrote. The next run can reuse them whole once their rows are published.

    Args:
        identity: The hash of everything that determines the rows.
        rows: The folder and the number of rows of each segment, in row order, after the reused segments.
    """

    identity: str
    rows: tuple[tuple[str, int], ...]


def _pending(value: Sequence[Any]) -> PendingSegments:
    identity, *rows = value
    return PendingSegments(str(identity), tuple((str(folder), int(count)) for folder, count in rows))


@dataclass(frozen=True)
class Index:
    """A complete index. Open it with `Index.open(folder)`."""

    folder: Path
    identity: str
    rows: int
    error_rows: int
    total_tokens: int
    inputs: tuple[InputFile, ...]
    sha256: dict[str, str]  # by path, only of files that were read to their end
    # Maximum number of log-probabilities per token that a row requests. None: the result has no column for them
    logprobs: int | None = None
    # None: the result has no columns for parts of the answers
    answers: AnswerSchema | None = None
    output: str = "tokens"  # name of the kind of answers (store/outputs)
    # Arguments of rows that the chat template does not read, with the number of rows that set them
    unread_arguments: dict[str, int] = field(default_factory=dict)
    attempts: int = 1  # maximum attempts per row, more than one with a ladder (on_invalid)
    # None: the result has no columns for reasoning
    reasoning: Reasoning | None = None
    # None: the result has no column for tool calls
    tool_calls: CallStyle | None = None
    # Whether there are rows with tools, and nothing says how their calls are written
    unread_calls: bool = False
    known_rows: int = 0  # that have no tokens, as their answers were stored when the input was read
    embedding: Embedding | None = None  # None: no row requests a vector
    scoring: Scoring | None = None  # None: answers are not scores of continuations
    samples: bool = False  # consecutive rows may belong to the same input row
    expected: str | None = None  # passthrough column with the expected answers
    pairs: PairScoring | None = None  # None: answers are not scores of prompt and document
    # How many of the samples of a row are published, and how; None: all, a row each
    best: BestOf | None = None
    # The possible answers, if the result has a column of confidence. (): the fields of `answers` list them
    confidence: tuple[str, ...] | None = None
    prompt_logprobs: bool = False  # the result has a column for log-probabilities of prompts
    own_dimensions: bool = False  # rows may set the length of their vectors
    engine_class: bool = False  # the result has a column for the machine class of each answer
    # The first rows, reused from the last run. Not stored: empty for an index that was opened
    reused: ReusedRows = field(default=NO_REUSED_ROWS, compare=False)
    segments: PendingSegments | None = field(default=None, compare=False)

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Open a complete index.

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
        return cls(
            folder=folder,
            identity=value["identity"],
            rows=value["rows"],
            error_rows=value["error_rows"],
            total_tokens=value["total_tokens"],
            inputs=tuple(InputFile(**entry) for entry in inputs),
            sha256={path: digest for path, digest in digests.items() if digest},
            logprobs=value.get("logprobs"),
            answers=_made(lambda one: AnswerSchema(**one), value.get("answers")),
            output=value.get("output", "tokens"),
            unread_arguments=value.get("unread_arguments", {}),
            attempts=int(value.get("attempts", 1)),
            reasoning=_made(Reasoning.from_json, value.get("reasoning")),
            tool_calls=_made(CallStyle.from_json, value.get("tool_calls")),
            unread_calls=bool(value.get("unread_calls", False)),
            known_rows=int(value.get("known_rows", 0)),
            embedding=_made(Embedding.from_json, value.get("embedding")),
            scoring=_made(Scoring.from_json, value.get("scoring")),
            samples=bool(value.get("several_samples", False)),
            expected=value.get("expected"),
            pairs=_made(PairScoring.from_json, value.get("pairs")),
            best=_made(lambda one: BestOf(*one), value.get("best")),
            confidence=_made(tuple, value.get("confidence")),
            prompt_logprobs=bool(value.get("prompt_logprobs", False)),
            own_dimensions=bool(value.get("own_dimensions", False)),
            engine_class=bool(value.get("engine_class", False)),
            segments=_made(_pending, value.get("stretches")),
        )

    @classmethod
    def find(cls, folder: Path, identity: str) -> Index | None:
        """Return the index in `folder` if it is complete and has this identity, else None."""
        if not Layout(folder).marker.exists():
            return None
        found = cls.open(folder)
        return found if found.identity == identity else None

    def write_marker(self, ops: FileOps) -> None:
        """Mark the index as complete. Everything else must be on disk. Raises StorageError."""
        value = {
            "format": INDEX_FORMAT,
            "identity": self.identity,
            "rows": self.rows,
            "error_rows": self.error_rows,
            "total_tokens": self.total_tokens,
            "logprobs": self.logprobs,
            "answers": None if self.answers is None else asdict(self.answers),
            "inputs": [{**f.to_json(), "sha256": self.sha256.get(f.path)} for f in self.inputs],
        }
        if self.output != "tokens":
            value["output"] = self.output
        if self.unread_arguments:
            value["unread_arguments"] = self.unread_arguments
        if self.attempts > 1:
            value["attempts"] = self.attempts
        if self.reasoning is not None:
            value["reasoning"] = self.reasoning.to_json()
        if self.tool_calls is not None:
            value["tool_calls"] = self.tool_calls.to_json()
        if self.unread_calls:
            value["unread_calls"] = True
        if self.known_rows:
            value["known_rows"] = self.known_rows
        elif self.segments is not None:  # a later run rebuilds an index with known rows
            value["stretches"] = [self.segments.identity, *self.segments.rows]
        if self.embedding is not None:
            value["embedding"] = self.embedding.to_json()
        if self.scoring is not None:
            value["scoring"] = self.scoring.to_json()
        if self.pairs is not None:
            value["pairs"] = self.pairs.to_json()
        if self.confidence is not None:
            value["confidence"] = list(self.confidence)
        if self.prompt_logprobs:
            value["prompt_logprobs"] = True
        if self.own_dimensions:
            value["own_dimensions"] = True
        if self.engine_class:
            value["engine_class"] = True
        if self.samples:
            value["several_samples"] = True
        if self.expected is not None:
            value["expected"] = self.expected
        if self.best is not None:
            value["best"] = list(self.best)[: 3 if self.best.lists else 2]
        write_json(Layout(self.folder).marker, value, ops)

    @property
    def kept_logprobs(self) -> int | None:
        """Return the maximum log-probabilities per token that the engine returns for a row, or None for none."""
        return self.logprobs if self.confidence is None else self.logprobs or 0

    @property
    def notices(self) -> list[str]:
        """Return notices about the rows that are not errors."""
        ignored = unread_text(self.unread_arguments)
        found = [] if ignored is None else [ignored]
        return [*found, UNREAD_CALLS] if self.unread_calls else found

    @property
    def row_ids(self) -> str:
        """Return the column with the row ids of the result."""
        return INPUT_ROW.name if self.samples else "row_id"

    @property
    def input_rows(self) -> int:
        """Return the number of input rows, error rows included. A row with several answers counts once."""
        if not self.samples or not self.rows:
            return self.rows
        column = pq.read_table(self.index_parts[-1], columns=[INPUT_ROW.name]).column(0)
        return int(column[-1].as_py()) + 1

    @property
    def index_dir(self) -> Path:
        """Return the folder of the index parts."""
        return Layout(self.folder).index

    @cached_property
    def index_parts(self) -> Sequence[Path]:
        """Return the index parts in row order."""
        return sorted(self.index_dir.glob("part-*.parquet"))

    @cached_property
    def content_free_parts(self) -> Sequence[Path]:
        """Return the part with the prompt without content, or an empty list if labels are not calibrated."""
        return sorted(Layout(self.folder).content_free.glob("part-*.parquet"))

    @cached_property
    def passthrough_parts(self) -> Sequence[Path]:
        """Return the parts with row_id and the passthrough columns, in row order. Empty without such columns."""
        return sorted(Layout(self.folder).passthrough.glob("part-*.parquet"))

    @cached_property
    def passthrough_schema(self) -> pa.Schema:
        """Return the types of the passthrough columns, without row_id."""
        if not self.passthrough_parts:
            return pa.schema([])
        found = pq.read_schema(self.passthrough_parts[0]).remove_metadata()
        return pa.schema([field for field in found if field.name != "row_id"])

    @cached_property
    def tokens(self) -> TokenStore:
        """Return the store of the prompts' token ids."""
        return TokenStore(Layout(self.folder).tokens)

    def inputs_unchanged(self) -> None:
        """Check that no input file has changed.

        Raises:
            InputCorrupt: A file changed since it was read.
            InputMissing: A file was removed.
        """
        for file in self.inputs:
            file.check_unchanged(self.sha256.get(file.path))


def _made(make: Callable[[Any], Made], value: Any) -> Made | None:
    return None if value is None else make(value)
