"""Options of ingest that are not in the job file: they depend on the checkpoint, the machine and the date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize
from batchinfer.input.prompts.parameters.vector_requests import VectorRequests
from batchinfer.input.reader import Reader, SampleSize, SpreadSample
from batchinfer.store.index.requested import RequestedOutputs

if TYPE_CHECKING:
    from batchinfer.job import Job


@dataclass(frozen=True, kw_only=True)
class AskedAnswers(RequestedOutputs):
    """The outputs that a job requests, known before its rows are read.

    Attributes:
        vectors: Rules for rows that are OpenAI requests for embeddings. None: such requests are errors.
        no_vectors: Why the model cannot return embeddings, for the message of these errors; "" if it can.
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
        sample: Read only this number of rows, from the start of each file. None: all.
        strata: Read only some rows, spread over all files. None: all.
        output: What answers are made of, such as "tokens" or "vectors".
        asked: The outputs in detail, such as log-probabilities or a JSON schema.
        adapters: Fingerprints of adapters by the names that rows use.
        chunk: Size of the chunks that render workers prepare.
        checked: A reader of the same files that was opened to check the job, and is used again. None: open
            the files.
    """

    context: bytes
    max_model_len: int
    vocab_size: int
    now: datetime
    workers: int | None = None
    row_timeout_s: float = 10.0
    sample: SampleSize | None = None
    strata: SpreadSample | None = None
    output: str = "tokens"
    asked: AskedAnswers = AskedAnswers()
    adapters: Mapping[str, str] = field(default_factory=dict)
    chunk: ChunkSize = DEFAULT_SIZE
    checked: Reader | None = None

    @property
    def room(self) -> int:
        """Return the number of tokens that must fit after a prompt: 1 if answers are tokens, else 0."""
        return 1 if self.output == "tokens" else 0

    def calls(self, job: Job, has_tools: bool) -> tuple[CallStyle | None, bool]:
        """Return how the model writes tool calls in this job.

        Args:
            job: The job.
            has_tools: True if a row has tools. For OpenAI files this is known only after they were read.

        Returns:
            (style, unparsed). `style` is None if the result has no column for calls. `unparsed` is True if
            rows have tools, but the style is unknown, so that calls are not parsed.
        """
        prompt, style = job.prompting, self.asked.tool_calls
        if style is None:
            return None, has_tools and prompt.tool_calls == "auto"
        return (style if has_tools or prompt.may_call else None), False
