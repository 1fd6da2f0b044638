"""Samples token ids on any device: the arguments of all rows are built once a step and copied together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.runner.row_scores import row_scores
from batchinfer.engine.runner.sampled import DeviceTokens, Masked, RowLogprobs, RowStates, Sampled
from batchinfer.engine.schedule.step_plan import PenalisedRows, SamplingPlan
from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens
from batchinfer.engine.tensors.staging import upload
from batchinfer.models.ops.interface import Ops
from batchinfer_kernels.mask import bars, mask_words
from batchinfer_kernels.penalties import Penalties
from batchinfer_kernels.sample import NO_TOKEN, RowSampling

# Hidden states are of the order of 1; those above 2^-6 are multiples of this in float32
STATE_UNIT = 2.0**-30
_SUMMED_ROWS = 1024  # of which there are copies in float64 at a time


def edit(logits: Tensor, plan: SamplingPlan) -> None:
    """Add the biases of a plan to logits (n, vocab), and bar the tokens that it does not allow, in place."""
    if plan.biased is not None:
        _add(logits, plan.biased)
    if plan.allowed is not None:
        _keep(logits, plan.allowed)


def _add(logits: Tensor, biased: BiasedTokens) -> None:
    """Each is added once, so that sums have no order."""
    rows, tokens, biases = biased
    row, token, bias = upload((rows.astype(np.int64), tokens.astype(np.int64), biases), logits.device)
    logits.index_put_((row, token), logits[row, token] + bias)


def _keep(logits: Tensor, allowed: AllowedTokens) -> None:
    rows, tokens = (array.astype(np.int64) for array in allowed)
    row, token, narrowed = upload((rows, tokens, np.unique(rows)), logits.device)
    kept = logits[row, token]
    logits.index_fill_(0, narrowed, float("-inf"))
    logits.index_put_((row, token), kept)


class LogitsHead(Protocol):
    """The end of a model, which makes logits of hidden states."""

    def states(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, where there is one: (n, hidden) → (n, hidden)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the logits: (n, hidden) → (n, vocab) float32."""

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the logits, (n, hidden) → (n,) int64; NO_TOKEN where they are not finite numbers."""


class TokenMask(Protocol):
    """Says which tokens a row may get next, for example those that a grammar allows. Masks are named by the numbers
    that plans have for them."""

    def allowed(self, masks: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Say of each mask whether this token may come next. False also where only `fill` can say."""

    def fill(self, masks: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Clear the bits of the tokens that may not come next; all are set before.

        bits: (masks, ceil(vocab / 32)); see batchinfer_kernels.mask. Called while a GPU computes the step.
        """


@dataclass(frozen=True, slots=True)
class Sampler:
    """Order of the steps: biases, allowed tokens, penalties, bans below min_tokens, mask, temperature, top-k, top-p,
    min-p, draw.

    As in transformers, top-p renormalises what top-k left, and min-p compares with the most likely token.
    Log-probabilities are of the logits before the first of these steps; those among allowed tokens are of these logits,
    too, behind the mask alone.

    `on_host`: logits are in the host's memory, so that a token can be looked at as soon as it is chosen. Then a greedy
    row whose last token obeyed its mask takes the argmax first, and its mask is filled only where that token is not
    allowed. The tokens are the same; a model that was taught its format hardly ever needs a mask.

    `classifier` makes logits, (n, labels), of pooled states, (n, hidden), for rows that ask for these.
    """

    eos_token_ids: frozenset[int]
    mask: TokenMask | None = None
    on_host: bool = False
    classifier: Callable[[Tensor], Tensor] | None = None

    def next_tokens(
        self,
        ops: Ops,
        head: LogitsHead,
        hidden: Tensor,
        plan: SamplingPlan,
        device_tokens: DeviceTokens | None = None,
    ) -> Sampled:
        """Find what each row asks for from its hidden state. Logits are written only for rows that need more than their
        argmax. `device_tokens`: last tokens that only the device knows."""
        states = _asked_states(head, hidden, plan)
        if plan.classified and states is not None:
            states = self._classified(states, plan)
        scores = None if plan.scored is None else row_scores(head.logits, hidden, plan.scored)
        if not plan.chooses:
            return Sampled(hidden.new_empty(0, dtype=torch.int64), states=states, scores=scores)
        if plan.chosen is not None:
            hidden = hidden.index_select(0, *upload([plan.chosen.astype(np.int64)], hidden.device))
        if self.tries_argmax(plan):
            found = self._corrected(ops, head, hidden, plan)
        else:
            found = self.sample(ops, head.logits(hidden), plan, device_tokens)
        return found if states is None and scores is None else replace(found, states=states, scores=scores)

    def _classified(self, states: RowStates, plan: SamplingPlan) -> RowStates:
        """Return the logits of each prompt, all of which has run: a mean is made of all sums that there will be."""
        assert self.classifier is not None, "the model has no classification head"
        pooled = states.states
        if plan.summed:
            (lengths,) = upload(
                [np.unique(plan.state_chunks, return_counts=True)[1].astype(np.int64)], pooled.device
            )
            pooled = pooled / lengths[:, None]
        return replace(states, states=self.classifier(pooled.float()))

    def tries_argmax(self, plan: SamplingPlan) -> bool:
        """Whether each row's token is the argmax of its logits, or is likely to be and can be looked at on the host."""
        return plan.argmax and (not plan.masked or (self.on_host and all(plan.followed)))

    def _corrected(self, ops: Ops, head: LogitsHead, hidden: Tensor, plan: SamplingPlan) -> Sampled:
        """The argmax of each row, and of those whose mask does not allow it what it does allow."""
        tokens = head.argmax(hidden)
        refused = self._refused(plan, list(range(len(plan.masked))), tokens)
        if not refused:
            return Sampled(tokens)
        rows, masks = [plan.masked[at] for at in refused], [plan.masks[at] for at in refused]
        own = SamplingPlan(masked=list(range(len(rows))), masks=masks, followed=[False] * len(rows))
        corrected = self.sample(ops, head.logits(hidden[rows]), own)
        tokens[rows] = corrected.tokens
        masked = corrected.masked
        return Sampled(tokens, masked=None if masked is None else replace(masked, rows=rows))

    def _refused(self, plan: SamplingPlan, which: list[int], found: Tensor) -> list[int]:
        """Return those of the masked rows `which`, by their place among the masked ones, whose token in `found` is not
        known to be allowed."""
        if self.mask is None or not which:
            return []
        tokens = found.tolist()
        asked = [at for at in which if tokens[plan.masked[at]] != NO_TOKEN]
        allowed = self.mask.allowed(
            [plan.masks[at] for at in asked], [tokens[plan.masked[at]] for at in asked]
        )
        return [at for at, may in zip(asked, allowed, strict=True) if not may]

    def sample(
        self, ops: Ops, logits: Tensor, plan: SamplingPlan, device_tokens: DeviceTokens | None = None
    ) -> Sampled:
        """The next token of each row, and its log-probabilities where they are asked for.

        logits: (n, vocab) float32, which are changed. `device_tokens`: last tokens that only the device knows.
        """
        asking = _LogprobRows.of(logits, plan)
        edit(logits, plan)
        if plan.penalised is not None:
            ops.penalise(logits, _penalties(plan.penalised, device_tokens or DeviceTokens(), logits.device))
        if plan.masked and plan.drawn is None and not asking:
            return self._greedy(ops, logits, plan)
        barred = self._masked(ops, logits, plan, asking) if plan.masked else None
        tokens = ops.sample(logits, _row_sampling(plan, len(logits), logits.device))
        return Sampled(tokens, asking.found(ops, tokens, self.eos_token_ids) if asking else None, barred)

    def _greedy(self, ops: Ops, logits: Tensor, plan: SamplingPlan) -> Sampled:
        """The argmax of each row, some of which are masked."""
        places = range(len(plan.masked))
        unsure = [at for at in places if self.on_host and plan.followed[at]]
        sure = sorted({*places}.difference(unsure))
        bits = np.full((len(logits), mask_words(logits.shape[1])), -1, np.int32)
        if sure:
            bits[[plan.masked[at] for at in sure]] = self._filled(plan, sure, logits)
        tokens, barred = ops.masked_argmax(logits, *upload([bits], logits.device))
        if unsure:
            self._correct(ops, logits, plan, self._refused(plan, unsure, tokens), (tokens, barred))
        if len(plan.masked) < len(logits):
            (index,) = upload([np.array(plan.masked, np.int64)], logits.device)
            barred = barred.index_select(0, index)
        return Sampled(tokens, masked=Masked(plan.masked, barred))

    def _correct(
        self, ops: Ops, logits: Tensor, plan: SamplingPlan, refused: list[int], found: tuple[Tensor, Tensor]
    ) -> None:
        """Put into `found` (tokens, barred) what the masks of these rows allow."""
        if not refused:
            return
        rows, bits = (
            [plan.masked[at] for at in refused],
            torch.from_numpy(self._filled(plan, refused, logits)),
        )
        for all_rows, corrected in zip(found, ops.masked_argmax(logits[rows], bits), strict=True):
            all_rows[rows] = corrected

    def _masked(
        self, ops: Ops, logits: Tensor, plan: SamplingPlan, asking: _LogprobRows | None = None
    ) -> Masked:
        """Mask the logits, and what `asking` keeps of them for rows that ask about allowed tokens only."""
        filled = self._filled(plan, list(range(len(plan.masked))), logits)
        rows, bits = upload([np.array(plan.masked, np.int32), filled], logits.device)
        # A copy of the rows would take as much memory as all logits do
        best = logits[plan.masked].argmax(-1) if self.on_host else logits.argmax(-1).index_select(0, rows)
        ops.mask(logits, rows, bits)
        if asking is not None:
            asking.mask(ops, filled)
        return Masked(plan.masked, bars(bits, best))

    def _filled(self, plan: SamplingPlan, which: list[int], logits: Tensor) -> NDArray[np.int32]:
        """Fill the bits of these masks, by their place among the masked rows, one row each."""
        assert self.mask is not None, "a row has a mask, and nobody knows masks"
        bits = np.full((len(which), mask_words(logits.shape[1])), -1, np.int32)
        self.mask.fill([plan.masks[at] for at in which], bits)
        return bits


def _asked_states(head: LogitsHead, hidden: Tensor, plan: SamplingPlan) -> RowStates | None:
    """Return the hidden states that rows ask for. Sums are made here: a prompt's states are megabytes."""
    if not plan.states:
        return None
    every = len(plan.states) == len(hidden)
    states = head.states(hidden if every else hidden[plan.states])
    if not plan.summed:
        return RowStates(plan.state_chunks, states.float())
    chunks, places = np.unique(plan.state_chunks, return_inverse=True)
    (index,) = upload([places.astype(np.int64)], hidden.device)
    return RowStates(chunks.tolist(), _exact_sums(states, index, len(chunks)))


def _exact_sums(states: Tensor, chunk_of: Tensor, chunks: int) -> Tensor:
    """Add up the states of each chunk: (n, hidden) → (chunks, hidden) float64. States are rounded to multiples of
    STATE_UNIT, so that sums below 2^23 are exact, and do not depend on how prompts were cut into chunks."""
    sums = states.new_zeros((chunks, states.shape[1]), dtype=torch.float64)
    for first in range(0, len(states), _SUMMED_ROWS):
        rows = slice(first, first + _SUMMED_ROWS)
        sums.index_add_(0, chunk_of[rows], states[rows].double().div_(STATE_UNIT).round_())
    return sums.mul_(STATE_UNIT)


def _penalties(rows: PenalisedRows, device_tokens: DeviceTokens, device: torch.device) -> Penalties:
    parts: list[NDArray[Any]] = [
        rows.rows, rows.tokens, rows.starts, rows.prompt_lens, rows.lengths, *rows.strengths, rows.banned
    ]  # fmt: skip
    penalties = Penalties(*upload([np.ascontiguousarray(part) for part in parts], device))
    if len(rows.awaited):  # the last token of a row may be known on the device alone
        (index,) = upload([rows.awaited.astype(np.int64)], device)
        awaited = device_tokens.of(rows.sampled, device).to(torch.int32)
        penalties.tokens.index_copy_(0, index, awaited)
    return penalties


@dataclass(frozen=True, slots=True, eq=False)
class _LogprobRows:
    """The rows that ask for log-probabilities, with their logits as the model gave them."""

    plan: SamplingPlan
    rows: Tensor | None  # which of the step's rows they are; None: all
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, plan: SamplingPlan) -> _LogprobRows | None:
        """Keep the logits of the rows that ask, before all that overwrites them; None: no row asks."""
        if not plan.asking:
            return None
        if len(plan.asking) == len(logits):
            return cls(plan, None, logits.clone() if plan.edited else logits)
        (index,) = upload([np.array(plan.asking, np.int64)], logits.device)
        return cls(plan, index, logits.index_select(0, index))

    def mask(self, ops: Ops, bits: NDArray[np.int32]) -> None:
        """Mask the rows that ask about allowed tokens only. bits: (masked rows of the plan, words)."""
        plan, own = self.plan, self._own
        if own:
            mask_of = {row: at for at, row in enumerate(plan.masked)}
            chosen = np.ascontiguousarray(bits[[mask_of[plan.asking[at]] for at in own]])
            ops.mask(self.logits, *upload([np.array(own, np.int32), chosen], self.logits.device))

    @property
    def _own(self) -> list[int]:
        """The rows that ask about allowed tokens only, by their place among those that ask."""
        plan, masked = self.plan, set(self.plan.masked)
        return [at for at, row in enumerate(plan.asking) if plan.among_allowed[at] and row in masked]

    def found(self, ops: Ops, tokens: Tensor, eos: frozenset[int]) -> RowLogprobs:
        """Return the log-probabilities of chosen tokens. Of tokens that end an answer all count together where a row
        asks about allowed tokens: which of them it is says nothing about the answer."""
        chosen = tokens if self.rows is None else tokens.index_select(0, self.rows)
        most = min(max(self.plan.likeliest), self.logits.shape[1])
        values, top, top_ids = ops.log_probabilities(self.logits, chosen, most)
        if len(eos) > 1 and (own := self._own):
            values = _ends_together(values, self.logits, chosen, own, sorted(eos))
        return RowLogprobs(self.plan.asking, self.plan.likeliest, values, top, top_ids)


def _ends_together(values: Tensor, logits: Tensor, chosen: Tensor, own: list[int], eos: list[int]) -> Tensor:
    """values, chosen: (n,); logits: (n, vocab). Return values, in which those of the rows `own` that chose a token of
    `eos` are of all these tokens together."""
    rows, ends = upload([np.array(own, np.int64), np.array(eos, np.int64)], logits.device)
    mine, taken = logits.index_select(0, rows).float(), chosen.index_select(0, rows)
    together = mine.index_select(1, ends).logsumexp(-1) - mine.logsumexp(-1)
    ended = (taken[:, None] == ends).any(-1)
    return values.index_copy(0, rows, torch.where(ended, together, values.index_select(0, rows)))


def _row_sampling(plan: SamplingPlan, rows: int, device: torch.device) -> RowSampling:
    if plan.drawn is None:  # the argmax, whatever else is said
        zeros, ones, none = np.zeros(rows, np.int32), np.ones(rows), np.zeros((rows, 4), np.int32)
        return RowSampling(
            *upload([zeros.astype(np.float32), zeros, ones, np.zeros(rows), none, zeros], device)
        )
    assert plan.drawn.fixed is not None
    return RowSampling(*upload([*plan.drawn.fixed, plan.drawn.positions], device))
