"""Options of reading an input that stand in no job file: they follow from the checkpoint, the machine and the day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from batchinfer.core.embedding import Embedding
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize
from batchinfer.input.prompts.parameters.vector_requests import VectorRequests
from batchinfer.input.reader import Reader, SampleSize, Strata

if TYPE_CHECKING:
    from batchinfer.job import Job


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options that the job file does not have. `context` is the digest that enters every key; `vocab_size` is the
    model's.

    `now` is what a chat template's `strftime_now` tells; `workers` None: as many as there are cores.
    """

    context: bytes
    max_model_len: int
    vocab_size: int
    now: datetime
    workers: int | None = None
    row_timeout_s: float = 10.0
    sample: SampleSize | None = None  # only the first rows of each file, to look at them
    strata: Strata | None = None  # only a part of the rows, from everywhere
    output: str = "tokens"  # the name of the kind of answers
    reasoning: Reasoning | None = None  # how the checkpoint marks it
    tool_calls: CallStyle | None = None  # how answers write calls of tools, if rows may have any
    embedding: Embedding | None = None  # the vectors that rows ask for; None: for none
    vectors: VectorRequests | None = None  # how OpenAI requests may ask for them
    no_vectors: str = ""  # why requests may ask for none, where they may ask for texts
    scoring: Scoring | None = None  # what is scored behind prompts; None: nothing is
    pairs: PairScoring | None = None  # the score of prompts and documents; None: there are no documents
    adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # fingerprints, by the names that rows have for them
    chunk: ChunkSize = DEFAULT_SIZE
    checked: Reader | None = None  # has read headers and footers of the same files

    @property
    def room(self) -> int:
        """The tokens that have to fit behind a prompt: none where no answer is a text."""
        return 1 if self.output == "tokens" else 0

    def calls(self, job: Job, has_tools: bool) -> tuple[CallStyle | None, bool]:
        """Return how answers write calls, if the result has a column for them, and whether calls are not read.
        `has_tools`: whether a row has any, which is not known of an OpenAI file before it was read."""
        prompt, style = job.prompting, self.tool_calls
        if style is None:
            return None, has_tools and prompt.tool_calls == "auto"
        return (style if has_tools or prompt.may_call else None), False
