"""Samples token ids on any device: the arguments of all rows are built once a step and copied together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.runner.sampled import DeviceTokens, Masked, RowLogprobs, Sampled
from batchinfer.engine.schedule.constraints import Constraints
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.staging import upload
from batchinfer.models.ops.interface import NO_TOKEN, Ops
from batchinfer_kernels.mask import bars, mask_words
from batchinfer_kernels.penalties import Penalties
from batchinfer_kernels.sample import RowSampling


class LogitsHead(Protocol):
    """The end of a model, which makes logits of hidden states."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Make the logits: (n, hidden) → (n, vocab) float32."""

    def argmax(self, hidden: Tensor) -> Tensor:
        """Find the argmax of the logits, (n, hidden) → (n,) int64; NO_TOKEN where they are not finite numbers."""


class TokenMask(Protocol):
    """Says which tokens a row may get next, for example those that a grammar allows."""

    def masks(self, sequence: Sequence) -> bool:
        """Whether this row is masked. If so, each of its steps waits for the token before."""

    def allowed(self, sequences: list[Sequence], tokens: list[int]) -> list[bool]:
        """Say of each sequence, which is masked, whether this token may come next. False also where only `fill` can
        say."""

    def fill(self, sequences: list[Sequence], bits: NDArray[np.int32]) -> None:
        """Clear the bits of the tokens that may not come next; all are set before.

        bits: (sequences, ceil(vocab / 32)); see batchinfer_kernels.mask. Called while a GPU computes the step.
        """


@dataclass(frozen=True, slots=True)
class ConstraintMask:
    """Masks the rows that have constraints, as `TokenMask` says."""

    constraints: Constraints

    def masks(self, sequence: Sequence) -> bool:
        return sequence.constraint is not None

    def allowed(self, sequences: list[Sequence], tokens: list[int]) -> list[bool]:
        began = time.perf_counter()
        found = [
            sequence.constraint is not None and sequence.constraint.allows(token)
            for sequence, token in zip(sequences, tokens, strict=True)
        ]
        self.constraints.work.mask_s += time.perf_counter() - began
        return found

    def fill(self, sequences: list[Sequence], bits: NDArray[np.int32]) -> None:
        self.constraints.fill([sequence.constraint for sequence in sequences], bits)


@dataclass(frozen=True, slots=True)
class Sampler:
    """Order of the steps: penalties, bans below min_tokens, mask, temperature, top-k, top-p, min-p, draw.

    As in transformers, top-p renormalises what top-k left, and min-p compares with the most likely token.
    Log-probabilities are of the logits before the first of these steps.

    `on_host`: logits are in the host's memory, so that a token can be looked at as soon as it is chosen. Then a greedy
    row whose last token obeyed its mask takes the argmax first, and its mask is filled only where that token is not
    allowed. The tokens are the same; a model that was taught its format hardly ever needs a mask.
    """

    eos_token_ids: frozenset[int]
    mask: TokenMask | None = None
    on_host: bool = False

    def masks(self, sequence: Sequence) -> bool:
        """Whether the tokens of this row are masked."""
        return self.mask is not None and self.mask.masks(sequence)

    def next_tokens(
        self,
        ops: Ops,
        head: LogitsHead,
        hidden: Tensor,
        sequences: list[Sequence],
        device_tokens: DeviceTokens | None = None,
    ) -> Sampled:
        """Find the next token of each row from its hidden state. Logits are written only for rows that need more than
        their argmax. `device_tokens`: last tokens that only the device knows."""
        if self.tries_argmax(sequences):
            return self._corrected(ops, head, hidden, sequences)
        return self.sample(ops, head.logits(hidden), sequences, device_tokens)

    def tries_argmax(self, sequences: list[Sequence]) -> bool:
        """Whether each row's token is the argmax of its logits, or is likely to be and can be looked at on the host."""
        if not all(s.plain_greedy or _is_greedy(s) for s in sequences):
            return False
        if self.mask is None:
            return True
        return all((self.on_host and s.masking.followed) or not self.mask.masks(s) for s in sequences)

    def _corrected(self, ops: Ops, head: LogitsHead, hidden: Tensor, sequences: list[Sequence]) -> Sampled:
        """The argmax of each row, and of those whose mask does not allow it what it does allow."""
        tokens = head.argmax(hidden)
        refused = self.refused(sequences, tokens)
        if not refused:
            return Sampled(tokens)
        masked = [sequences[row] for row in refused]
        for sequence in masked:
            sequence.masking.followed = False
        corrected = self.sample(ops, head.logits(hidden[refused]), masked)
        tokens[refused] = corrected.tokens
        return Sampled(tokens, masked=corrected.masked)

    def refused(self, sequences: list[Sequence], found: Tensor) -> list[int]:
        """The rows whose token in `found` is not known to be allowed."""
        if self.mask is None or not any(map(self.mask.masks, sequences)):
            return []
        tokens = found.tolist()
        asked = [i for i, s in enumerate(sequences) if self.masks(s) and tokens[i] != NO_TOKEN]
        allowed = self.mask.allowed([sequences[i] for i in asked], [tokens[i] for i in asked])
        return [row for row, may in zip(asked, allowed, strict=True) if not may]

    def sample(
        self, ops: Ops, logits: Tensor, sequences: list[Sequence], device_tokens: DeviceTokens | None = None
    ) -> Sampled:
        """The next token of each row, and its log-probabilities where they are asked for.

        logits: (n, vocab) float32, which are changed. `device_tokens`: last tokens that only the device knows.
        """
        shaped = [i for i, s in enumerate(sequences) if _reshaped(s)]
        masked = [i for i, s in enumerate(sequences) if self.masks(s)]
        asking = _LogprobRows.of(logits, sequences, {*shaped, *masked})
        if shaped:
            ops.penalise(
                logits, self._penalties(shaped, sequences, device_tokens or DeviceTokens(), logits.device)
            )
        if masked and all(s.request.params.greedy for s in sequences) and not asking:
            return self._greedy(ops, logits, masked, sequences)
        barred = self._masked(ops, logits, masked, sequences) if masked else None
        tokens = ops.sample(logits, _row_sampling(sequences, logits.device))
        return Sampled(tokens, asking.found(ops, tokens) if asking else None, barred)

    def _greedy(self, ops: Ops, logits: Tensor, which: list[int], sequences: list[Sequence]) -> Sampled:
        """The argmax of each row, `which` of them are masked."""
        unsure = [i for i in which if self.on_host and sequences[i].masking.followed]
        sure = sorted({*which}.difference(unsure))
        bits = np.full((len(sequences), mask_words(logits.shape[1])), -1, np.int32)
        if sure:
            bits[sure] = self._filled([sequences[i] for i in sure], logits)
        tokens, barred = ops.masked_argmax(logits, *upload([bits], logits.device))
        if unsure:
            refused = [unsure[row] for row in self.refused([sequences[i] for i in unsure], tokens[unsure])]
            self._correct(ops, logits, refused, sequences, (tokens, barred))
        if len(which) < len(sequences):
            (index,) = upload([np.array(which, np.int64)], logits.device)
            barred = barred.index_select(0, index)
        return Sampled(tokens, masked=Masked([sequences[i] for i in which], barred))

    def _correct(
        self,
        ops: Ops,
        logits: Tensor,
        rows: list[int],
        sequences: list[Sequence],
        found: tuple[Tensor, Tensor],
    ) -> None:
        """Put into `found` (tokens, barred) what these rows' masks allow."""
        if not rows:
            return
        bits = torch.from_numpy(self._filled([sequences[i] for i in rows], logits))
        for all_rows, corrected in zip(found, ops.masked_argmax(logits[rows], bits), strict=True):
            all_rows[rows] = corrected

    def _masked(self, ops: Ops, logits: Tensor, which: list[int], sequences: list[Sequence]) -> Masked:
        filled = self._filled([sequences[i] for i in which], logits)
        rows, bits = upload([np.array(which, np.int32), filled], logits.device)
        # A copy of the rows would take as much memory as all logits do
        best = logits[which].argmax(-1) if self.on_host else logits.argmax(-1).index_select(0, rows)
        ops.mask(logits, rows, bits)
        return Masked([sequences[i] for i in which], bars(bits, best))

    def _filled(self, sequences: list[Sequence], logits: Tensor) -> NDArray[np.int32]:
        """Fill the bits of these sequences' masks, one row each."""
        assert self.mask is not None
        bits = np.full((len(sequences), mask_words(logits.shape[1])), -1, np.int32)
        self.mask.fill(sequences, bits)
        return bits

    def _penalties(
        self, rows: list[int], sequences: list[Sequence], device_tokens: DeviceTokens, device: torch.device
    ) -> Penalties:
        chosen = [sequences[i] for i in rows]
        params = [s.request.params for s in chosen]
        held = [np.frombuffer(s.tokens, np.int32) if s.request.params.penalised else _NONE for s in chosen]
        lengths = np.array([len(ids) for ids in held], np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        prompts = np.minimum([s.prompt_length for s in chosen], lengths).astype(np.int32)
        floats = [
            np.array([getattr(p, name) for p in params], np.float32)
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        ]
        indices, tokens = np.array(rows, np.int32), np.concatenate([*held, _NONE])
        parts: list[NDArray[Any]] = [indices, tokens, starts, prompts, lengths, *floats, self._banned(chosen)]
        penalties = Penalties(*upload(parts, device))
        self._fill_in(penalties, chosen, (starts + lengths - 1).tolist(), device_tokens)
        return penalties

    def _fill_in(
        self, penalties: Penalties, sequences: list[Sequence], last: list[int], device_tokens: DeviceTokens
    ) -> None:
        """The last token of a row may be known on the device alone."""
        waits = [s.placeholders > 0 and s.request.params.penalised for s in sequences]
        if True in waits:
            device, waiting = penalties.tokens.device, list(compress(sequences, waits))
            (index,) = upload([np.array(list(compress(last, waits)), np.int64)], device)
            penalties.tokens.index_copy_(0, index, device_tokens.of(waiting, device).to(torch.int32))

    def _banned(self, sequences: list[Sequence]) -> NDArray[np.int32]:
        """List the tokens that may not end a row yet: (n, most) int32, padded with -1."""
        banned = [self._bans_of(s) for s in sequences]
        table = np.full((len(banned), max(map(len, banned))), -1, np.int32)
        for row, ids in enumerate(banned):
            table[row, : len(ids)] = ids
        return table

    def _bans_of(self, sequence: Sequence) -> list[int]:
        if not _bans(sequence):
            return []
        params = sequence.request.params
        return sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class _LogprobRows:
    """The rows that ask for log-probabilities, with their logits as the model gave them."""

    sequences: list[Sequence]
    rows: Tensor | None  # which of the step's rows they are; None: all
    logits: Tensor

    @classmethod
    def of(cls, logits: Tensor, sequences: list[Sequence], changed: set[int]) -> _LogprobRows | None:
        """`changed`: rows whose logits are about to be overwritten. None: no row asks."""
        rows = [i for i, s in enumerate(sequences) if s.logprobs is not None]
        if not rows:
            return None
        chosen = [sequences[i] for i in rows]
        if len(rows) == len(sequences):
            return cls(chosen, None, logits.clone() if changed else logits)
        (index,) = upload([np.array(rows, np.int64)], logits.device)
        return cls(chosen, index, logits.index_select(0, index))

    def found(self, ops: Ops, tokens: Tensor) -> RowLogprobs:
        chosen = tokens if self.rows is None else tokens.index_select(0, self.rows)
        most = max(s.request.params.logprobs or 0 for s in self.sequences)
        most = min(most, self.logits.shape[1])
        return RowLogprobs(self.sequences, *ops.log_probabilities(self.logits, chosen, most))


_NONE = np.empty(0, np.int32)


def _is_greedy(sequence: Sequence) -> bool:
    """Whether nothing but a mask can give the row another token than the argmax now. It may by now have the tokens that
    it must have at least, without which `plain_greedy` is false."""
    return sequence.request.params.greedy and sequence.logprobs is None and not _reshaped(sequence)


def _reshaped(sequence: Sequence) -> bool:
    return sequence.request.params.penalised or _bans(sequence)


def _bans(sequence: Sequence) -> bool:
    """Whether it may not end yet. Its constraint alone says when an answer may, where it has one."""
    return sequence.constraint is None and sequence.output_length < sequence.request.params.min_tokens


def _row_sampling(sequences: list[Sequence], device: torch.device) -> RowSampling:
    params = [s.request.params for s in sequences]
    keys = np.frombuffer(b"".join(s.request.key[:16] for s in sequences), "<i4").reshape(-1, 4)
    positions = np.array([s.output_length for s in sequences], np.int32)
    parts: list[NDArray[Any]] = [
        np.array([p.temperature for p in params], np.float32),
        np.array([max(p.top_k, 0) for p in params], np.int32),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        keys.astype(np.int32),
        positions,
    ]
    return RowSampling(*upload(parts, device))
