"""Pairs of a query and a document, which cross-encoders score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchinfer.core.sampling import SamplingParams, Truncate
from batchinfer.core.scoring import PairScoring
from batchinfer.input.prompts.builder import Draft
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.pair_template import PairTemplate, longest_first

Ids = Sequence[int]


class PairedTexts:
    """Joins the tokens of a query and a document, with the special tokens that the tokenizer puts around a pair.

    Args:
        template: The special tokens around a pair.
        scoring: How the model scores a pair.
        longest: The maximum number of tokens of a pair.
        truncate: Which side of the query and of the document is truncated if the pair is too long, or "error".
    """

    def __init__(
        self, template: PairTemplate, scoring: PairScoring, longest: int, truncate: Truncate
    ) -> None:
        self._template, self._scoring = template, scoring
        self._room, self._truncate = longest - template.added, truncate
        self._params: dict[int, SamplingParams] = {}

    def to_encode(self, draft: Draft) -> list[Draft]:
        """Return the document as a draft, which the caller must tokenise before it calls `join` for this draft."""
        (document,) = draft.continuations or ("",)
        return [Draft(draft.params, str(document))]

    def join(
        self, draft: Draft, ids: Ids, encoded: Sequence[Ids], encode: Callable[[Draft], Ids]
    ) -> tuple[Ids, SamplingParams]:
        """Join a query and a document, and return the tokens of the pair and the parameters of the request.

        Args:
            draft: The query, with the document as its continuation.
            ids: The tokens of the query.
            encoded: The tokens of the document: of the draft from `to_encode(draft)`.
            encode: Not used.

        Raises:
            RowProblem: The special tokens of a pair leave no room for its texts.
        """
        (document,) = encoded
        if self._truncate != "error":
            ids, document = self._truncate_pair(ids, document)
        second = self._template.second_segment(ids, document) if self._scoring.typed else 0
        if second not in self._params:  # bounded by the number of positions
            self._params[second] = SamplingParams.logits(self._scoring.pooling, second)
        return self._template.join(ids, document), self._params[second]

    def _truncate_pair(self, query: Ids, document: Ids) -> tuple[Ids, Ids]:
        if self._room < 2:
            added = self._template.added
            message = f"{added} tokens around a pair leave no room for it; raise model.max_model_len"
            raise RowProblem("prompt_too_long", message, "policy")
        kept = longest_first(len(query), len(document), self._room)
        if self._truncate == "right":
            return query[: kept[0]], document[: kept[1]]
        return query[len(query) - kept[0] :], document[len(document) - kept[1] :]
