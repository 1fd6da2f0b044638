"""The job file as classes: loads a frozen Job, or reports all mistakes at once.

Each field describes itself. `batchinfer schema` prints the descriptions for editors, and docs/job-file.md is
generated from them: they may have links relative to docs/. check.py checks conditions on several fields, and
wording.py words the messages.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.core.samples import DraftSourceName
from batchinfer.core.sampling import SamplingParams
from batchinfer.core.text import without_markup
from batchinfer.job.check import check
from batchinfer.job.embedding import EmbedSection
from batchinfer.job.field_types import (
    AUTO_DRAFTS,
    DRAFTS,
    AdapterPath,
    Auto,
    Bytes,
    Column,
    DeadlineText,
    Delimiter,
    Encoding,
    Engines,
    JobDraftSources,
    JsonSchema,
    KvMemory,
    Labels,
    MaxLength,
    MinRows,
    ModelPath,
    Name,
    OneOrMorePaths,
    PathField,
    Quote,
    RayAddress,
    SqlMemory,
    Text,
    Whole,
)
from batchinfer.job.file import read_job_file, read_job_values
from batchinfer.job.ladder import Ladder, ladder_findings
from batchinfer.job.prompt import PromptSection
from batchinfer.job.results_root import results_root, trial_results
from batchinfer.job.sampling import SamplingSection
from batchinfer.job.schema_file import read_schema_file
from batchinfer.job.scoring import ClassifySection, RerankSection, ScoreSection
from batchinfer.job.section import Section, option_text
from batchinfer.job.tasks import TASK_SECTIONS, Task
from batchinfer.job.template_file import read_template_file
from batchinfer.job.variables import Variables
from batchinfer.job.wording import ValidValues, findings_of
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, RequestedQuantization

_OUTPUT_PATH = ("output", "path")
# Keys and sections that determine the rows of a result and their contents
_SHAPES_RESULTS = (
    "columns",
    "json_schema",
    "column",
    "confidence",
)  # keys of output, as Job.identity_json has them
_IDENTITY_SECTIONS = ("model", "input", "prompt", "task", *TASK_SECTIONS, "sampling", "on_invalid")
_NO_FILE = "(in-memory job)"  # path of a job that is no file


class ModelSection(Section):
    """The model of the job."""

    path: ModelPath = Field(
        description="Folder of a checkpoint: `config.json`, `*.safetensors`, `tokenizer.json`. Or a "
        "[GGUF](models.md#gguf) file, or a [name in the local Hugging Face "
        "cache](models.md#models-by-name): `org/name` or `org/name@revision`."
    )
    dtype: Literal["auto", Dtype] = Field(
        default="auto",
        description="Type to compute in. `auto`: the dtype of the checkpoint, but `float32` on a CPU without fast "
        "bfloat16.",
    )
    quantization: RequestedQuantization = Field(
        default="auto",
        description="How linear layers are computed. `none`: in `dtype`. `int4`, `int8`, `fp8`: [weights are "
        "quantised](models.md#int8) while they are loaded. `stored`: in the quantised values of the "
        "checkpoint. `auto`: `stored` if [the checkpoint and the device allow "
        "it](models.md#fp8-and-int8-as-they-are-stored), else `none`.",
    )
    calibration: Literal["auto", "off"] = Field(
        default="auto",
        description="How weights become [`int4`](models.md#int4). `auto`: the job's first run calibrates them on a "
        "sample of its rows, and later runs reuse the result. `off`: weights are rounded to nearest at "
        "each start.",
    )
    kv_cache_dtype: KvCacheDtype = Field(
        default="auto",
        description="Type of the values in the KV cache. `auto`: `dtype`. [`int8`, "
        "`fp8`](models.md#int8-and-fp8-in-the-kv-cache): one byte per value; `fp8` requires a GPU.",
    )
    max_model_len: MaxLength = Field(
        default=None,
        description="Maximum tokens of a row, prompt and answer together. `null` or `auto`: the checkpoint's own "
        "maximum.",
    )
    adapters: dict[Name, AdapterPath] = Field(
        default={},
        description="[LoRA adapters](adapters.md): a mapping from names to folders saved by PEFT, or to `org/name`.",
    )
    adapter: Name | None = Field(
        default=None,
        description="Name of the adapter for rows that do not name one. `null`: the model without an adapter.",
    )
    adapter_from_column: Column | None = Field(
        default=None,
        description="Column with the name of a row's adapter. Rows with null use `model.adapter`.",
    )


class DraftModelSection(Section):
    """A draft model, or draft heads of the job's model."""

    model: ModelPath | None = Field(
        default=None,
        description="[Draft model](drafts.md#a-draft-model): the folder of a checkpoint, a GGUF file, or the name of "
        "a downloaded model. It must have the same tokenizer as the job's model.",
    )
    heads: ModelPath | None = Field(
        default=None,
        description="Folder of [Medusa or EAGLE-3 heads](drafts.md#heads) that were trained for the job's model, "
        "instead of `model`. Or the job's model itself, if it has MTP layers.",
    )
    quantization: RequestedQuantization = Field(
        default="auto",
        description="How linear layers of the draft model are computed, as in `model.quantization`. `int4` is "
        "rounded to nearest.",
    )
    runs: Literal["auto", "first", "beside"] = Field(
        default="auto",
        description="`first`: the draft model answers all rows before the job's model is loaded. `beside`: both are "
        "loaded, and it drafts tokens while rows decode. `auto`: [the faster way](drafts.md#a-draft-model).",
    )


class InputSection(Section):
    """The rows: files or one SQL query."""

    path: OneOrMorePaths | None = Field(
        default=None,
        description="File, folder or glob (`**` enters subfolders), or a list of these. Formats: JSONL and CSV (also "
        "`.gz`, `.zst`), Parquet, Arrow, OpenAI batch files.",
    )
    sql: Text | None = Field(
        default=None,
        description="DuckDB query whose rows are the input, instead of `path`. Relative paths in the query start "
        "from the folder of the job file.",
    )
    sql_memory: SqlMemory = Field(
        default="auto",
        description="Memory for the query, such as `4GiB`; data beyond it is spilled to disk. `auto`: half of the "
        "available memory, but at least 1 GiB.",
    )
    format: Literal["auto", "jsonl", "parquet", "csv", "arrow", "openai"] = Field(
        default="auto",
        description="Format of the files. `openai`: lines of `custom_id`, `method`, `url`, `body`. `auto`: by the "
        "file names, or by the first bytes if a name does not show the format.",
    )
    encoding: Encoding = Field(
        default="utf-8",
        description="Encoding of JSONL and CSV files, such as `latin-1`, `cp1252`, `utf-16`, `shift_jis` or "
        "`gb18030`.",
    )
    delimiter: Delimiter = Field(
        default="auto",
        description="Character between the fields of CSV: `tab`, or one ASCII character. `auto`: comma, semicolon or "
        "tab, [depending on the header](input.md#csv).",
    )
    quote: Quote = Field(
        default='"',
        description="Quote character of CSV: one ASCII character, which is doubled inside a quoted field. `none`: "
        "fields are never quoted.",
    )
    id: Column | None = Field(
        default=None,
        description="Column that becomes `custom_id` in the results. OpenAI batch files have their own.",
    )
    expected: Column | None = Field(
        default=None,
        description="Column with the right answer (label) of a row. Results contain it and are "
        "[measured](accuracy.md) against it; no prompt and no work key contains it.",
    )
    unique_ids: bool = Field(
        default=False, description="Whether a row that repeats an earlier row's id becomes an error row."
    )
    limit: Whole | None = Field(default=None, description="Read only the first N rows. `null`: all.")
    allow_empty: bool = Field(
        default=False,
        description="Whether an input without rows gives an empty result. `false`: [such an input is "
        "refused](input.md#an-input-without-rows-or-with-too-few).",
    )
    min_rows: MinRows | None = Field(
        default=None,
        description="Minimum number of input rows: a number, or a share below 1 of the rows of the result that is "
        "published at `output.path`. `null`: no check.",
    )
    workers: Auto | Annotated[int, Field(ge=1, le=256)] = Field(
        default="auto",
        description="Processes that read, render and tokenise rows; results do not depend on it. `auto`: one per CPU "
        "core, fewer if memory is short; on GPUs, one core per engine stays free.",
    )
    max_line_bytes: Bytes = Field(
        default=2**24,
        description="Longest line of JSONL, or record of CSV. A longer one becomes an error row and is not read.",
        json_schema_extra={"default": "16MiB"},
    )


class OutputSection(Section):
    """The folder and the columns of the results."""

    path: PathField = Field(
        description="Folder of the results, replaced as a whole by each run. It must not contain the input, the "
        "model or the job file. The state is in `.batchinfer-NAME` next to it."
    )
    columns: tuple[Column, ...] = Field(
        default=(),
        description="Input columns to carry into the results, with their own types. They must not have the name of a "
        "[result column](output.md).",
    )
    json_schema: JsonSchema | None = Field(
        default=None,
        alias="schema",
        description="JSON Schema that answers must match. Each of its properties becomes a [typed "
        "column](structured.md) of the result.",
    )
    schema_file: PathField | None = Field(
        default=None, description="JSON file with the schema, instead of `schema`."
    )
    column: Column | None = Field(
        default=None,
        description="Name of a single column for the whole answer, instead of one column per property.",
    )
    confidence: bool = Field(
        default=False,
        description="Whether results have a column [`confidence`](structured.md#confidence): the probability of each "
        "enum and boolean of an answer, or of its `sampling.choice`.",
    )
    explode: bool = Field(
        default=True,
        description="Whether each of several answers to a row (`sampling.n`) is a row of the result. `false`: one "
        "row has [lists](output.md#lists-of-answers) of all its answers.",
    )
    rows_per_file: Whole = Field(default=100_000, description="Rows per result file.")


class QualityLimits(Section):
    """Limits on how much quantisation may change the predictions of the model."""

    kl: float | None = Field(
        default=None,
        gt=0,
        description="Maximum KL divergence of the next token from unquantised weights, in nats, on average.",
    )
    top1: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Minimum share of positions at which the most likely token stays the same.",
    )
    cosine: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Minimum cosine similarity to the vectors of unquantised weights, for `embed` and `rerank`.",
    )


class EngineSection(Section):
    """The settings of the engine. None of them changes prompts or sampling parameters."""

    device: Literal["auto", Device] = Field(
        default="auto", description="`cpu` or `cuda`. `auto`: `cuda` if there is a GPU."
    )
    max_num_seqs: Auto | Whole = Field(default="auto", description="Maximum number of rows computed at once.")
    max_num_batched_tokens: Auto | Whole = Field(
        default="auto", description="Maximum number of tokens in one step."
    )
    block_size: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto", description="Tokens per block of the KV cache."
    )
    kv_memory: KvMemory = Field(
        default="auto",
        description="Memory for the KV cache of each GPU, or of all engines on a CPU: a size such as `4GiB`, or a "
        "share such as `0.8` of the memory that the weights leave free.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Whether rows share the KV cache of a common beginning of their prompts."
    )
    threads: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="CPU threads for computing, for all engines together. `auto`: one per core.",
    )
    data_parallel: Auto | Annotated[int, Field(ge=1, le=256)] = Field(
        default="auto",
        description="Number of [engines](engine.md#several-engines) that share the work, each with a copy of the "
        "model. `auto`: one per GPU; one on a CPU.",
    )
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Number of processes that [compute each layer of an engine together](large-models.md), each with "
        "a part of its weights.",
    )
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Number of [pipeline stages](large-models.md) per engine; each computes a part of the layers. "
        "With `tensor_parallel_size`, each stage has that number of processes.",
    )
    expert_parallel_size: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Number of processes per engine that [share the experts of each layer](large-models.md). Not "
        "with `tensor_parallel_size`, which already distributes experts.",
    )
    expert_placement: Literal["auto", "ranges"] = Field(
        default="auto",
        description="Placement of experts on processes. `auto`: by [how often earlier runs chose each "
        "expert](large-models.md#which-experts-a-rank-has), if known. `ranges`: by their numbers.",
    )
    deterministic: bool = Field(
        default=False,
        description="Whether answers are [the same to the bit](engine.md#deterministic) whatever other rows run. A "
        "little slower. Not available in `float16` on a CPU.",
    )
    quality_rows: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=32,
        description="Number of the first rows on whose prompts a run [measures how much quantisation changes the "
        "model's predictions](models.md#measured-quality), before it computes answers. 0: it is not measured.",
    )
    quality_limits: Annotated[QualityLimits | None, ValidValues("limits, as in {kl: 0.05, top1: 0.9}")] = (
        Field(
            default=None,
            description="Limits for this measurement: `{kl: 0.05, top1: 0.9}`, or `{cosine: 0.99}` for vectors. Beyond "
            "them, the run ends before it computes answers (exit code 65).",
        )
    )


class RayEngines(Section):
    """Bounds of the number of engines on a Ray cluster."""

    min: Engines = Field(
        default=1, description="Minimum number of engines; the run waits for free nodes if needed."
    )
    max: Engines = Field(default=256, description="Maximum number of engines.")


class RaySection(Section):
    """An existing Ray cluster on which the engines run. None of these options changes answers."""

    address: RayAddress = Field(
        description="`auto`: the cluster of this machine; or `HOST:PORT` of another one. `--ray` sets it."
    )
    engines: Annotated[
        Engines | RayEngines | None, ValidValues("a number of engines, or {min: 1, max: 8}")
    ] = Field(
        default=None,
        description="Number of engines, or bounds `{min: 1, max: 8}`. `null`: the number that fits on the cluster "
        "at the start.",
    )
    cpus: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None,
        description="CPUs that an engine reserves, and its threads. `null`: all of the smallest node that has an "
        "engine.",
    )
    gpus: Annotated[int, Field(ge=0, le=64)] | None = Field(
        default=None,
        description="GPUs that an engine reserves. `null`: one for each of its ranks; 0 on CPUs.",
    )
    labels: Labels = Field(
        default=(),
        json_schema_extra={"default": {}},
        description="Labels that a node must have, such as `{ray.io/accelerator-type: H100}`.",
    )
    classes: Literal["same", "any"] = Field(
        default="same",
        description="`same`: all engines run on one machine class. `any`: on several models of CPU or GPU.",
    )
    wait_s: float = Field(
        default=600.0, gt=0, le=86_400, description="Seconds that a run without any engine waits for one."
    )

    def engine_count(self, room: int) -> int:
        """Return the number of engines that a run starts: the set number, or `room` within the bounds `min` and `max`.

        Args:
            room: The number of engines that fit on the cluster.
        """
        if isinstance(self.engines, int):
            return self.engines
        bounds = self.engines or RayEngines()
        return max(bounds.min, min(bounds.max, room))


class OnErrorSection(Section):
    """The maximum share of error rows, and what happens beyond it."""

    max_error_rate: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Maximum share of error rows. With more, the job fails (exit code 65).",
    )
    publish: bool = Field(
        default=False,
        description="Whether a job with more error rows publishes its results anyway.",
    )


class CacheSection(Section):
    """The store of answers. Stored answers are not computed again."""

    path: PathField | None = Field(
        default=None,
        description="Folder of a store of answers that several jobs share. It must not be inside the results, the "
        "model or the input. `null`: a store for this job alone, in its state folder.",
    )
    keep: Whole | None = Field(
        default=30,
        description="Days after which [unused answers](resume.md#what-is-kept-and-for-how-long) are deleted from the "
        "store. `null`: never.",
    )


class CommitSection(Section):
    """The intervals at which finished answers are stored. A crash loses only answers after the last commit."""

    rows: Auto | Whole = Field(
        default="auto",
        description="Commit after this number of finished rows, or after `commit.seconds`. `auto`: 1,000 rows, or the "
        "rows that finish in one second if these are more (up to 32,768).",
    )
    seconds: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Commit after this number of seconds, or after `commit.rows`, whichever comes first.",
    )


class Job(Section):
    """A batchinfer job: a table of prompts in, a Parquet table of answers out."""

    name: Name = Field(description="Name of the job, for reports and messages; one line.")
    task: Task = Field(
        default="generate",
        description="Kind of answer: a text (`generate`), a [vector](tasks.md) (`embed`), the [probability of a "
        "text](scores.md) (`score`), a [label](scores.md) (`classify`), or the [relevance of a "
        "document](rerank.md) (`rerank`).",
    )
    model: ModelSection = Field(description="The model, and the type it computes in.")
    input: InputSection = Field(description="The rows: files (path) or a query (sql).")
    prompt: PromptSection | None = Field(
        default=None, description="How a row becomes a prompt. Required, except with input.format: openai."
    )
    embed: EmbedSection = Field(
        default=EmbedSection(),
        description="Which vectors are made, with task: embed and for requests to /v1/embeddings.",
    )
    score: ScoreSection = Field(
        default=ScoreSection(), description="The continuations to score, with task: score."
    )
    classify: ClassifySection = Field(
        default=ClassifySection(), description="The labels to choose from, with task: classify."
    )
    rerank: RerankSection = Field(
        default=RerankSection(), description="How relevance is measured, with task: rerank."
    )
    sampling: SamplingSection = Field(
        default=SamplingSection(),
        description="How tokens are chosen, and which parameters rows set themselves.",
    )
    on_invalid: Ladder = Field(
        default=(),
        description="Parameters of [further attempts](output.md#rows-that-run-again) at rows with invalid answers: a "
        "list of up to 8 mappings, such as `[{temperature: 0.7, seed: 1}, {max_tokens: 4096}]`.",
        json_schema_extra={"default": []},
    )
    output: OutputSection = Field(description="Where the results go, and which columns they have.")
    engine: EngineSection = Field(
        default=EngineSection(), description="How the engine works; auto fits most machines."
    )
    ray: RaySection | None = Field(
        default=None, description="The Ray cluster on which engines run. null: none, and nothing listens."
    )
    drafts: Annotated[Literal["auto", "off"] | JobDraftSources | DraftModelSection, DRAFTS] = Field(
        default="auto",
        description="[Sources of draft tokens](drafts.md): `auto`, `off`, a list, or a section that names a draft "
        "model or heads. A list has any of `prompt` (the row's own text), `answers` (other answers of "
        "the job) and `earlier` (the row's answer in the job's last result). `auto`: all three, if they "
        "make the run faster.",
    )
    on_error: OnErrorSection = Field(
        default=OnErrorSection(), description="How many error rows the job may have."
    )
    cache: CacheSection = Field(
        default=CacheSection(),
        description="The store of answers: its folder, and how long unused answers are kept.",
    )
    commit: CommitSection = Field(
        default=CommitSection(),
        description="How often finished answers are stored. A crash costs at most the work since then.",
    )

    deadline: DeadlineText | None = Field(
        default=None,
        description="When the results are needed. `06:00` is the next six o'clock by this machine's clock; "
        "timestamps are `2027-01-31T06:00` or `2027-01-31T06:00+00:00`.",
    )

    _source: Path = PrivateAttr(default=Path("job.yaml"))
    _lines: dict[str, int] = PrivateAttr(default_factory=dict)
    _root: Path = PrivateAttr(default=Path("results"))
    _overrides: tuple[tuple[str, str], ...] = PrivateAttr(default=())
    _date: str | None = PrivateAttr(default=None)
    _chat_template: str | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Set the private attributes, such as the path of the job file.

        Args:
            context: Their values, as `load_job` passes them.
        """
        self._root = self.output.path
        if context:
            self._source = context["source"]
            self._lines = context.get("lines", {})
            self._overrides, self._date = context.get("overrides", ()), context.get("date")
            if dated := context.get("dated_output"):
                self._root = results_root(dated, self._source.parent, self.name)

    def params(self) -> SamplingParams:
        """Return the sampling parameters of a row that sets none itself, as the engine gets them."""
        params, schema = self.sampling.params(), self.output.json_schema
        if self.output.confidence:
            params = replace(params, confidence=True)
        return params if schema is None else replace(params, json_schema=schema)

    def given_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the job file sets, by name, with their values as the engine gets them."""
        schema = self.output.json_schema
        return self.sampling.given_params() | ({} if schema is None else {"json_schema": schema})

    @property
    def requests(self) -> bool:
        """Return True if rows are OpenAI requests, which contain their own prompts and parameters."""
        return self.prompt is None or self.prompt.source is None

    @property
    def chat_template(self) -> str | None:
        """Return the text of the file `prompt.chat_template`, as read when the job was loaded.

        None if the job names no file.
        """
        return self._chat_template

    @property
    def prompting(self) -> PromptSection:
        """Return the section `prompt`, or its defaults if the job has none."""
        return self.prompt or PromptSection()

    @property
    def carried(self) -> tuple[str, ...]:
        """Return the input columns that are copied to the results: `output.columns` and `input.expected`."""
        columns, expected = self.output.columns, self.input.expected
        return columns if expected is None or expected in columns else (*columns, expected)

    @property
    def attempts(self) -> int:
        """Return the maximum number of attempts per row: the first, and one per item of `on_invalid`."""
        return 1 + len(self.on_invalid)

    @property
    def samples(self) -> int:
        """Return the number of answers to compute per row (`n` or `best_of`). A row may set another number."""
        return max(self.sampling.n, self.sampling.best_of)

    @property
    def published_samples(self) -> int:
        """Return the number of answers to publish per row (`n`). A row may set another number."""
        return self.sampling.n if self.sampling.chooses else self.samples

    @property
    def rows_of_answers(self) -> int:
        """Return the number of result rows per input row: one per answer, or 1 with `output.explode: false`.

        An input row that sets its number of answers itself may have another number.
        """
        return self.published_samples if self.output.explode else 1

    @property
    def mixes_classes(self) -> bool:
        """Return True if engines may run on several machine classes, such as two models of GPU.

        Their answers may differ, so the result then has a column with the machine class of each row's engine.
        """
        return self.ray is not None and self.ray.classes == "any"

    @property
    def has_samples(self) -> bool:
        """Return True if a row may have several answers: by `n`, by a column, or in OpenAI requests."""
        return self.sampling.asks_samples or (self.requests and self.task in ("generate", "embed"))

    @property
    def embeds(self) -> bool:
        """Return True if answers may be vectors: with task: embed, or if rows are OpenAI requests."""
        return self.task == "embed" or (self.task == "generate" and self.requests)

    @property
    def source(self) -> Path:
        """Return the absolute path of the job file. Relative paths start from its folder."""
        return self._source

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """Return the overrides as passed to `load_job`: pairs of a dotted key and YAML text."""
        return self._overrides

    @property
    def date(self) -> str | None:
        """Return the date that replaced ${date} when the job was loaded, or None if no option contains ${date}."""
        return self._date

    @property
    def results_root(self) -> Path:
        """Return the result folder without its ${date}.

        The state folder and the report are next to it, and shared by the results of all dates.
        """
        return self._root

    def first_rows(self, limit: int) -> Job:
        """Return a trial of the job: a copy that runs only the first `limit` rows, and has another result folder.

        Args:
            limit: The number of rows. `input.min_rows` does not apply.
        """
        path = trial_results(self._root, limit)
        fewest = limit if self.input.limit is None else min(limit, self.input.limit)
        return self.model_copy(
            update={
                "output": self.output.model_copy(update={"path": path}),
                "input": self.input.model_copy(update={"limit": fewest, "min_rows": None}),
            }
        )

    def place(self, where: str) -> str:
        """Return where a key of the job file was set, as "FILE: line N: KEY" or "FILE: --set KEY", for error messages.

        Args:
            where: The dotted key, such as "input.path".
        """
        line = self._line(where)
        if where in dict(self._overrides):
            where = f"--set {where}"
        elif line is not None:
            where = f"line {line}: {where}"
        return f"{self.source}: {where}"

    def mistake(self, where: str, message: str) -> JobFileError:
        """Return an error about a key of the job file, for a mistake found after loading, such as a missing column.

        Args:
            where: The dotted key, such as "input.path". The error has its line.
            message: The problem.
        """
        return JobFileError(str(self.source), [Mistake(where, message, self._line(where))])

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add lines of the job file to the mistakes of a JobFileError that is raised in the `with` block."""
        try:
            yield
        except JobFileError as error:
            if error.path != str(self.source):
                raise
            found = [one if one.line else replace(one, line=self._line(one.where)) for one in error.mistakes]
            raise JobFileError(error.path, found) from error

    def _line(self, where: str) -> int | None:
        return self._lines.get(where, self._lines.get(where.split(".")[0]))

    def identity_json(self) -> str:
        """Return the options that determine the rows of a result and their contents, as canonical JSON.

        A result that was made with other JSON is outdated. Options at their default are omitted.
        """
        dump = self.model_dump(mode="json", exclude_defaults=True)
        identity: dict[str, Any] = {key: dump[key] for key in _IDENTITY_SECTIONS if key in dump}
        for name in ("sql_memory", "workers", "allow_empty", "min_rows"):
            identity["input"].pop(name, None)
        if "prompt" in identity:  # the contents of the file count instead, with the tokenizer's files
            identity["prompt"].pop("chat_template", None)
        # The default of older results; the context of the work keys distinguishes it from auto
        if self.model.quantization == "none":
            del identity["model"]["quantization"]
        output = dump["output"]
        identity |= {key: output[key] for key in _SHAPES_RESULTS if output.get(key)}
        identity |= {} if self.output.explode else {"explode": False}
        identity |= {"engine_class": True} if self.mixes_classes else {}
        if self.requests:  # explicit parameters count there, even at their default
            identity["sampling"] = self.sampling.explicit_options()
        return json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @property
    def draft_sources(self) -> tuple[DraftSourceName, ...]:
        """Return the names of the sources of draft tokens, such as "prompt".

        Empty if drafts are off, or answers are no texts.
        """
        if self.task != "generate" or self.drafts == "off":
            return ()
        if isinstance(self.drafts, DraftModelSection):
            return AUTO_DRAFTS if self.drafts.heads else ("prompt", "answers", "model")
        return AUTO_DRAFTS if self.drafts == "auto" else self.drafts

    @property
    def drafting_job(self) -> Job | None:
        """Return a copy of the job that runs the draft model instead of the model. None without a draft model.

        The answers of the copy become draft tokens of this job.
        """
        drafts = self.drafts
        if not isinstance(drafts, DraftModelSection) or drafts.model is None:
            return None
        model = ModelSection(
            path=drafts.model, dtype=self.model.dtype, quantization=drafts.quantization, calibration="off"
        )
        whole = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}  # a small model needs no sharding
        engine = self.engine.model_copy(update=whole)
        return self.model_copy(update={"model": model, "engine": engine, "drafts": "auto"})

    def describe(self, defaults: bool = False) -> str:
        """Return a text for users with one line per option of the job.

        Args:
            defaults: If False, options with their default value are left out.
        """
        lines = [f"{self.name} ({self.source})"]
        for section, spec in self:
            if section in TASK_SECTIONS and section != self.task and not (section == "embed" and self.embeds):
                continue
            if section == "sampling" and self.task != "generate":
                continue
            if section == "sampling" and self.requests:
                said = [
                    f"    {key}: {option_text(key, value)}"
                    for key, value in self.sampling.explicit_options().items()
                ]
                lines += ["  sampling", *said, "    the rest: as each request says, or as OpenAI's API does"]
            elif isinstance(spec, Section):
                options = list(spec.option_lines(defaults))
                lines += [f"  {section}", *options] if options else []
            elif section != "name" and (defaults or spec != type(self).model_fields[section].default):
                lines.append(f"  {section}: {option_text(section, spec)}")
        return "\n".join(lines)


def load_job(
    given: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[tuple[str, str]] = (),
    date: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> Job:
    """Read and check a job file, or a mapping with its sections. No input is read and nothing is written.

    Args:
        given: Path of the job file, or a mapping. Relative paths start from the file's folder, or from the working
            directory for a mapping.
        overrides: Pairs of a dotted key and YAML text, as for `--set`.
        date: Value of ${date} as YYYY-MM-DD. None: today.
        env: Environment variables, which texts in the file may name.

    Raises:
        InputMissing: The file does not exist.
        JobFileError: The file or its values are invalid; it has all mistakes.
    """
    source = Path(os.path.abspath(_NO_FILE if isinstance(given, Mapping) else given))
    day = _run_date(source, date)
    variables = Variables(day, env)
    if isinstance(given, Mapping):
        file = read_job_values(source, given, overrides, variables)
    else:
        file = read_job_file(source, overrides, variables)
    values = _without_empty_sections(file.values)
    try:
        context = {"folder": file.folder, "source": source, "lines": file.lines()}
        context |= {"overrides": tuple(overrides), "date": day if file.dated else None}
        job = Job.model_validate(values, context=context | {"dated_output": file.dated.get(_OUTPUT_PATH)})
        job = _with_template_file(_with_schema_file(job))
        alike = not job.requests and not job.sampling.from_columns
        findings = list(ladder_findings(job.on_invalid, job.params(), alike))
    except ValidationError as error:
        job, findings = None, findings_of(error, Job, values)
    findings += check(values, file)
    mistakes = [*file.mistakes, *(file.mistake(one) for one in findings if one.loc not in file.broken)]
    if job is None or mistakes:
        raise JobFileError(str(source), _in_order(mistakes))
    return job


def _with_schema_file(job: Job) -> Job:
    path = job.output.schema_file
    if path is None or job.output.json_schema is not None:
        return job
    try:
        schema = read_schema_file(path)
    except ValueError as error:
        raise job.mistake("output.schema_file", str(error)) from None
    return job.model_copy(update={"output": job.output.model_copy(update={"json_schema": schema})})


def _with_template_file(job: Job) -> Job:
    path = None if job.prompt is None else job.prompt.chat_template
    if path is None:
        return job
    try:
        job._chat_template = read_template_file(path)
    except ValueError as error:
        raise job.mistake("prompt.chat_template", str(error)) from None
    return job


def _run_date(source: Path, date: str | None) -> str:
    if date is None or _is_day(date):
        return date or datetime.date.today().isoformat()
    mistake = Mistake("--date", f"found {json.dumps(date)}; it must be a day that exists, as YYYY-MM-DD")
    raise JobFileError(str(source), [mistake])


def _is_day(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _without_empty_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    # A section is null if all its keys are commented out
    sections = {name for name, info in Job.model_fields.items() if isinstance(info.annotation, type)} - {
        "name"
    }
    return {key: {} if value is None and key in sections else value for key, value in values.items()}


def _in_order(mistakes: Sequence[Mistake]) -> list[Mistake]:
    # Mistakes without a line (a missing section, a --set) come last, in their order
    return sorted(dict.fromkeys(mistakes), key=lambda one: (one.line is None, one.line or 0))


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a job file, with a description of every option."""
    schema = _without_markup(Job.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _without_markup(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_markup(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _without_markup(part) for key, part in schema.items()}
    if isinstance(text := parts.get("description"), str):
        parts["description"] = without_markup(text)
    return parts
