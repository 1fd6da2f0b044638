"""The sections `score`, `classify` and `rerank` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchinfer.core.scoring import MAX_LABELS, ScoreActivation
from batchinfer.job.field_types import Choice, Text
from batchinfer.job.section import Section
from batchinfer.job.wording import ValidValues

DEFAULT_ANSWERS = ("yes", "no")  # answers of rerankers that say whether a document answers a query


class ScoreSection(Section):
    """The continuations of a job with `task: score`."""

    continuation: Text | None = Field(
        default=None,
        description="Column with the text whose log-probability after the prompt is computed. `null`: score the prompt "
        "itself, except its first token.",
    )
    per_token: bool = Field(
        default=False, description="Whether the result also has the log-probability of each token."
    )


class ClassifySection(Section):
    """The labels of a job with `task: classify`."""

    choices: Choice = Field(
        default=(), max_length=MAX_LABELS, description="The labels: texts that may follow each prompt."
    )
    choices_from_column: Text | None = Field(
        default=None,
        description="Column of lists of texts: each row's own labels. `null`: all rows have `choices`.",
    )
    length_normalized: bool = Field(
        default=False,
        description="`true`: compare labels by the mean log-probability of their tokens. `false`: by the sum, which "
        "favours short labels.",
    )
    calibrate: bool | Annotated[Text, ValidValues("a text, such as N/A")] = Field(
        default=False,
        description="`true`: divide each label's probability by its probability after [a prompt without "
        "content](scores.md#labels-that-the-model-likes-too-much), in which `N/A` replaces all values of a row. "
        "A text, such as `[MASK]`: the same with this text in place of `N/A`.",
    )

    @property
    def content_free(self) -> str | None:
        """Return the text that replaces all values of a row in the prompt for calibration. None without calibration."""
        if isinstance(self.calibrate, str):
            return self.calibrate
        return "N/A" if self.calibrate else None


class RerankSection(Section):
    """The relevance of documents in a job with `task: rerank`.

    A decoder answers yes or no to a prompt with query and document. A cross-encoder scores the pair of query
    and document.
    """

    yes: Text = Field(
        default=DEFAULT_ANSWERS[0],
        description='Answer that means "relevant". The score is its probability relative to `no`.',
    )
    no: Text = Field(
        default=DEFAULT_ANSWERS[1],
        description='Answer that means "not relevant".',
    )
    document: Text | None = Field(
        default=None,
        description="For [cross-encoders](rerank.md#cross-encoders): column of the document, which is compared with "
        "the query in `prompt`. `null`: the prompt contains the document.",
    )
    activation: Literal["auto", ScoreActivation] = Field(
        default="auto",
        description="For cross-encoders: function from logit to score, `sigmoid` or `identity`. `auto`: as the "
        "checkpoint says, else `sigmoid`.",
    )
