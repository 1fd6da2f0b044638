"""The state of a run when it starts to make another plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The requests submitted to engines so far, which later plans leave out."""

    parts: Sequence[Path]  # of the store
    in_flight: Sequence[bytes]  # keys without an answer, in the order of submission
    begun: Sequence[bytes] = ()  # all keys submitted while the input was read
    requests: int = 0  # number of requests submitted
    prompt_tokens: int = 0  # of these requests
    expected_tokens: int = 0  # upper bound of their output tokens


@dataclass(slots=True)
class HandedOut:
    """Counts the requests submitted to engines."""

    requests: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0
    keys: list[bytes] | None = field(default=None)  # None: keys are not recorded

    def add(self, keys: Sequence[bytes], prompts: Sequence[int], answers: Sequence[int]) -> None:
        """Count requests that are submitted.

        Args:
            keys: The keys of the requests.
            prompts: The tokens of each prompt.
            answers: An upper bound of the tokens of each answer.
        """
        self.requests += len(keys)
        self.prompt_tokens += sum(prompts)
        self.expected_tokens += sum(answers)
        if self.keys is not None:
            self.keys += keys
