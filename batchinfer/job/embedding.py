"""The section `embed` of a job file, which describes vectors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchinfer.core.sampling import Pooling
from batchinfer.job.field_types import Auto, Text, Whole
from batchinfer.job.section import Section


class EmbedSection(Section):
    """The vectors of a job with `task: embed`, and of OpenAI requests for embeddings.

    With `auto`, the checkpoint's modules.json (sentence-transformers) decides.
    """

    pooling: Literal["auto", Pooling] = Field(
        default="auto",
        description="Hidden states that form a vector: of the `last` token, the `mean` of all, or an encoder's first "
        "token (`cls`). `auto`: as the checkpoint's `modules.json` says, else `last`, or `mean` for an "
        "encoder.",
    )
    normalize: Auto | bool = Field(
        default="auto",
        description="Whether vectors have length 1. `auto`: as the checkpoint's `modules.json` says, else `true`.",
    )
    dimensions: Whole | None = Field(
        default=None,
        description="Keep only the first N numbers of a vector, before it is normalised. `null`: all.",
    )
    prompt: Text | None = Field(
        default=None,
        description="Name of one of the checkpoint's prompts, which is put before each text. `none`: no prompt. "
        "`null`: the checkpoint's default prompt, if any.",
    )
