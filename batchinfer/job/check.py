"""Checks that involve several fields: options that exclude or need each other, templates, overlapping folders.

Works on the values as written: a wrong field does not hide other mistakes.
"""

from __future__ import annotations

import difflib
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.sandbox import SandboxedEnvironment

from batchinfer.core.hub import NoModel, locate_model
from batchinfer.core.sampling import CONSTRAINTS
from batchinfer.job.file import JobFile, absolute, not_utf8
from batchinfer.job.prompt import PROMPT_SOURCES
from batchinfer.job.prompt_check import SOURCES_TEXT, prompt_findings
from batchinfer.job.tasks import task_findings
from batchinfer.job.yaml_tree import Finding, Loc, shorten

RESULT_COLUMNS = (
    "row_id",
    "file",
    "row_index",
    "custom_id",
    "status",
    "generated_text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "error_code",
    "error_class",
    "error_message",
    "retryable",
)
# Columns that replace the columns of texts, by task
TASK_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "embed": ("embedding",),
    "score": ("logprob", "is_greedy", "scored_tokens"),
    "classify": ("label", "probability", "probabilities"),
    "rerank": ("score",),
}
ATTEMPT = "attempt"  # column of a job with a ladder (on_invalid)
SAMPLE = "sample_index"  # column of a job with several answers per row (sampling.n)
LOGPROBS = "logprobs"  # column with log-probabilities, and the parameter that asks for them
PROMPT_LOGPROBS = "prompt_logprobs"  # the same for the prompt
ENGINE_CLASS = "engine_class"  # column of a job with ray.classes: any
CONFIDENCE = "confidence"  # column of a job with output.confidence
REASONING_COLUMNS = ("reasoning", "reasoning_tokens")  # columns of a job whose answers mark reasoning
TOOL_CALLS_COLUMN = "tool_calls"  # column of a job whose answers may call tools
LINE_FORMATS = ("jsonl", "openai", "csv")
CSV_OPTIONS = ("delimiter", "quote")
_OPENAI_KEYS = {"custom_id", "method", "url", "body"}
_PEEK_BYTES = 1 << 20  # a longer first line is not examined: the format must be named
_OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def check(values: Mapping[str, Any], file: JobFile) -> list[Finding]:
    """Find the mistakes of a job file that involve several of its fields.

    Fields of a wrong type are skipped, because they are already reported.

    Args:
        values: The values of the job file by section.
        file: The same file with the line of each value.
    """
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    return [
        *_input(sections.get("input")),
        *_prompt(values, sections, file),
        *_templates(sections.get("prompt", {}), file),
        *_sampling(sections.get("sampling", {})),
        *_from_columns(sections),
        *_adapters(sections),
        *_constraints(sections),
        *_fit(sections, file),
        *_confidence(sections, file),
        *task_findings(values, _has_requests(sections, file)),
        *_samples(sections, file),
        *_lists(sections, file),
        *_columns(sections.get("output", {}), _result_columns(values, sections.get("sampling", {}))),
        *_expected(sections, _result_columns(values, sections.get("sampling", {}))),
        *_arithmetic(sections.get("model", {}), sections.get("engine", {})),
        *_ranks(sections.get("engine", {})),
        *_ray(sections),
        *_folders(sections, file),
        *_drafts(values),
    ]


def _given(section: Mapping[str, Any], *names: str) -> list[str]:
    return [name for name in names if section.get(name) is not None]


def _input(section: Mapping[str, Any] | None) -> Iterator[Finding]:
    if section is None:
        return
    given = _given(section, "path", "sql")
    if not given:
        yield Finding(("input",), "has neither path nor sql", "give one of the two")
    if len(given) == 2:
        yield Finding(
            ("input", "sql"), "is given together with path; give exactly one of the two", "remove one"
        )
    if "sql" in given and section.get("format") not in (None, "auto"):
        yield Finding(("input", "format"), "applies only to files (path), not to a query (sql)", "remove it")
    if given == ["path"] and section.get("sql_memory") is not None:
        yield Finding(
            ("input", "sql_memory"), "applies only to a query (sql), not to files (path)", "remove it"
        )
    yield from _written(section)
    least, most = section.get("min_rows"), section.get("limit")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        message = f"{least} rows are more than input.limit, {most}, lets the job read"
        yield Finding(("input", "min_rows"), message, "lower it, or remove limit")
    openai = section.get("format") == "openai"
    if openai and section.get("id") is not None:
        message = "is not for OpenAI batch files: their custom_id is the id"
        yield Finding(("input", "id"), message, "remove it")
    if openai and section.get("expected") is not None:
        message = "is not for OpenAI batch files: their requests have no other fields"
        yield Finding(("input", "expected"), message, "make rows with a column for it, or remove it")
    if section.get("unique_ids") is True and not openai and section.get("id") is None:
        yield Finding(
            ("input", "unique_ids"), "is true, but no input.id says which column to look at", "give id"
        )


def _drafts(values: Mapping[str, Any]) -> Iterator[Finding]:
    task, drafts = values.get("task", "generate"), values.get("drafts")
    if isinstance(drafts, list | tuple | dict) and task != "generate":
        message = f"names sources, and with task: {task} no answers are generated"
        yield Finding(("drafts",), message, "remove it")
    if isinstance(drafts, list | tuple) and len({str(name) for name in drafts}) < len(drafts):
        yield Finding(("drafts",), "names a source twice", "name each source once")
    if isinstance(drafts, dict):
        yield from _draft_section(drafts)


def _draft_section(drafts: Mapping[str, Any]) -> Iterator[Finding]:
    model, heads = drafts.get("model"), drafts.get("heads")
    if (model is None) == (heads is None):
        both = "neither a model nor heads" if model is None else "a model and heads"
        yield Finding(("drafts",), f"names {both}", "give drafts.model or drafts.heads")
    for key in ("quantization", "runs"):
        if heads is not None and drafts.get(key, "auto") != "auto":
            yield Finding(("drafts", key), "is for drafts.model, not for heads", "remove it")


def _written(section: Mapping[str, Any]) -> Iterator[Finding]:
    # The input is in another format than text, so options for text files have no effect
    form = section.get("format", "auto")
    for names, formats, readers in (
        (("encoding",), LINE_FORMATS, "JSONL and CSV"),
        (CSV_OPTIONS, ("csv",), "CSV"),
    ):
        for name in _given(section, *names):
            if section.get("path") is None and section.get("sql") is not None:
                message = f"applies only to files of {readers} (path); in a query (sql), give it to read_csv"
                yield Finding(("input", name), message, "remove it")
            elif isinstance(form, str) and form not in ("auto", *formats):
                yield Finding(("input", name), f"belongs to {readers}; input.format is {form}", "remove it")
    delimiter, quote = section.get("delimiter"), section.get("quote", '"')
    if delimiter is not None and delimiter == quote:
        yield Finding(
            ("input", "quote"), f"is {shorten(quote)}, the same as delimiter", "give them different ones"
        )


def _prompt(
    values: Mapping[str, Any], sections: Mapping[str, dict[str, Any]], file: JobFile
) -> Iterator[Finding]:
    named = sections.get("input", {}).get("format") == "openai"
    section = values.get("prompt")
    given = isinstance(section, dict) and bool(_given(section, *PROMPT_SOURCES))
    if named and given:
        message = "is given, but the lines of an OpenAI batch file (input.format: openai) hold the prompts"
        yield Finding(("prompt",), message, "remove the section or the format")
        return
    requests = named or (not given and _is_openai(sections.get("input", {}), file))
    if isinstance(section, dict):
        yield from prompt_findings(section, requests)
    elif section is None and not requests:
        message = f"is missing; it must be a section with exactly one of {SOURCES_TEXT}"
        yield Finding(("prompt",), message, "OpenAI batch files need none: then write input.format: openai")


def _has_requests(sections: Mapping[str, dict[str, Any]], file: JobFile) -> bool:
    # The format names OpenAI requests, or the input file has them and the job has no prompt
    source, given = sections.get("input", {}), _given(sections.get("prompt", {}), *PROMPT_SOURCES)
    return source.get("format") == "openai" or (not given and _is_openai(source, file))


def _is_openai(section: Mapping[str, Any], file: JobFile) -> bool:
    for path in _inputs(section, file)[:1]:
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as lines:
                first = lines.read(_PEEK_BYTES).lstrip(b"\xef\xbb\xbf \r\n").split(b"\n", 1)[0]
            value = json.loads(first)
        except (OSError, EOFError, ValueError, zlib.error):
            return False  # missing, not a single file, or not JSON: reported when the input is read
        return isinstance(value, dict) and value.keys() >= _OPENAI_KEYS
    return False


def _templates(section: Mapping[str, Any], file: JobFile) -> Iterator[Finding]:
    for name in ("system", "user"):
        text = section.get(name)
        if isinstance(text, str):
            yield from _template(text, ("prompt", name), file.place(("prompt", name)).text_line)


def _template(text: str, loc: Loc, first_line: int | None) -> Iterator[Finding]:
    try:
        faults = list(_template_faults(text))
    except RecursionError:
        faults = [(1, "is a Jinja template that nests too deeply", "split it with {% set %}")]
    for number, message, hint in faults:
        yield Finding(loc, message, hint, None if first_line is None else first_line + number - 1)


def _template_faults(text: str) -> Iterator[tuple[int, str, str]]:
    # Only parsed: evaluating even a constant expression could take forever
    environment = SandboxedEnvironment()
    try:
        tree = environment.parse(text)
    except TemplateSyntaxError as error:
        yield error.lineno, f"is no valid Jinja template: {error.message}", "{{ column }} is a row's value"
        return
    for other in tree.find_all(_OTHER_FILES):
        yield other.lineno, "includes another template, which a job's template cannot do", "write it out here"
    for kind, used, known in (
        ("filter", nodes.Filter, environment.filters),
        ("test", nodes.Test, environment.tests),
    ):
        for node in tree.find_all(used):
            if node.name not in known:
                near = difflib.get_close_matches(node.name, known, 1)
                hint = f"did you mean {near[0]}?" if near else "Jinja's documentation lists them"
                yield node.lineno, f"uses the {kind} {shorten(node.name)}, which Jinja does not have", hint


def _whole(section: Mapping[str, Any], name: str, default: int) -> int | None:
    value = section.get(name, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _sampling(section: Mapping[str, Any]) -> Iterator[Finding]:
    most, least = _whole(section, "max_tokens", 256), _whole(section, "min_tokens", 0)
    if most is not None and least is not None and 1 <= most < least:
        message = f"is {least}, more than max_tokens, which is {most}; it must be at most that"
        yield Finding(("sampling", "min_tokens"), message)


def _from_columns(sections: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    if (
        sections.get("sampling", {}).get("from_columns")
        and sections.get("input", {}).get("format") == "openai"
    ):
        message = "is not for OpenAI batch files: the body of each request holds its parameters"
        yield Finding(("sampling", "from_columns"), message, "remove it")


def _adapters(sections: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    model = sections.get("model", {})
    listed, name = model.get("adapters") or {}, model.get("adapter")
    if isinstance(listed, dict) and isinstance(name, str) and name not in listed:
        have = f"there are {', '.join(map(str, listed))}" if listed else "there are none"
        yield Finding(("model", "adapter"), f'is "{name}", which model.adapters does not list; {have}')
    if model.get("adapter_from_column") is not None and not listed:
        message = "names a column of adapters, but model.adapters lists none"
        yield Finding(("model", "adapter_from_column"), message, "list them, or remove it")
    if model.get("adapter_from_column") is not None and sections.get("input", {}).get("format") == "openai":
        message = "is not for OpenAI batch files: the field model of a request names its adapter"
        yield Finding(("model", "adapter_from_column"), message, "remove it")


def _constraints(sections: Mapping[str, dict[str, Any]]) -> Iterator[Finding]:
    sampling, output = sections.get("sampling", {}), sections.get("output", {})
    schemas = [("output", name) for name in ("schema", "schema_file") if output.get(name) is not None]
    given = [*schemas, *(("sampling", name) for name in CONSTRAINTS if sampling.get(name))]
    for loc in given[1:]:
        first = ".".join(given[0])
        yield Finding(
            loc, f"is given together with {first}, and an answer can have only one constraint", "remove one"
        )
    if not schemas and output.get("column") is not None:
        message = "needs an output.schema, which describes the answers in that column, but there is none"
        yield Finding(("output", "column"), message, "give output.schema, or remove it")
    of_rows = sampling.get("from_columns")
    named = [name for name in CONSTRAINTS if isinstance(of_rows, dict | tuple) and name in of_rows]
    if schemas and named:
        message = f"names {named[0]}, but with output.schema all rows have the same schema"
        yield Finding(("sampling", "from_columns"), message, "remove one of the two")


def _confidence(sections: Mapping[str, dict[str, Any]], file: JobFile) -> Iterator[Finding]:
    # output.confidence needs listed answers, and uses log-probabilities itself
    sampling, output = sections.get("sampling", {}), sections.get("output", {})
    if output.get("confidence") is not True:
        return
    loc = ("output", "confidence")
    if "prompt" not in sections or _is_openai(sections.get("input", {}), file):
        yield Finding(loc, "is true, which is not for OpenAI batch files", "remove it")
    schemas = [name for name in ("schema", "schema_file") if output.get(name) is not None]
    if not schemas and not sampling.get("choice"):
        message = "is true, but the job lists no values that answers may have"
        yield Finding(loc, message, "give output.schema or sampling.choice")
    per_row = sampling.get("from_columns")
    named = set(per_row) if isinstance(per_row, Mapping | tuple) else set()
    if sampling.get(LOGPROBS) is not None or LOGPROBS in named:
        message = (
            "is true, which does not go with sampling.logprobs: a token has one logarithm, of either kind"
        )
        yield Finding(loc, message, "remove one of the two")
    if sampling.get("best_of", 1) != 1:
        message = "is true, which does not go with sampling.best_of: the best answers are chosen by log-probabilities"
        yield Finding(loc, message, "remove one of the two")
    if given := sorted(named.intersection(CONSTRAINTS)):
        message = f"is true, but rows have their own {given[0]} (sampling.from_columns)"
        yield Finding(loc, message, "remove one of the two")


def _fit(sections: Mapping[str, dict[str, Any]], file: JobFile) -> Iterator[Finding]:
    # `max_tokens: fit` takes the length from a constraint, which the job or its rows must have
    sampling, output = sections.get("sampling", {}), sections.get("output", {})
    if sampling.get("max_tokens") != "fit" or _is_openai(sections.get("input", {}), file):
        return
    of_rows = sampling.get("from_columns")
    given = [name for name in ("schema", "schema_file") if output.get(name) is not None]
    given += [name for name in CONSTRAINTS if sampling.get(name)]
    given += [name for name in CONSTRAINTS if isinstance(of_rows, dict | tuple) and name in of_rows]
    if not given and sections.get("input", {}).get("format") != "openai":
        message = "is fit, but the job has no constraint that bounds the answers"
        yield Finding(
            ("sampling", "max_tokens"), message, "give output.schema or sampling.choice, or a number"
        )


def _samples(sections: Mapping[str, dict[str, Any]], file: JobFile) -> Iterator[Finding]:
    sampling = sections.get("sampling", {})
    given = {name: sampling.get(name, 1) for name in ("n", "best_of")}
    wanted = {name: many for name, many in given.items() if isinstance(many, int) and many > 1}
    if not wanted:
        return
    name, n = next(iter(wanted.items()))
    if len(wanted) == 2 and wanted["best_of"] < wanted["n"]:
        message = (
            f"is {wanted['best_of']}, fewer than sampling.n, which is {wanted['n']}; it must be at least that"
        )
        yield Finding(("sampling", "best_of"), message)
    per_row = sampling.get("from_columns")
    if "best_of" in wanted:
        yield from _best_of(wanted["best_of"], per_row, _is_openai(sections.get("input", {}), file))
    named = isinstance(per_row, Mapping | tuple) and "temperature" in per_row
    usual = 1 if _is_openai(sections.get("input", {}), file) else 0
    if not named and not sampling.get("temperature", usual):
        message = f"is {n}, but temperature is 0, so all answers to a row would be the same"
        yield Finding(("sampling", name), message, "set sampling.temperature, for example to 0.8")


def _lists(sections: Mapping[str, dict[str, Any]], file: JobFile) -> Iterator[Finding]:
    # With output.explode: false, the answers to a row are in lists
    sampling, source = sections.get("sampling", {}), sections.get("input", {})
    if sections.get("output", {}).get("explode") is not False:
        return
    loc, per_row = ("output", "explode"), sampling.get("from_columns")
    if _is_openai(source, file):
        message = "is false, which is not for OpenAI batch files: --to-openai writes a line with all choices"
        yield Finding(loc, message, "remove it")
    elif isinstance(per_row, Mapping | tuple) and "n" in per_row:
        message = "is false, and n is read from a column: lists need the same number of answers for all rows"
        yield Finding(loc, message, "remove one of the two")
    elif sampling.get("n", 1) == 1 and sampling.get("best_of", 1) == 1:
        yield Finding(loc, "is false, but each row has one answer", "set sampling.n, or remove it")
    if source.get("expected") is not None:
        message = "is false, and input.expected is compared with single answers"
        yield Finding(loc, message, "remove one of the two")


def _best_of(best_of: int, per_row: object, is_openai: bool) -> Iterator[Finding]:
    # Rows that set the number of answers themselves exclude sampling.best_of
    if is_openai:
        message = f"is {best_of}, which is not for OpenAI batch files: a request says itself how many answers it wants"
        yield Finding(("sampling", "best_of"), message, "set n, or give the prompt section")
    elif isinstance(per_row, Mapping | tuple) and "n" in per_row:
        message = f"is {best_of}, and n is read from a column; best_of needs the same number of answers for all rows"
        yield Finding(("sampling", "best_of"), message, "remove one of the two")


def _arithmetic(model: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[Finding]:
    # With device: auto, the device is not known here; plan/setup then checks the data types that a CPU supports
    if engine.get("device") != "cpu":
        return
    if model.get("kv_cache_dtype") == "fp8":
        message = "is fp8, which only a GPU can read and write"
        yield Finding(("model", "kv_cache_dtype"), message, "use int8, or device: cuda")
    if model.get("quantization") == "fp8":
        message = "is fp8, but only a GPU can multiply in fp8"
        yield Finding(("model", "quantization"), message, "use int8, or device: cuda")
    if model.get("dtype") != "float16":
        return
    message, hint = "not available in float16 on a CPU", "remove it, or use dtype: bfloat16 or float32"
    if (codes := model.get("quantization")) in ("int4", "int8"):
        yield Finding(("model", "quantization"), f"is {codes}, which is {message}", hint)
    if model.get("kv_cache_dtype") == "int8":
        yield Finding(("model", "kv_cache_dtype"), f"is int8, which is {message}", hint)
    if engine.get("deterministic") is True:
        yield Finding(("engine", "deterministic"), f"is true, which is {message}", hint)


def _ranks(engine: Mapping[str, Any]) -> Iterator[Finding]:
    # Tensor parallelism already distributes experts
    tensor, experts = (_whole(engine, f"{kind}_parallel_size", 1) for kind in ("tensor", "expert"))
    if tensor is not None and experts is not None and tensor > 1 and experts > 1:
        message = f"is {experts}, but tensor_parallel_size is {tensor} and distributes experts already"
        yield Finding(("engine", "expert_parallel_size"), message, "give one of the two")


def _ray(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    ray, asked = sections.get("ray"), sections.get("engine", {}).get("data_parallel", "auto")
    if ray is None:
        return
    if asked != "auto":
        message = f"is {asked}, and ray is given: on a Ray cluster, ray.engines is the number of engines"
        yield Finding(("engine", "data_parallel"), message, "remove it")
    bounds = ray.get("engines")
    if isinstance(bounds, Mapping):
        least, most = _whole(bounds, "min", 1), _whole(bounds, "max", 256)
        if least is not None and most is not None and least > most:
            yield Finding(("ray", "engines"), f"has min {least} above max {most}", "swap the two")


def task_columns(task: str) -> tuple[str, ...]:
    """Return the names of the columns that a task such as "embed" adds to the result.

    The task's answers are not texts.
    """
    return (*RESULT_COLUMNS[:5], *TASK_COLUMNS[task], "prompt_tokens", *RESULT_COLUMNS[-4:])


def _result_columns(values: Mapping[str, Any], sampling: Mapping[str, Any]) -> tuple[str, ...]:
    # Without columns that are copied from the input or made by a schema
    ray = values.get("ray")
    classes = [ENGINE_CLASS] if isinstance(ray, Mapping) and ray.get("classes") == "any" else []
    if (task := str(values.get("task"))) in TASK_COLUMNS:
        return (*task_columns(task), *classes)
    per_row = sampling.get("from_columns")
    of_rows = per_row if isinstance(per_row, Mapping | tuple) else ()
    ours = (*RESULT_COLUMNS, ATTEMPT) if values.get("on_invalid") else RESULT_COLUMNS
    many, best = sampling.get("n", 1) != 1 or "n" in of_rows, sampling.get("best_of", 1) != 1
    ours = (*ours, *([SAMPLE] if many or best else []), *classes)
    output = values.get("output")
    if isinstance(output, Mapping) and output.get("confidence") is True:
        ours = (*ours, CONFIDENCE)
    asked = [
        name for name in (LOGPROBS, PROMPT_LOGPROBS) if name in of_rows or sampling.get(name) is not None
    ]
    return (*ours, *([LOGPROBS] if best else []), *asked)


def _columns(section: Mapping[str, Any], taken: Sequence[str]) -> Iterator[Finding]:
    # Like DuckDB, names are compared without case
    columns = section.get("columns")
    seen: dict[str, str] = {}
    for at, column in enumerate(columns if isinstance(columns, tuple) else ()):
        if not isinstance(column, str):
            continue
        folded = column.casefold()
        loc = ("output", "columns", at)
        if folded in taken:
            others = {
                LOGPROBS: "a result with log-probabilities",
                PROMPT_LOGPROBS: "a result with log-probabilities of prompts",
                ATTEMPT: "the result of a job with on_invalid",
                CONFIDENCE: "a result with output.confidence",
                SAMPLE: "a result with several answers to a row",
                ENGINE_CLASS: "the result of a job with ray.classes: any",
                **{
                    name: f"a result of task: {task}"
                    for task, names in TASK_COLUMNS.items()
                    for name in names
                },
            }
            whose = others.get(folded, "every result")
            message = f"{shorten(column)} is the name of a column that {whose} has"
            yield Finding(loc, message, "give it another name with a query: input.sql")
        elif folded in seen:
            message = (
                f"{shorten(column)} is listed twice"
                if seen[folded] == column
                else _alike(column, seen[folded])
            )
            yield Finding(loc, message, "name each column once")
        seen.setdefault(folded, column)


def _expected(sections: Mapping[str, dict[str, Any]], taken: Sequence[str]) -> Iterator[Finding]:
    column = sections.get("input", {}).get("expected")
    if not isinstance(column, str):
        return
    loc = ("input", "expected")
    if column.casefold() in taken:
        message = f"{shorten(column)} is the name of a column that the result has"
        yield Finding(loc, message, "give it another name with a query: input.sql")
    columns = sections.get("output", {}).get("columns")
    for other in columns if isinstance(columns, tuple) else ():
        if isinstance(other, str) and other != column and other.casefold() == column.casefold():
            yield Finding(loc, _alike(other, column), "rename one of the two")


def _alike(one: str, other: str) -> str:
    return f"{shorten(one)} and {shorten(other)} differ only in case, which DuckDB does not tell apart"


def _folders(sections: Mapping[str, dict[str, Any]], file: JobFile) -> Iterator[Finding]:
    model, findings = _model(sections, file)
    yield from findings
    yield from _names_not_utf8({"model": model, "output": _folder_at(sections, "output", file)})
    output = _folder_at(sections, "output", file)
    cache = _folder_at(sections, "cache", file)
    yield from _store(cache, model, _inputs(sections.get("input", {}), file))
    if output is None:
        return
    real = Path(os.path.realpath(output))
    if model is not None and _within(real, model):
        yield _overlap("output", f"{shorten(output, 200)} is the model's folder or inside it")
    if model is not None and Path(os.path.realpath(model)).is_relative_to(real) and not _within(real, model):
        yield _overlap(
            "output", f"{shorten(output, 200)} holds the model, and results replace their folder as a whole"
        )
    if file.path.is_relative_to(output):
        yield _overlap(
            "output",
            f"{shorten(output, 200)} holds the job file, and results replace their folder as a whole",
        )
    if cache is not None and _within(Path(os.path.realpath(cache)), output):
        yield _overlap("cache", f"{shorten(cache, 200)} is the results' folder or inside it")
    for path in _inputs(sections.get("input", {}), file):
        message = _input_overlap(path, real)
        if message:
            yield _overlap("output", f"{shorten(output, 200)} {message}")


def _names_not_utf8(folders: Mapping[str, str | None]) -> Iterator[Finding]:
    for section, folder in folders.items():
        shown = None if folder is None else not_utf8(os.path.realpath(folder))
        if shown is not None:
            message = f"leads to {shorten(shown, 200)}, whose name holds bytes that are not UTF-8"
            yield Finding((section, "path"), message, "rename that folder")


def _model(sections: Mapping[str, dict[str, Any]], file: JobFile) -> tuple[str | None, list[Finding]]:
    path = _folder_at(sections, "model", file)
    if path is None:
        return None, []
    try:
        return str(locate_model(sections["model"]["path"], Path(path))), []
    except NoModel as error:
        return path, [Finding(("model", "path"), str(error), error.hint)]


def _store(cache: str | None, model: str | None, inputs: Sequence[str]) -> Iterator[Finding]:
    # Every run adds files to the store, so it must not be in the model's folder or among the input files
    if cache is None:
        return
    real = Path(os.path.realpath(cache))
    if model is not None and _within(real, model):
        yield _overlap("cache", f"{shorten(cache, 200)} is the model's folder or inside it")
    for path in inputs:
        if _falls_among_inputs(path, real):
            message = (
                f"{shorten(cache, 200)} is among the input {shorten(path, 200)}: a later run would read it"
            )
            yield _overlap("cache", message)


def _overlap(section: str, message: str) -> Finding:
    return Finding((section, "path"), message, "use a separate folder")


def _folder_at(sections: Mapping[str, dict[str, Any]], section: str, file: JobFile) -> str | None:
    text = sections.get(section, {}).get("path")
    return absolute(file.folder, text) if isinstance(text, str) and _usable(text) else None


def _usable(text: str) -> bool:
    return bool(text) and "\0" not in text and not text.startswith("~") and "://" not in text


def _within(path: Path, folder: str) -> bool:
    return path.is_relative_to(os.path.realpath(folder))


def _inputs(section: Mapping[str, Any], file: JobFile) -> list[str]:
    value = section.get("path")
    texts = value if isinstance(value, tuple) else (value,)
    return [absolute(file.folder, text) for text in texts if isinstance(text, str) and _usable(text)]


def _input_overlap(path: str, output: Path) -> str | None:
    base = os.path.realpath(_fixed_part(path))
    if Path(base).is_relative_to(output):
        return f"holds the input {shorten(path, 200)}, and results replace their folder as a whole"
    if _falls_among_inputs(path, output):
        return f"is in the input's folder {shorten(base, 200)}: a later run would read its own results"
    return None


def _falls_among_inputs(path: str, folder: Path) -> bool:
    base = os.path.realpath(_fixed_part(path))
    return folder.is_relative_to(base) and (base == os.path.realpath(path) or _may_match_results(path))


def _fixed_part(path: str) -> str:
    parts = Path(path).parts
    fixed = next((at for at, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))
    return str(Path(*parts[:fixed]))


def _may_match_results(glob: str) -> bool:
    ending = re.search(r"\.[A-Za-z0-9]+$", glob)
    return ending is None or ending[0].lower() == ".parquet"
