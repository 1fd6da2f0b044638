"""Forecasts the lengths of a job's answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import Request
from batchinfer.core.statistics.survival import SurvivalCurve


@dataclass(frozen=True, slots=True, eq=False)
class AnswerLengths:
    """Forecasts answer lengths from earlier answers to prompts of similar length.

    Without earlier answers, every answer is assumed to have max_tokens tokens. Otherwise the forecast lengths have the
    distribution of the earlier lengths. The forecast of a request does not depend on the order of the requests.
    """

    _by_size: Mapping[int, SurvivalCurve]  # by the bit length of the prompt's token count

    @classmethod
    def of(
        cls, prompts: NDArray[np.int64], answers: NDArray[np.int64], truncated: NDArray[np.bool_]
    ) -> AnswerLengths:
        """Create a forecast from the requests of earlier runs. The arrays have one value per request.

        Args:
            prompts: Number of prompt tokens.
            answers: Number of answer tokens.
            truncated: True for answers that max_tokens truncated.
        """
        sizes = np.frexp(prompts.astype(np.float64))[1]  # bit lengths
        found = {
            int(size): SurvivalCurve.of(answers[sizes == size], truncated[sizes == size])
            for size in np.unique(sizes)
        }
        return cls({size: survival for size, survival in found.items() if survival is not None})

    @classmethod
    def unknown(cls) -> AnswerLengths:
        """Create a forecast in which every answer has max_tokens tokens."""
        return cls({})

    @property
    def are_known(self) -> bool:
        """Return True if lengths come from earlier answers, False if every answer is assumed to have max_tokens."""
        return bool(self._by_size)

    def of_requests(self, requests: Iterable[Request]) -> dict[bytes, int]:
        """Return the forecast number of answer tokens of each request, by work key.

        The end token is included. No number is above the request's max_tokens.
        """
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
        size = prompt.bit_length()
        return min(self._by_size, key=lambda other: abs(other - size))
