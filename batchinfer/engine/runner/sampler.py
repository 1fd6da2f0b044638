"""Samples token ids on any device. The sampling arguments of all rows are copied to it in one transfer per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.runner.row_scores import row_scores
from batchinfer.engine.runner.sampled import DeviceTokens, MaskedRows, RowLogprobs, RowStates, SamplingResult
from batchinfer.engine.schedule.step_plan import PenalisedRows, SamplingPlan
from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens
from batchinfer.engine.tensors.staging import upload
from batchinfer.models.ops.interface import Ops
from batchinfer_kernels.mask import is_excluded, mask_words
from batchinfer_kernels.penalties import Penalties
from batchinfer_kernels.sample import NO_TOKEN, RowSampling

# Hidden states are about 1; float32 values above 2^-6 are exact multiples of this unit
STATE_UNIT = 2.0**-30
_SUMMED_ROWS = 1024  # rows that are copied to float64 at a time


def edit(logits: Tensor, plan: SamplingPlan) -> None:
    """Add the biases of a sampling plan to logits, and exclude tokens that the plan does not allow, in place.

    Args:
        logits: [n, vocab]. The logits of excluded tokens become -inf.
        plan: The sampling plan.
    """
    if plan.biased is not None:
        _add(logits, plan.biased)
    if plan.allowed is not None:
        _keep(logits, plan.allowed)


def _add(logits: Tensor, biased: BiasedTokens) -> None:
    rows, tokens, biases = biased
    # Each (row, token) occurs once, so index_put_ needs no accumulation
    row, token, bias = upload((rows.astype(np.int64), tokens.astype(np.int64), biases), logits.device)
    logits.index_put_((row, token), logits[row, token] + bias)


def _keep(logits: Tensor, allowed: AllowedTokens) -> None:
    rows, tokens = (array.astype(np.int64) for array in allowed)
    row, token, narrowed = upload((rows, tokens, np.unique(rows)), logits.device)
    kept = logits[row, token]
    logits.index_fill_(0, narrowed, float("-inf"))
    logits.index_put_((row, token), kept)


class LogitsHead(Protocol):
    """The final norm and the output layer of a model, which compute logits from hidden states."""

    def states(self, hidden: Tensor) -> Tensor:
        """Return hidden states, [n, hidden], after the model's final norm. They are unchanged if it has none."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [n, vocab], for hidden states, [n, hidden]."""

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the token with the highest logit for each of n hidden states, int64 [n].

        NO_TOKEN is returned where logits are not finite.

        Args:
            hidden: [n, hidden].
        """


class TokenMask(Protocol):
    """Token masks, which say which tokens may come next in a row, for example by a grammar. Each mask has a number."""

    def allowed(self, masks: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Check single tokens against masks without computing the whole masks.

        Args:
            masks: The numbers of n masks.
            tokens: One token per mask.

        Returns:
            [n], True if the mask certainly allows the token. False: it forbids the token, or only `fill` can tell.
        """

    def fill(self, masks: Sequence[int], bits: NDArray[np.int32]) -> None:
        """Write whole token masks. It is called while a GPU computes the step.

        Args:
            masks: The numbers of n masks.
            bits: int32 [n, ceil(vocab / 32)], in which all bits are set. Bit t % 32 of word t // 32 is cleared if
                token t must not come next.
        """


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples the next tokens of a step.

    Order of operations: biases, allowed tokens, penalties, bans below min_tokens, mask, temperature, top-k, top-p,
    min-p, draw. As in transformers, top-p renormalises the result of top-k, and min-p compares with the most likely
    token. Log-probabilities are computed from the unmodified logits. If a row asks for log-probabilities among allowed
    tokens, only its mask is applied.

    Attributes:
        eos_token_ids: The end-of-sequence tokens of the model.
        mask: The token masks of constraints. None: no row has a constraint.
        on_host: True if logits are in host memory. The masks of greedy rows are then computed only if needed.
        classifier: The classification head: returns logits, [n, labels], from pooled states, [n, hidden]. None: the
            model has none.
    """

    eos_token_ids: frozenset[int]
    mask: TokenMask | None = None
    # Trying the argmax first gives the same tokens: the whole mask is computed only if it forbids the argmax
    on_host: bool = False
    classifier: Callable[[Tensor], Tensor] | None = None

    def next_tokens(
        self,
        ops: Ops,
        head: LogitsHead,
        hidden: Tensor,
        plan: SamplingPlan,
        device_tokens: DeviceTokens | None = None,
    ) -> SamplingResult:
        """Compute the tokens, log-probabilities, hidden states and scores of a step.

        The logits are not stored if all rows only need their argmax.

        Args:
            ops: The operators.
            head: The final norm and the output layer of the model.
            hidden: [n, hidden], the hidden states of the n rows (tokens of the step) that have an output.
            plan: The outputs of the rows, and how tokens are chosen.
            device_tokens: The tokens that the previous step sampled. None: the host has them already.
        """
        states = _asked_states(head, hidden, plan)
        if plan.classified and states is not None:
            states = self._classified(states, plan)
        scores = None if plan.scored is None else row_scores(head.logits, hidden, plan.scored)
        if not plan.chooses:
            return SamplingResult(hidden.new_empty(0, dtype=torch.int64), states=states, scores=scores)
        if plan.chosen is not None:
            hidden = hidden.index_select(0, *upload([plan.chosen.astype(np.int64)], hidden.device))
        if self.tries_argmax(plan):
            found = self._corrected(ops, head, hidden, plan)
        else:
            found = self.sample(ops, head.logits(hidden), plan, device_tokens)
        return found if states is None and scores is None else replace(found, states=states, scores=scores)

    def _classified(self, states: RowStates, plan: SamplingPlan) -> RowStates:
        # Sums of hidden states are complete, because a step contains whole prompts
        assert self.classifier is not None, "the model has no classification head"
        pooled = states.states
        if plan.summed:
            (lengths,) = upload(
                [np.unique(plan.state_chunks, return_counts=True)[1].astype(np.int64)], pooled.device
            )
            pooled = pooled / lengths[:, None]
        return replace(states, states=self.classifier(pooled.float()))

    def tries_argmax(self, plan: SamplingPlan) -> bool:
        """Return True if a step may be sampled by computing only the argmax of its logits.

        All rows must be greedy. Rows with a mask are possible only if `on_host` is True.

        Args:
            plan: The sampling plan of the step.
        """
        # On the host, the argmax is checked against the mask
        return plan.argmax and (not plan.masked or (self.on_host and all(plan.followed)))

    def _corrected(self, ops: Ops, head: LogitsHead, hidden: Tensor, plan: SamplingPlan) -> SamplingResult:
        tokens = head.argmax(hidden)
        refused = self._refused(plan, list(range(len(plan.masked))), tokens)
        if not refused:
            return SamplingResult(tokens)
        rows, masks = [plan.masked[at] for at in refused], [plan.masks[at] for at in refused]
        own = SamplingPlan(masked=list(range(len(rows))), masks=masks, followed=[False] * len(rows))
        corrected = self.sample(ops, head.logits(hidden[rows]), own)
        tokens[rows] = corrected.tokens
        masked = corrected.masked
        return SamplingResult(tokens, masked=None if masked is None else replace(masked, rows=rows))

    def _refused(self, plan: SamplingPlan, which: list[int], found: Tensor) -> list[int]:
        """Return which masked rows have tokens that their masks do not certainly allow.

        Args:
            plan: The sampling plan.
            which: The masked rows to check, as indices into `plan.masked`. The result also contains such indices.
            found: [rows], the token of each row.
        """
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
    ) -> SamplingResult:
        """Choose the next token of each row from its logits, and compute log-probabilities if requested.

        Args:
            ops: The operators.
            logits: float32 [n, vocab], modified in place.
            plan: How tokens are chosen.
            device_tokens: The tokens that the previous step sampled. None: the host has them already.
        """
        asking = _LogprobRows.of(logits, plan)
        edit(logits, plan)
        if plan.penalised is not None:
            ops.penalise(logits, _penalties(plan.penalised, device_tokens or DeviceTokens(), logits.device))
        if plan.masked and plan.drawn is None and not asking:
            return self._greedy(ops, logits, plan)
        barred = self._masked(ops, logits, plan, asking) if plan.masked else None
        tokens = ops.sample(logits, _row_sampling(plan, len(logits), logits.device))
        return SamplingResult(
            tokens, asking.found(ops, tokens, self.eos_token_ids) if asking else None, barred
        )

    def _greedy(self, ops: Ops, logits: Tensor, plan: SamplingPlan) -> SamplingResult:
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
        return SamplingResult(tokens, masked=MaskedRows(plan.masked, barred))

    def _correct(
        self, ops: Ops, logits: Tensor, plan: SamplingPlan, refused: list[int], found: tuple[Tensor, Tensor]
    ) -> None:
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
    ) -> MaskedRows:
        filled = self._filled(plan, list(range(len(plan.masked))), logits)
        rows, bits = upload([np.array(plan.masked, np.int32), filled], logits.device)
        # On a device, indexing logits by row would copy up to all of them
        best = logits[plan.masked].argmax(-1) if self.on_host else logits.argmax(-1).index_select(0, rows)
        ops.mask(logits, rows, bits)
        if asking is not None:
            asking.mask(ops, filled)
        return MaskedRows(plan.masked, is_excluded(bits, best))

    def _filled(self, plan: SamplingPlan, which: list[int], logits: Tensor) -> NDArray[np.int32]:
        assert self.mask is not None, "a row has a mask, but the sampler has no masks"
        bits = np.full((len(which), mask_words(logits.shape[1])), -1, np.int32)
        self.mask.fill([plan.masks[at] for at in which], bits)
        return bits


def _asked_states(head: LogitsHead, hidden: Tensor, plan: SamplingPlan) -> RowStates | None:
    # Sums are computed on the device to save a transfer
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
    # Multiples of 2^-30 have exact sums below 2^23, which do not depend on how a prompt was divided into
    # chunks
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
    if len(rows.awaited):  # the host does not have the last token of these rows yet
        (index,) = upload([rows.awaited.astype(np.int64)], device)
        awaited = device_tokens.of(rows.sampled, device).to(torch.int32)
        penalties.tokens.index_copy_(0, index, awaited)
    return penalties


@dataclass(frozen=True, slots=True, eq=False)
class _LogprobRows:
    """The n rows that request log-probabilities, with their unmodified logits.

    Attributes:
        plan: The sampling plan.
        rows: [n], the indices of the rows. None: all rows of the step.
        logits: [n, vocab].
    """

    plan: SamplingPlan
    rows: Tensor | None
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, plan: SamplingPlan) -> _LogprobRows | None:
        """Copy the logits of the rows that request log-probabilities, or return None if no row does.

        Args:
            logits: The unmodified logits of all rows, [rows, vocab].
            plan: The sampling plan.
        """
        if not plan.asking:
            return None
        if len(plan.asking) == len(logits):
            return cls(plan, None, logits.clone() if plan.edited else logits)
        (index,) = upload([np.array(plan.asking, np.int64)], logits.device)
        return cls(plan, index, logits.index_select(0, index))

    def mask(self, ops: Ops, bits: NDArray[np.int32]) -> None:
        """Apply masks to the logits of the rows that request log-probabilities among allowed tokens.

        Args:
            ops: The operators.
            bits: The token mask of each masked row of the plan, [masked rows, words].
        """
        plan, own = self.plan, self._own
        if own:
            mask_of = {row: at for at, row in enumerate(plan.masked)}
            chosen = np.ascontiguousarray(bits[[mask_of[plan.asking[at]] for at in own]])
            ops.mask(self.logits, *upload([np.array(own, np.int32), chosen], self.logits.device))

    @property
    def _own(self) -> list[int]:
        plan, masked = self.plan, set(self.plan.masked)
        return [at for at, row in enumerate(plan.asking) if plan.among_allowed[at] and row in masked]

    def found(self, ops: Ops, tokens: Tensor, eos: frozenset[int]) -> RowLogprobs:
        """Return the log-probabilities of the chosen tokens and of the most likely tokens.

        If a row asks for log-probabilities among allowed tokens, a chosen end-of-sequence token gets the probability
        of all end-of-sequence tokens together.

        Args:
            ops: The operators.
            tokens: [rows], the chosen token of each row of the step.
            eos: The end-of-sequence tokens of the model.
        """
        chosen = tokens if self.rows is None else tokens.index_select(0, self.rows)
        most = min(max(self.plan.likeliest), self.logits.shape[1])
        values, top, top_ids = ops.log_probabilities(self.logits, chosen, most)
        if len(eos) > 1 and (own := self._own):
            values = _ends_together(values, self.logits, chosen, own, sorted(eos))
        return RowLogprobs(self.plan.asking, self.plan.likeliest, values, top, top_ids)


def _ends_together(values: Tensor, logits: Tensor, chosen: Tensor, own: list[int], eos: list[int]) -> Tensor:
    rows, ends = upload([np.array(own, np.int64), np.array(eos, np.int64)], logits.device)
    mine, taken = logits.index_select(0, rows).float(), chosen.index_select(0, rows)
    together = mine.index_select(1, ends).logsumexp(-1) - mine.logsumexp(-1)
    ended = (taken[:, None] == ends).any(-1)
    return values.index_copy(0, rows, torch.where(ended, together, values.index_select(0, rows)))


def _row_sampling(plan: SamplingPlan, rows: int, device: torch.device) -> RowSampling:
    if plan.drawn is None:  # greedy
        zeros, ones, none = np.zeros(rows, np.int32), np.ones(rows), np.zeros((rows, 4), np.int32)
        return RowSampling(
            *upload([zeros.astype(np.float32), zeros, ones, np.zeros(rows), none, zeros], device)
        )
    assert plan.drawn.fixed is not None
    return RowSampling(*upload([*plan.drawn.fixed, plan.drawn.positions], device))
