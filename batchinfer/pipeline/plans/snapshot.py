"""Keeps what a run knows at the moment at which it begins to plan anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot says what engines were given so far, and what the store has of it. Later plans are made without these
    requests."""

    parts: Sequence[Path]  # of the store
    in_flight: Sequence[bytes]  # keys whose answers are still to come, in the order in which they were given
    begun: Sequence[bytes] = ()  # all keys that were given while the input was read
    requests: int = 0  # given in all
    prompt_tokens: int = 0  # of these
    expected_tokens: int = 0  # of their answers, at most


@dataclass(slots=True)
class HandedOut:
    """Counts what engines are given."""

    requests: int = 0
    prompt_tokens: int = 0
    expected_tokens: int = 0
    keys: list[bytes] | None = field(default=None)  # None: nobody asks which

    def add(self, keys: Sequence[bytes], prompts: Sequence[int], answers: Sequence[int]) -> None:
        """Count requests, by the tokens of their prompts, and of their answers at most."""
        self.requests += len(keys)
        self.prompt_tokens += sum(prompts)
        self.expected_tokens += sum(answers)
        if self.keys is not None:
            self.keys += keys
