"""The section of a job file that says which vectors are made, and the checks of a job that makes some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from batchinfer.core.sampling import Pooling
from batchinfer.job.field_types import Auto, Text, Whole
from batchinfer.job.section import Section
from batchinfer.job.yaml_tree import Finding

Task = Literal["generate", "embed"]
# What a job says of answers that are texts, by section; an empty name: the section as a whole
_OF_TEXTS = (
    ("sampling", "", "says how tokens are chosen"),
    ("on_invalid", "", "says how rows run again whose texts are not valid"),
    ("output", "schema", "describes texts"),
    ("output", "schema_file", "describes texts"),
    ("output", "column", "describes texts"),
    ("prompt", "reasoning", "says how texts mark reasoning"),
    ("prompt", "tool_calls", "says how texts write calls of tools"),
    ("prompt", "tool_choice", "says which tool a text calls"),
)


class EmbedSection(Section):
    """The vectors of a job with `task: embed`. auto: as the checkpoint's modules.json (sentence-transformers) says."""

    pooling: Literal["auto", Pooling] = Field(
        default="auto",
        description="Hidden states that a vector is made of: of the last token, the mean of all, or of an encoder's "
        "first token (cls). auto: as the checkpoint's modules.json says, else last, or mean for an encoder.",
    )
    normalize: Auto | bool = Field(
        default="auto",
        description="Whether vectors have length 1. auto: as the checkpoint's modules.json says, else true.",
    )
    dimensions: Whole | None = Field(
        default=None,
        description="Keep only the first N numbers of a vector (before it is normalised). null: all.",
    )
    prompt: Text | None = Field(
        default=None,
        description="Name of one of the checkpoint's prompts, which is put before each text. none: no prompt. null: "
        "the one that the checkpoint uses by default, if any.",
    )


def embed_findings(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Find what does not go with the job's task."""
    if values.get("task") != "embed":
        if values.get("embed"):
            message = "is given, but the job has not task: embed, so that its answers are texts"
            yield Finding(("embed",), message, "add task: embed, or remove it")
        return
    for section, name, what in _OF_TEXTS:
        given = values.get(section)
        given = given.get(name) if name and isinstance(given, dict) else given
        if given and (name or section != "prompt"):
            loc = (section, name) if name else (section,)
            yield Finding(loc, f"{what}, and with task: embed answers are vectors", "remove it")
    yield from _prompt(values)


def _prompt(values: Mapping[str, Any]) -> Iterator[Finding]:
    embed, prompt = (values.get(name) for name in ("embed", "prompt"))
    if not isinstance(embed, dict) or not isinstance(prompt, dict) or embed.get("prompt") is None:
        return
    if prompt.get("text") is None and (prompt.get("user") is None or prompt.get("chat", True) is not False):
        message = "is put before texts, but the job's prompts are not texts as they are"
        yield Finding(("embed", "prompt"), message, "use prompt.text, or prompt.user with chat: false")
