"""The tokens that parameters name: whether the model has them."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.core.sampling import SamplingParams
from batchinfer.data.input.rows import RowProblem


class NamedTokens:
    """Checks the tokens that parameters name. `vocab_size`: the model knows the ids below."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._last: SamplingParams | None = None  # of which all are known: most rows have the same

    def check(self, params: SamplingParams) -> None:
        """Raises RowProblem for an id that the model does not know."""
        if params is not self._last:
            self._known("logit_bias", (token for token, _ in params.logit_bias))
            self._known("allowed_token_ids", params.allowed_token_ids)
            self._last = params

    def _known(self, name: str, ids: Iterable[int]) -> None:
        if (most := max(ids, default=0)) >= self._vocab_size:
            message = f"{name}: token id {most}; the model knows ids below {self._vocab_size}"
            raise RowProblem("token_id_out_of_range", message)
