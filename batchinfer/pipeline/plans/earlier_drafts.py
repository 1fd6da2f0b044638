"""Gives the requests of plans the answers that their rows had in the job's last result, as drafts."""

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

# Characters of the last answers that engines are told: at most about half of what they remember, and fewer where few
# tokens are to come, which cannot gain what it takes to read, encode and tell so many
_LEARNT, _LEARNT_AT_LEAST, _LEARNT_A_TOKEN = 1 << 19, 1 << 16, 16
Batches = Iterator[tuple[PlanBatch, list[Request]]]
Given = Callable[[Batches], Batches]


def without_drafts(batches: Batches) -> Batches:
    """Return the batches as they are."""
    return batches


def last_answers(run: OpenRun, to_come: int | None = None) -> list[TokenIds]:
    """Return the last answers of the job's last result, for engines that take drafts from other answers; none where the
    job does not take them from there. `to_come`: tokens of the answers that the run computes, at most; None: nobody
    knows yet."""
    if not {"answers", "earlier"} <= {*run.setup.setting.parts.draft_sources(run.job)}:
        return []
    result = _last_result(run)
    worth = _LEARNT if to_come is None else max(_LEARNT_AT_LEAST, _LEARNT_A_TOKEN * to_come)
    texts = [] if result is None else result.last_texts(min(_LEARNT, worth))
    found = run.setup.tokenizer.rust.encode_batch_fast(texts, add_special_tokens=False)
    return _all_below([one.ids for one in found], run.setup.checkpoint.spec.vocab)


def _last_result(run: OpenRun) -> LastResult | None:
    found = open_if_intact(run.state.destination)
    return None if found is None else LastResult.of(found.files)


@dataclass(frozen=True, slots=True)
class EarlierDrafts:
    """The last result of a run's job, from which drafts are taken."""

    run: OpenRun
    result: LastResult

    @classmethod
    def of(cls, run: OpenRun) -> EarlierDrafts | None:
        """Return what drafts can be taken from; None where the job has no such result, or takes none from it."""
        if "earlier" not in run.setup.setting.parts.draft_sources(run.job) or run.job.has_samples:
            return None
        result = _last_result(run)
        return None if result is None else cls(run, result)

    def of_plan(self, plan: Plan, index_parts: Sequence[Path]) -> Given:
        """Look for the answers to what a plan runs; return what gives them to its requests. If they cannot be looked
        for, a notice says so: the job needs none."""
        state = self.run.state
        try:
            answers = self.result.write_answers(plan.path, index_parts, state.staging / "earlier", state.ops)
        except (StorageError, OutOfMemory) as error:
            self.run.notice(f"drafts: earlier answers cannot be looked for: {error}")
            return without_drafts
        return without_drafts if answers is None else partial(self._given, GivenAnswers(answers))

    def _given(self, answers: GivenAnswers, batches: Batches) -> Batches:
        for batch, requests in batches:
            yield batch, self._with(requests, answers.of(batch.numbers("seq")))

    def _with(self, requests: list[Request], answers: list[Mapping[str, Any] | None]) -> list[Request]:
        """Give requests these answers. A text is encoded: where the model had cut it into other tokens, the draft
        differs there, and goes on behind."""
        texts = [answer["text"] for answer in answers if answer is not None]
        encoded = iter(self.run.setup.tokenizer.rust.encode_batch(texts, add_special_tokens=False))
        given = []
        for request, answer in zip(requests, answers, strict=True):
            tokens = None if answer is None else next(encoded).ids
            given.append(drafted(request, tokens, self.run.setup.checkpoint.spec.vocab))
        return given


def drafted(request: Request, tokens: Sequence[int] | None, vocab: int) -> Request:
    """Give a request a draft, if there is one, up to the first token that the model does not have."""
    draft = _below((tokens or ())[: request.params.max_tokens], vocab)
    return replace(request, draft=draft) if len(draft) else request


def _all_below(answers: Sequence[Sequence[int]], vocab: int) -> list[TokenIds]:
    """Return of each answer the tokens before the first one that is not below `vocab`; answers without any are left
    out. All are looked at together: one by one fifty thousand would take a quarter of a second."""
    sizes = [*map(len, answers)]
    tokens = np.fromiter(chain.from_iterable(answers), np.int32, sum(sizes))
    ends = np.cumsum([0, *sizes]).tolist()
    found = [tokens[start:end] for start, end in pairwise(ends) if start < end]
    if len(tokens) and tokens.max() >= vocab:
        found = [below for one in found if len(below := _below(one, vocab))]
    return found


def _below(tokens: Sequence[int] | TokenIds, vocab: int) -> TokenIds:
    """Return the tokens before the first one that is not below `vocab`."""
    found = np.array(tokens, np.int32)
    beyond = np.flatnonzero(found >= vocab)
    return found[: beyond[0]] if len(beyond) else found
