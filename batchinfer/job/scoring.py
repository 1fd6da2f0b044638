"""The sections of a job file that say what is scored: continuations of rows, labels, or relevance."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchinfer.core.scoring import MAX_LABELS, ScoreActivation
from batchinfer.job.field_types import Choice, Text
from batchinfer.job.section import Section
from batchinfer.job.wording import Right

DEFAULT_ANSWERS = ("yes", "no")  # of rerankers that say whether a document answers a query


class ScoreSection(Section):
    """The continuations of a job with `task: score`."""

    continuation: Text | None = Field(
        default=None,
        description="Column of what stands behind the prompt: the result says how likely it is there. null: the prompt "
        "itself is scored, but for its first token.",
    )
    per_token: bool = Field(
        default=False, description="Whether the result has the log-probability of each token, too."
    )


class ClassifySection(Section):
    """The labels of a job with `task: classify`."""

    choices: Choice = Field(
        default=(), max_length=MAX_LABELS, description="The labels: texts that may stand behind each prompt."
    )
    choices_from_column: Text | None = Field(
        default=None,
        description="Column of lists of texts: each row's own labels. null: all rows have choices.",
    )
    length_normalized: bool = Field(
        default=False,
        description="Whether labels are compared by the mean log-probability of their tokens; else by the sum, which "
        "favours short labels.",
    )
    calibrate: bool | Annotated[Text, Right("a text, such as N/A")] = Field(
        default=False,
        description="Whether probabilities are divided by those behind a prompt without content, in which N/A stands "
        "for all values of a row; or the text that stands for them.",
    )

    @property
    def content_free(self) -> str | None:
        """Return the text that stands for a row's values where there is no content; None: nothing is calibrated."""
        if isinstance(self.calibrate, str):
            return self.calibrate
        return "N/A" if self.calibrate else None


class RerankSection(Section):
    """How a job with `task: rerank` asks: for the document in the prompt with two answers, or for a document beside the
    query, of which a cross-encoder makes a score."""

    yes: Text = Field(
        default=DEFAULT_ANSWERS[0],
        description="Text that says, behind the prompt, that the document is relevant: the score is its probability "
        "between the two.",
    )
    no: Text = Field(
        default=DEFAULT_ANSWERS[1],
        description="Text that says, behind the prompt, that it is not.",
    )
    document: Text | None = Field(
        default=None,
        description="For cross-encoders: column of the document, which is compared with the query, the prompt. null: "
        "the prompt has the document in it.",
    )
    activation: Literal["auto", ScoreActivation] = Field(
        default="auto",
        description="For cross-encoders: what makes a score of the logit. auto: as the checkpoint says, else sigmoid.",
    )
