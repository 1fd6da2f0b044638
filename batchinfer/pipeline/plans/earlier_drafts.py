"""Adds draft tokens to requests: the answers to the same rows in the job's last result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.errors import OutOfMemory, StorageError
from batchinfer.core.request import Request, TokenIds
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.plan.order.plan import Plan, PlanBatch
from batchinfer.store.results.published import open_if_intact
from batchinfer.store.results.reuse.earlier_answers import LastResult
from batchinfer.store.results.reuse.given_answers import GivenAnswers

# Limits of the characters of last answers that engines receive. The maximum fills about half of an engine's memory of
# answers. A run with few output tokens sends fewer: reading and encoding more would cost more than drafts can save.
_MAX_CHARACTERS, _MIN_CHARACTERS, _CHARACTERS_PER_TOKEN = 1 << 19, 1 << 16, 16
Batches = Iterator[tuple[PlanBatch, list[Request]]]
AddDrafts = Callable[[Batches], Batches]  # adds draft tokens to the requests of batches


def without_drafts(batches: Batches) -> Batches:
    """Return the batches unchanged. Used in place of a function that adds drafts if a job has none."""
    return batches


def last_answers(run: OpenRun, to_come: int | None = None) -> list[TokenIds]:
    """Return answers from the end of the job's last result. Engines search them for draft tokens for all rows.

    Args:
        run: The run, with its job, options, state folder and report.
        to_come: Maximum number of output tokens of the run, which limits the number of answers. None if unknown.

    Returns:
        The tokens of each answer. Empty unless the job uses the draft sources "answers" and "earlier".
    """
    if not {"answers", "earlier"} <= {*run.setup.setting.parts.draft_sources(run.job)}:
        return []
    result = _last_result(run)
    limit = _MAX_CHARACTERS if to_come is None else max(_MIN_CHARACTERS, _CHARACTERS_PER_TOKEN * to_come)
    texts = [] if result is None else result.last_texts(min(_MAX_CHARACTERS, limit))
    found = run.setup.tokenizer.rust.encode_batch_fast(texts, add_special_tokens=False)
    return _all_below([one.ids for one in found], run.setup.checkpoint.spec.vocab)


def _last_result(run: OpenRun) -> LastResult | None:
    found = open_if_intact(run.state.destination)
    return None if found is None else LastResult.of(found.files)


@dataclass(frozen=True, slots=True)
class EarlierDrafts:
    """Adds draft tokens to requests: the answers to the same rows in the job's last result.

    Attributes:
        run: The run, with its job, options, state folder and report.
        result: The last result of the job.
    """

    run: OpenRun
    result: LastResult

    @classmethod
    def of(cls, run: OpenRun) -> EarlierDrafts | None:
        """Create an object that takes drafts from a job's last result.

        Returns None if there is no earlier result, the job does not use the draft source "earlier", or it asks for
        several answers per row.

        Args:
            run: The run, with its job, options, state folder and report.
        """
        if "earlier" not in run.setup.setting.parts.draft_sources(run.job) or run.job.has_samples:
            return None
        result = _last_result(run)
        return None if result is None else cls(run, result)

    def of_plan(self, plan: Plan, index_parts: Sequence[Path]) -> AddDrafts:
        """Look up the answers to a plan's rows in the job's last result.

        If the search fails, the user gets a notice and the returned function adds nothing.

        Args:
            plan: The plan.
            index_parts: Parquet files of the index.

        Returns:
            A function that adds these answers to the plan's requests as draft tokens.
        """
        state = self.run.state
        try:
            answers = self.result.write_answers(plan.path, index_parts, state.staging / "earlier", state.ops)
        except (StorageError, OutOfMemory) as error:
            self.run.notice(f"drafts: earlier answers cannot be looked for: {error}")
            return without_drafts
        return without_drafts if answers is None else partial(self._add_drafts, GivenAnswers(answers))

    def _add_drafts(self, answers: GivenAnswers, batches: Batches) -> Batches:
        for batch, requests in batches:
            yield batch, self._with_answers(requests, answers.of(batch.numbers("seq")))

    def _with_answers(
        self, requests: list[Request], answers: list[Mapping[str, Any] | None]
    ) -> list[Request]:
        # The texts are encoded again. If the model had generated other tokens for a text, the encoded tokens
        # are rejected, and the draft continues after them.
        texts = [answer["text"] for answer in answers if answer is not None]
        encoded = iter(self.run.setup.tokenizer.rust.encode_batch(texts, add_special_tokens=False))
        found = []
        for request, answer in zip(requests, answers, strict=True):
            tokens = None if answer is None else next(encoded).ids
            found.append(with_draft(request, tokens, self.run.setup.checkpoint.spec.vocab))
        return found


def with_draft(request: Request, tokens: Sequence[int] | None, vocab: int) -> Request:
    """Return a request with draft tokens.

    The draft is truncated at `max_tokens` of the request and before the first token that the model does not have.

    Args:
        request: The request.
        tokens: The draft tokens. None or empty: the request is returned unchanged.
        vocab: Number of token ids of the model.
    """
    draft = _below((tokens or ())[: request.params.max_tokens], vocab)
    return replace(request, draft=draft) if len(draft) else request


def _all_below(answers: Sequence[Sequence[int]], vocab: int) -> list[TokenIds]:
    # one array for all answers: 50,000 single arrays would take a quarter of a second
    sizes = [*map(len, answers)]
    tokens = np.fromiter(chain.from_iterable(answers), np.int32, sum(sizes))
    ends = np.cumsum([0, *sizes]).tolist()
    found = [tokens[start:end] for start, end in pairwise(ends) if start < end]
    if len(tokens) and tokens.max() >= vocab:
        found = [below for one in found if len(below := _below(one, vocab))]
    return found


def _below(tokens: Sequence[int] | TokenIds, vocab: int) -> TokenIds:
    found = np.array(tokens, np.int32)
    beyond = np.flatnonzero(found >= vocab)
    return found[: beyond[0]] if len(beyond) else found
