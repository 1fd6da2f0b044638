"""What is checked before anything is computed. `run`, `validate` and `preview` all call it, so that they agree.

`check_setup` looks at everything but the rows: checkpoint, device, tokenizer, destination. `check_input` looks at the
files and their columns. `rehearse` prepares the first rows of every file as a run would.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa

from batchinfer.core.errors import ErrorBudgetExceeded, Unavailable
from batchinfer.core.request import RowError
from batchinfer.data.columns.answer_check import CHECK_VERSION
from batchinfer.data.columns.schema_columns import NoColumns, SchemaColumns, schema_columns
from batchinfer.data.constraints.answer_bound import Unbounded, most_tokens
from batchinfer.data.constraints.constraint_check import constraint_problem
from batchinfer.data.constraints.generated_schema import parsed_schema
from batchinfer.data.index.index import MARKER, Index
from batchinfer.data.index.ingest import IngestOptions, ingest
from batchinfer.data.input.job_input import input_files, open_input
from batchinfer.data.input.reader import Reader, SampleSize
from batchinfer.data.input.sql import query_columns
from batchinfer.data.prompts.columns import Columns, choose_columns
from batchinfer.data.prompts.mode import check_chat_template, check_templates, choose_mode
from batchinfer.data.prompts.sampling_fields import CHECKS
from batchinfer.data.results.error_budget import Budget, budget_text
from batchinfer.data.results.error_summary import summarise_errors
from batchinfer.data.results.join import ErrorCounts
from batchinfer.data.results.manifest import check_destination
from batchinfer.data.storage.state import StateFolder
from batchinfer.data.storage.temporary import temporary_folder
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.job.check import LOGPROBS, RESULT_COLUMNS
from batchinfer.machine.hardware import Hardware, nvidia_gpus
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.resolve import Setting, resolve

SPACE_PER_INPUT_BYTE = 2  # at least: tokens and carried columns take about the input's size each
FIRST_ROWS = 512  # of every file: one batch of each format


@dataclass(frozen=True, slots=True)
class Setup:
    """A job's model, device and tokenizer, found right."""

    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    columns: SchemaColumns | None  # of answers that `output.schema` describes
    most_tokens: int | None = None  # of an answer, where `sampling.max_tokens` is to fit the job's constraint

    def context(self, digests: MutableMapping[str, str]) -> bytes:
        """The digest of all but the rows that decides an answer. `digests` remembers those of weight files."""
        fingerprint = self.checkpoint.fingerprint(digests)
        checked = 0 if self.columns is None else CHECK_VERSION
        return self.setting.context(self.checkpoint, fingerprint, self.tokenizer.fingerprint, checked)


@dataclass(frozen=True, slots=True)
class InputFacts:
    """An input that has the columns that the job names. `files` is 0 for a query."""

    files: int
    bytes: int
    warnings: tuple[str, ...]


def check_setup(
    job: Job, state: StateFolder, replace: bool = False, hardware: Hardware | None = None
) -> Setup:
    """`hardware`: a machine other than this one, for which the job is only planned.

    Raises JobFileError, SecurityRefusal, Unavailable, OutputConflict, StorageError and what the tokenizer raises."""
    checkpoint = open_checkpoint(job.model.path)
    if hardware is None:
        _check_device(job)
    setting = resolve(job, checkpoint, hardware)
    if setting.quantization == "stored":
        checkpoint = checkpoint.as_stored()
    tokenizer = Tokenizer.load(job.model.path)
    check_templates(job)
    check_chat_template(job, tokenizer)
    check_destination(state.results, job.name, replace, ours=state.has_published)
    state.check_writable()
    state.refuse_newer()
    _check_followed(job, tokenizer)
    return Setup(checkpoint, setting, tokenizer, _columns(job, tokenizer), _most_tokens(job))


def _check_followed(job: Job, tokenizer: Tokenizer) -> None:
    """Raises JobFileError where no constraint can be followed with this tokenizer, and the job has one."""
    if job.params().constraint is None:
        return
    from batchinfer.data.constraints.grammar_tokenizer import grammar_problem  # 8 MB, for those who need it

    if (problem := grammar_problem(tokenizer.definition)) is not None:
        raise job.mistake(_constraint_key(job), problem)


def _most_tokens(job: Job) -> int | None:
    """Raises JobFileError where the job's constraint has no bound to fit."""
    params = job.params()
    if not job.sampling.fits or params.constraint is None:
        return None
    try:
        return most_tokens(params)
    except Unbounded as error:
        raise job.mistake("sampling.max_tokens", f"is fit, and answers have no bound: {error}") from None


def _columns(job: Job, tokenizer: Tokenizer) -> SchemaColumns | None:
    """The columns of the job's schema, which can be followed. Raises JobFileError."""
    where = _constraint_key(job)
    if (problem := constraint_problem(job.params(), tokenizer.definition)) is not None:
        raise job.mistake(where, problem.partition(": ")[2] or problem)
    if job.output.json_schema is None:
        return None
    try:
        columns = schema_columns(parsed_schema(job.output.json_schema), job.output.column)
    except NoColumns as error:
        raise job.mistake(where, str(error)) from None
    taken = {name.casefold(): name for name in (*RESULT_COLUMNS, LOGPROBS, *job.output.columns)}
    for name in columns.schema.names:
        if name.casefold() in taken:
            text = f"its property {name!r} has the name of another column of the result; give output.column a name"
            raise job.mistake(where, text)
    return columns


def _constraint_key(job: Job) -> str:
    """Where the job file says what answers look like."""
    if job.output.schema_file is not None:
        return "output.schema_file"
    return "output.schema" if job.output.json_schema is not None else f"sampling.{job.params().constraint}"


def _check_device(job: Job) -> None:
    """What `auto` finds is there; a device that the job names may not be. In a container nvidia-smi may be missing."""
    if job.engine.device != "cuda":
        return
    if version("torch").endswith("+cpu"):
        raise Unavailable(
            "engine.device is cuda, and the torch that is installed computes on CPUs only; "
            "use device: cpu, or install torch with CUDA"
        )
    if not nvidia_gpus() and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        raise Unavailable(
            "engine.device is cuda, and this machine has no NVIDIA GPU; use device: cpu, or auto"
        )


def check_input(job: Job, setup: Setup, state: StateFolder) -> InputFacts:
    """Raises InputMissing, InputCorrupt, StorageError, and JobFileError for columns that the input lacks."""
    if job.input.sql is not None:
        names = query_columns(job.input.sql, job.source)
        schema = pa.schema([(name, pa.null()) for name in names])
        mode = choose_mode(job, setup.tokenizer, lambda: "table")
        return InputFacts(0, 0, tuple(_warnings(job, choose_columns(job, mode, schema))))
    files = input_files(job)
    size = sum(file.size for file in files)
    indexed = any(state.scratch.glob(f"*/{MARKER}"))  # then the tokens of an unfinished run are there already
    if not indexed:
        state.check_space(SPACE_PER_INPUT_BYTE * size)
    reader = open_input(job, files)
    mode = choose_mode(job, setup.tokenizer, reader.shape)
    columns = choose_columns(job, mode, reader.schema())
    _look_for(columns, reader, job.input.limit)
    return InputFacts(len(files), size, tuple(_warnings(job, columns)))


def _look_for(columns: Columns, reader: Reader, limit: int | None) -> None:
    """Reads rows until each column that the job names has stood in one: mostly the first batch."""
    for batch in reader.batches(limit=limit):
        for row in batch.rows:
            if not isinstance(row, RowError):
                columns.note(row)
        if not columns.missing:
            return
    columns.check_all_seen()


def _warnings(job: Job, columns: Columns) -> Iterator[str]:
    """A column that looks like a sampling parameter and that nothing uses may have been meant as one."""
    used = {name for _, name in columns.wanted} | set(columns.variables) | set(columns.send or columns.known)
    idle = [name for name in columns.known if name in CHECKS and name not in used]
    if idle:
        yield (
            f"the input has the column{'s' * (len(idle) > 1)} {', '.join(idle)}, but the job ignores "
            f"{'them' if len(idle) > 1 else 'it'}; to let rows set their own sampling parameters, name "
            f"{'them' if len(idle) > 1 else 'it'} in sampling.from_columns"
        )


def first_index(job: Job, setup: Setup, scratch: Path, rows: int) -> Index:
    """The index of the first rows of every file, made in `scratch` as a run makes it."""
    options = IngestOptions(
        context=b"",
        max_model_len=setup.setting.max_model_len,
        vocab_size=setup.checkpoint.spec.vocab,
        now=datetime.now().astimezone(),
        workers=1,
        sample=SampleSize(rows),
    )
    return ingest(job, setup.tokenizer, options, scratch)


def rehearse(job: Job, setup: Setup) -> list[str]:
    """Prepare the first rows of every file; what was found, for people. The rows of a query are not looked at.

    Raises what a run would, ErrorBudgetExceeded included where these rows are all that there are.
    """
    if job.input.sql is not None:
        return ["rows: not checked here; the rows of a query (input.sql) are checked when the job runs"]
    with temporary_folder("validate") as scratch:
        index = first_index(job, setup, Path(scratch), FIRST_ROWS)
        errors = summarise_errors(index.index_parts)
    complete = _is_complete(index, job.input.limit)
    budget = Budget(index.rows, job.on_error.max_error_rate, job.on_error.publish)
    if complete and budget.exceeded(index.error_rows):
        counts = ErrorCounts(index.rows, index.error_rows, 0, 0)
        raise ErrorBudgetExceeded(budget_text(counts, budget, errors))
    which = (
        f"all {index.rows:,}" if complete else f"the first {FIRST_ROWS} of each file, {index.rows:,} in all,"
    )
    if not index.error_rows:
        return [f"rows: {which} can be run"]
    return [f"rows: {index.error_rows:,} of {which} would become error rows:", errors.text()]


def _is_complete(index: Index, limit: int | None) -> bool:
    """Whether a sample holds every row of the job: each file was read to its end, or to the job's own limit."""
    whole = len(index.sha256) == len(index.inputs)
    return whole or (limit is not None and limit <= FIRST_ROWS and index.rows == limit)
