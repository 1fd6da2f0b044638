"""The tasks of jobs, and checks of options that need a certain task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from batchinfer.job.prompt import PROMPT_SOURCES
from batchinfer.job.scoring import DEFAULT_ANSWERS
from batchinfer.job.yaml_tree import Finding, shorten

Task = Literal["generate", "embed", "score", "classify", "rerank"]
# Each task has a section of its name
TASK_SECTIONS = tuple(name for name in get_args(Task) if name != "generate")
_ANSWERS = {
    "generate": "texts",
    "embed": "vectors",
    "score": "log-probabilities",
    "classify": "labels",
    "rerank": "scores of relevance",
}
# Options that apply to texts only: section, key and reason. An empty key means the whole section.
_TEXT_OPTIONS = (
    ("sampling", "", "says how tokens are chosen"),
    ("on_invalid", "", "says how rows run again whose texts are not valid"),
    ("output", "schema", "describes texts"),
    ("output", "schema_file", "describes texts"),
    ("output", "column", "describes texts"),
    ("output", "confidence", "says how probable parts of texts are"),
    ("prompt", "reasoning", "says how texts mark reasoning"),
    ("prompt", "tool_calls", "says how texts write calls of tools"),
    ("prompt", "tool_choice", "says which tool a text calls"),
)


def task_findings(values: Mapping[str, Any], requests: bool = False) -> Iterator[Finding]:
    """Find options in a job file that have no meaning for the job's task.

    Args:
        values: The values of the job file by section.
        requests: True if rows are OpenAI requests, which may ask for vectors as well as texts.
    """
    task = values.get("task", "generate")
    if task not in _ANSWERS:
        return
    for name in TASK_SECTIONS:
        if name != task and values.get(name) and not (name == "embed" and task == "generate" and requests):
            message = f"is given, but the job does not have task: {name}: its answers are {_ANSWERS[task]}"
            yield Finding((name,), message, f"add task: {name}, or remove it")
    if task == "generate":
        return
    for section, name, what in _TEXT_OPTIONS:
        given = values.get(section)
        given = given.get(name) if name and isinstance(given, dict) else given
        if given and (name or section != "prompt"):
            loc = (section, name) if name else (section,)
            message = f"{what}, and with task: {task} answers are {_ANSWERS[task]}"
            yield Finding(loc, message, "remove it")
    source = values.get("input")
    if (
        task in ("embed", "score", "rerank")
        and isinstance(source, dict)
        and source.get("expected") is not None
    ):
        message = f"names the right answers, and with task: {task} answers are {_ANSWERS[task]}, which are not compared"
        yield Finding(("input", "expected"), message, "remove it")
    if task == "embed":
        yield from _prefix(values)
    else:
        yield from _scored(values, task)


def _prefix(values: Mapping[str, Any]) -> Iterator[Finding]:
    embed, prompt = (values.get(name) for name in ("embed", "prompt"))
    if not isinstance(embed, dict) or not isinstance(prompt, dict) or embed.get("prompt") is None:
        return
    if prompt.get("text") is None and (prompt.get("user") is None or prompt.get("chat", True) is not False):
        message = "is put before texts, but the job's prompts are not texts as they are"
        yield Finding(("embed", "prompt"), message, "use prompt.text, or prompt.user with chat: false")


def _scored(values: Mapping[str, Any], task: str) -> Iterator[Finding]:
    section, source, prompt = (values.get(name) for name in (task, "input", "prompt"))
    given = isinstance(prompt, dict) and any(prompt.get(name) is not None for name in PROMPT_SOURCES)
    if not given or (isinstance(source, dict) and source.get("format") == "openai"):
        message = f"is {task}, and requests of an OpenAI batch file name no text to score"
        yield Finding(("task",), message, "give the prompt section, with input.format: jsonl")
    if task == "rerank":
        asked = section if isinstance(section, dict) else {}
        yield from _pairs(asked, prompt) if asked.get("document") is not None else _two_answers(asked, prompt)
    if task == "classify":
        yield from _labels(section)
        if isinstance(section, dict) and section.get("calibrate"):
            yield from _uncalibrated(section, prompt, values.get("model"))


def _uncalibrated(section: Mapping[str, Any], prompt: Any, model: Any) -> Iterator[Finding]:
    # Calibration needs one prompt without content that fits all rows
    loc = ("classify", "calibrate")
    if section.get("choices_from_column") is not None:
        message = (
            "is given, and rows have labels of their own: each would need a prompt without content of its own"
        )
        yield Finding(loc, message, "give classify.choices, or remove it")
    for name in ("messages", "token_ids"):
        if isinstance(prompt, dict) and prompt.get(name) is not None:
            message = f"is given, and nothing says what prompt.{name} would be without content"
            yield Finding(loc, message, "use prompt.user or prompt.text, or remove it")
    if isinstance(model, dict) and model.get("adapter_from_column") is not None:
        message = (
            "is given, and rows have different adapters: each would need a prompt without content of its own"
        )
        yield Finding(loc, message, "name one in model.adapter, or remove it")


def _pairs(given: Mapping[str, Any], prompt: Any) -> Iterator[Finding]:
    # A cross-encoder gets a query and a document
    for name in ("yes", "no"):
        if given.get(name) is not None:
            message = "is given together with document, which a cross-encoder scores without any answer"
            yield Finding(("rerank", name), message, "remove it")
    if isinstance(prompt, dict) and prompt.get("text") is None:
        source = next((name for name in PROMPT_SOURCES if prompt.get(name) is not None), "user")
        if source != "user" or prompt.get("chat", True) is not False:
            message = "is given together with rerank.document, and the query is a text as it is"
            hint = "use prompt.text, or prompt.user with chat: false, for the query alone"
            yield Finding(("prompt", source), message, hint)


def _two_answers(given: Mapping[str, Any], prompt: Any) -> Iterator[Finding]:
    yield from _whole_pairs(prompt)
    if given.get("activation", "auto") != "auto":
        message = "is given without document, and the score is a probability already"
        yield Finding(("rerank", "activation"), message, "remove it, or name the column of the document")
    yes, no = DEFAULT_ANSWERS
    if given.get("yes", yes) == given.get("no", no):
        message = f"is {shorten(given.get('no', no))}, the same as yes: every row would get 0.5"
        yield Finding(("rerank", "no"), message, "give two different texts")


def _whole_pairs(prompt: Any) -> Iterator[Finding]:
    if isinstance(prompt, dict) and (side := prompt.get("truncate")) in ("left", "right"):
        message = f"is {side}, which cuts the prompt that asks for the answer, and not the document"
        yield Finding(("prompt", "truncate"), message, "remove it, and cut the document in prompt.user")


def _labels(section: Any) -> Iterator[Finding]:
    choices = section.get("choices") if isinstance(section, dict) else None
    column = section.get("choices_from_column") if isinstance(section, dict) else None
    if choices and column is not None:
        message = "is given together with choices, and a row has the labels of only one"
        yield Finding(("classify", "choices_from_column"), message, "remove one of the two")
    if section is None or (isinstance(section, dict) and not choices and column is None):
        message = "are missing: a job with task: classify names its labels"
        yield Finding(
            ("classify", "choices"),
            message,
            "give two at least, as in [positive, negative], or choices_from_column",
        )
    if not isinstance(choices, tuple):
        return
    if len(choices) == 1:
        yield Finding(
            ("classify", "choices"), "has one label, which every row would get", "give two at least"
        )
    for text, count in Counter(choices).items():
        if count > 1:
            message = f"has {shorten(text)} {count} times"
            yield Finding(("classify", "choices"), message, "name each label once")
