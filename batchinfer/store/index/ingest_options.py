"""Options of ingest that are not in the job file: they depend on the checkpoint, the machine and the date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize
from batchinfer.input.prompts.parameters.vector_requests import VectorRequests
from batchinfer.input.reader import Reader, SampleSize, Strata
from batchinfer.store.index.requested import RequestedOutputs

if TYPE_CHECKING:
    from batchinfer.job import Job


@dataclass(frozen=True, kw_only=True)
class AskedAnswers(RequestedOutputs):
    """The outputs that a job requests, before its rows are read.

    Attributes:
        vectors: Rules for OpenAI requests for vectors. None: rows do not request vectors.
        no_vectors: Reason that OpenAI requests for vectors are refused, if they may request texts.
    """

    vectors: VectorRequests | None = None
    no_vectors: str = ""


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options for reading the input of a job that are not in the job file.

    Attributes:
        context: The digest that enters every work key.
        max_model_len: Maximum tokens of a prompt and its answer.
        vocab_size: The vocabulary size of the model.
        now: The time that `strftime_now` returns in a chat template.
        workers: Number of render workers. None: one per core.
        row_timeout_s: Maximum seconds to render a row.
        sample: Read only the first rows of each file. None: all.
        strata: Read only rows that are spread over all files. None: all.
        output: Name of the kind of answers (store/outputs).
        asked: The outputs that the job requests.
        adapters: Fingerprints of adapters by the names that rows use.
        chunk: Size of the chunks that workers prepare.
        checked: An open reader of the same files, which is reused.
    """

    context: bytes
    max_model_len: int
    vocab_size: int
    now: datetime
    workers: int | None = None
    row_timeout_s: float = 10.0
    sample: SampleSize | None = None
    strata: Strata | None = None
    output: str = "tokens"
    asked: AskedAnswers = AskedAnswers()
    adapters: Mapping[str, str] = field(default_factory=dict)
    chunk: ChunkSize = DEFAULT_SIZE
    checked: Reader | None = None

    @property
    def room(self) -> int:
        """Return the minimum number of tokens that must fit after a prompt: 1, or 0 if answers are not texts."""
        return 1 if self.output == "tokens" else 0

    def calls(self, job: Job, has_tools: bool) -> tuple[CallStyle | None, bool]:
        """Return how the model writes tool calls, or None if the result has no column for calls.

        Args:
            job: The job.
            has_tools: A row has tools. For OpenAI files this is known only after they were read.

        Returns:
            The style, and True if rows have tools although the style is unknown, so calls are not parsed.
        """
        prompt, style = job.prompting, self.asked.tool_calls
        if style is None:
            return None, has_tools and prompt.tool_calls == "auto"
        return (style if has_tools or prompt.may_call else None), False
