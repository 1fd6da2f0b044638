"""A job's index: which row is which piece of work. Written by ingest, complete once index.json is there.

index/part-*.parquet        one row for every answer to an input row, in order
tokens/tokens.bin           the prompts
passthrough/part-*.parquet  the output.columns, in the rows of the index
content-free/part-*.parquet a prompt without content, as a row that no result has; where labels are calibrated
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
ENDPOINT = pa.field("endpoint", pa.string())  # of OpenAI requests: an index of other input has no such column
# How a prompt ends, of UNSAID, OPEN and CLOSED: an index of a checkpoint without reasoning has no such column
OPENING = pa.field("reasoning_opening", pa.int8())
# The tools that a row has, as `known_tools` writes them: an index of a job without calls has no such column
TOOLS = pa.field("tools", pa.string())
# The labels that a row has of its own, as a JSON list
LABELS = pa.field("labels", pa.string())
# How many numbers a request's vector has, null where it does not say: only an index of such requests has the column
DIMENSIONS = pa.field("dimensions", pa.int32())
# Which row of the input a row is, and which of its answers: an index of rows with one answer each has no such columns
INPUT_ROW, SAMPLE = pa.field("input_row", pa.int64()), pa.field("sample_index", pa.int32())
INDEX_SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("file", pa.string()),
        ("row_index", pa.int64()),
        ("custom_id", pa.string()),
        ("key", pa.binary(32)),
        # null also of a row that the last index knew, and whose answer is stored: nobody needs its tokens
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
    """Return the columns of an index with the key, the parameters and the most tokens of the rows' answers in their
    first attempt, or a later one; null where a row has no such attempt."""
    if attempt == 1:
        return "key", "params", "expected_tokens"
    return f"key_{attempt}", f"params_{attempt}", f"expected_tokens_{attempt}"


def unlike_columns(attempts: int) -> list[str]:
    """Return the columns of an index in which hardly any two rows have the same."""
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
    """Return the columns of an index of OpenAI requests, or other rows, each of which may run so many times.
    `openings`: their answers may reason first; `tools`: they may call tools; `labels`: they have their own labels;
    `samples`: they may have several answers; `dimensions`: they may say how long their vectors are."""
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
        return self.folder / "index"

    @property
    def passthrough(self) -> Path:
        return self.folder / "passthrough"

    @property
    def content_free(self) -> Path:
        return self.folder / "content-free"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens" / "tokens.bin"

    @property
    def marker(self) -> Path:
        return self.folder / MARKER


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """The JSON Schema that every answer of a job is valid under. `column`: the name of the one column that answers
    become; None: each of the schema's properties becomes one."""

    text: str
    column: str | None = None


class BestOf(NamedTuple):
    """The best answers to a row: `published` ones of those that are `computed`, the same numbers for each row."""

    published: int
    computed: int
    lists: bool = False  # whether they are one row of the result

    @property
    def rows(self) -> int:
        """Return how many rows of the result they are."""
        return 1 if self.lists else self.published


class PendingSegments(NamedTuple):
    """The segments of a kept index that have the rows of an index, behind those that were taken over: what they follow
    from, and the folder and the rows of each. They can be taken over whole, too, once the rows are published."""

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
    sha256: dict[str, str]  # by path; a file that `limit` left unfinished has none
    # The most log-probabilities a token that a row asks for; None: the result has no column for them
    logprobs: int | None = None
    # What answers look like; None: the result has no columns of their parts
    answers: AnswerSchema | None = None
    output: str = "tokens"  # the name of the kind of answers (store/outputs)
    # Arguments that rows give and the chat template does not read, and how many rows each
    unread_arguments: dict[str, int] = field(default_factory=dict)
    attempts: int = 1  # how many times a row may run: more than once with a ladder (on_invalid)
    # How answers mark their reasoning; None: the result has no columns for it
    reasoning: Reasoning | None = None
    # How answers write calls of tools; None: the result has no column for them
    tool_calls: CallStyle | None = None
    unread_calls: bool = (
        False  # whether there are rows with tools, and nothing says how their calls are written
    )
    known_rows: int = 0  # that have no tokens, as their answers were stored when the input was read
    embedding: Embedding | None = None  # the vectors of its rows, of which some ask for one
    scoring: Scoring | None = None  # what is scored behind its prompts, whose answers are scores
    samples: bool = False  # whether several of its rows, one after the other, may be a row of the input
    expected: str | None = None  # the passthrough column with the values that answers should have
    pairs: PairScoring | None = None  # the score of its prompts and documents, whose answers are logits
    best: BestOf | None = (
        None  # how many of the samples of a row are published, and how; None: all, a row each
    )
    # The texts of which each answer is one, where the result has a column of confidence; (): that of `answers`' fields
    confidence: tuple[str, ...] | None = None
    prompt_logprobs: bool = False  # whether the result has a column for log-probabilities of prompts
    own_dimensions: bool = False  # whether rows say themselves how many numbers their vectors have
    engine_class: bool = False  # whether the result has a column for the class of machine of each answer
    # Its first rows, which have their answers; only of an index that was made a moment ago
    reused: ReusedRows = field(default=NO_REUSED_ROWS, compare=False)
    segments: PendingSegments | None = field(default=None, compare=False)

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Raises StorageError when the folder holds no complete index, or one of a newer format."""
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
        """The index in `folder` if it is complete and of this identity, else None."""
        if not Layout(folder).marker.exists():
            return None
        found = cls.open(folder)
        return found if found.identity == identity else None

    def write_marker(self, ops: FileOps) -> None:
        """Make the index complete: everything else must be on disk by now. Raises StorageError."""
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
        elif self.segments is not None:  # only an index without known rows is used by a run that comes later
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
        """The most log-probabilities a token that an engine keeps for a row; None: it keeps none."""
        return self.logprobs if self.confidence is None else self.logprobs or 0

    @property
    def notices(self) -> list[str]:
        """Lines that tell of its rows what error rows do not."""
        ignored = unread_text(self.unread_arguments)
        found = [] if ignored is None else [ignored]
        return [*found, UNREAD_CALLS] if self.unread_calls else found

    @property
    def row_ids(self) -> str:
        """The column with the ids that rows have in the result."""
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
        return Layout(self.folder).index

    @cached_property
    def index_parts(self) -> Sequence[Path]:
        """Index parts in row order."""
        return sorted(self.index_dir.glob("part-*.parquet"))

    @cached_property
    def content_free_parts(self) -> Sequence[Path]:
        """The part with the prompt without content; empty where labels are not calibrated."""
        return sorted(Layout(self.folder).content_free.glob("part-*.parquet"))

    @cached_property
    def passthrough_parts(self) -> Sequence[Path]:
        """Parts with row_id and the passthrough columns, in row order; empty when the job carries none."""
        return sorted(Layout(self.folder).passthrough.glob("part-*.parquet"))

    @cached_property
    def passthrough_schema(self) -> pa.Schema:
        """Types of the passthrough columns, without row_id."""
        if not self.passthrough_parts:
            return pa.schema([])
        found = pq.read_schema(self.passthrough_parts[0]).remove_metadata()
        return pa.schema([field for field in found if field.name != "row_id"])

    @cached_property
    def tokens(self) -> TokenStore:
        """Return the store of the prompts' token ids."""
        return TokenStore(Layout(self.folder).tokens)

    def inputs_unchanged(self) -> None:
        """Raises InputCorrupt when an input file changed since it was read, InputMissing when it is gone."""
        for file in self.inputs:
            file.check_unchanged(self.sha256.get(file.path))


def _made(make: Callable[[Any], Made], value: Any) -> Made | None:
    """Return what is made of a value, or None if there is none."""
    return None if value is None else make(value)
