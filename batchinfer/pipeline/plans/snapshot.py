"""The requests that engines have received when another plan is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The requests that engines have received at the moment when a plan is started. The plan leaves them out.

    Attributes:
        parts: Parquet files of the store of answers at this moment.
        in_flight: Work keys of requests without an answer, in the order of submission.
        begun: Work keys of all requests that engines have received. Empty once the whole input has been planned.
        requests: Number of requests that engines have received.
        prompt_tokens: Number of prompt tokens of these requests.
        expected_tokens: Maximum number of output tokens of these requests.
    """

    parts: Sequence[Path]
    in_flight: Sequence[bytes]
    begun: Sequence[bytes] = ()
    requests: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0


@dataclass(slots=True)
class HandedOut:
    """Counts the requests that engines have received.

    Attributes:
        requests: Number of requests.
        prompt_tokens: Number of prompt tokens of the requests.
        expected_tokens: Maximum number of output tokens of the requests.
        keys: Work keys of the requests. None: keys are not recorded.
    """

    requests: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0
    keys: list[bytes] | None = field(default=None)

    def add(self, keys: Sequence[bytes], prompts: Sequence[int], answers: Sequence[int]) -> None:
        """Count requests that engines receive now.

        Args:
            keys: Work keys of the requests.
            prompts: Number of prompt tokens of each request.
            answers: Maximum number of output tokens of each request.
        """
        self.requests += len(keys)
        self.prompt_tokens += sum(prompts)
        self.expected_tokens += sum(answers)
        if self.keys is not None:
            self.keys += keys
