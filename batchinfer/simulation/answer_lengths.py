"""How long the answers of a job will be, as far as that can be known before it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class AnswerLengths:
    """Answers are as long as those of earlier prompts of about the same length; without any, as long as they may be.

    A request takes the length of one of the earlier ones whose
    prompts have as many bits, chosen by its key: so a job's forecast is the same each time, and as widely
    spread as its answers were.
    """

    _by_size: dict[int, NDArray[np.int64]]  # answers' tokens, by the bits of their prompts' length

    @classmethod
    def of(cls, prompts: NDArray[np.int64], answers: NDArray[np.int64]) -> AnswerLengths:
        """From the tokens of earlier requests' prompts and answers."""
        sizes = np.array([int(prompt).bit_length() for prompt in prompts], np.int64)
        return cls({int(size): answers[sizes == size] for size in np.unique(sizes)})

    @classmethod
    def unknown(cls) -> AnswerLengths:
        """Every answer is as long as it may be."""
        return cls({})

    def of_request(self, request: Request) -> int:
        """Tokens of its answer, the one that ends it included; at most its max_tokens."""
        most = request.params.max_tokens
        known = request.params.ignore_eos and not (request.params.stop or request.params.stop_token_ids)
        if known or not self._by_size:
            return most
        size = len(request.prompt).bit_length()
        nearest = min(self._by_size, key=lambda other: abs(other - size))
        alike = self._by_size[nearest]
        chosen = int(alike[int.from_bytes(request.key[:8], "little") % len(alike)])
        return min(most, max(1, chosen))
