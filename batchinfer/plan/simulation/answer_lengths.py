"""How long the answers of a job will be, as far as that can be known before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import Request
from batchinfer.core.statistics.survival import Survival


@dataclass(frozen=True, slots=True, eq=False)
class AnswerLengths:
    """Answers become as long as those of earlier prompts of about the same length; without any, as long as they may.

    The requests of a job get lengths that are spread as those of the earlier answers were, evenly and in the order of
    their keys: a job's forecast is the same each time, and in whichever order the job runs.
    """

    _by_size: Mapping[int, Survival]  # by the bits of the prompts' length

    @classmethod
    def of(
        cls, prompts: NDArray[np.int64], answers: NDArray[np.int64], cut: NDArray[np.bool_]
    ) -> AnswerLengths:
        """Return the lengths from the tokens of earlier prompts and answers, and which of the answers were cut."""
        sizes = np.frexp(prompts.astype(np.float64))[1]  # the bits of each
        found = {
            int(size): Survival.of(answers[sizes == size], cut[sizes == size]) for size in np.unique(sizes)
        }
        return cls({size: survival for size, survival in found.items() if survival is not None})

    @classmethod
    def unknown(cls) -> AnswerLengths:
        """Every answer is as long as it may be."""
        return cls({})

    @property
    def are_known(self) -> bool:
        """Whether any earlier answer tells."""
        return bool(self._by_size)

    def of_requests(self, requests: Iterable[Request]) -> dict[bytes, int]:
        """By key, the tokens of the answer, the one that ends it included; at most the request's max_tokens."""
        found: dict[bytes, int] = {}
        guessed: dict[int, list[Request]] = {}
        for request in requests:
            if request.params.has_known_length or not self._by_size:
                found[request.key] = request.params.max_tokens
            else:
                guessed.setdefault(self._nearest(len(request.prompt)), []).append(request)
        for size, alike in guessed.items():
            survival, number = self._by_size[size], len(alike)
            for place, request in enumerate(sorted(alike, key=lambda one: one.key)):
                share = (place + 0.5) / number
                found[request.key] = max(1, survival.length(share, request.params.max_tokens))
        return found

    def _nearest(self, prompt: int) -> int:
        """Return the known size that is nearest to the size of a prompt of `prompt` tokens."""
        size = prompt.bit_length()
        return min(self._by_size, key=lambda other: abs(other - size))
