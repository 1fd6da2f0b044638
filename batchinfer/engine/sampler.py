"""From logits to token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.draws import uniforms
from batchinfer.engine.sequence import Sequence
from batchinfer.ops.interface import NO_TOKEN

# Drawing needs about 40 bytes a logit; 32 rows of a vocabulary of 150,000 are 190 MB, which the KV cache leaves free.
ROWS_AT_ONCE = 32
MIN_TEMPERATURE = 1e-30  # a float32 holds it; one that float32 rounds to 0 would divide 0 by 0


@dataclass(frozen=True, slots=True)
class Sampler:
    """Order of the steps: penalties, bans below min_tokens, temperature, top-k, top-p, min-p, draw.

    As in transformers, top-p renormalises what top-k left, and min-p compares with the likeliest token.
    """

    eos_token_ids: frozenset[int]

    def takes_argmax(self, sequences: list[Sequence]) -> bool:
        """Whether each row's next token is the argmax of its logits, so that the logits need not be written."""
        return all(
            s.request.params.greedy
            and not s.request.params.penalised
            and s.output_length >= s.request.params.min_tokens
            for s in sequences
        )

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """The next token of each row. logits: (n, vocab) float32. NO_TOKEN where a row's logits are not finite."""
        self._reshape(logits, sequences)
        best, chosen = logits.max(-1)
        drawn = [i for i, s in enumerate(sequences) if not s.request.params.greedy]
        for start in range(0, len(drawn), ROWS_AT_ONCE):
            some = drawn[start : start + ROWS_AT_ONCE]
            rows = torch.tensor(some, device=logits.device)
            chosen[rows] = draw(logits[rows], [sequences[i] for i in some])
        return torch.where(best.isfinite(), chosen, NO_TOKEN).tolist()

    def _reshape(self, logits: Tensor, sequences: list[Sequence]) -> None:
        for row, sequence in enumerate(sequences):
            params = sequence.request.params
            if params.penalised:
                penalise(logits[row], sequence)
            if sequence.output_length < params.min_tokens:
                banned = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
                logits[row, sorted(b for b in banned if b < logits.shape[1])] = float("-inf")


def penalise(logits: Tensor, sequence: Sequence) -> None:
    """Repetition (Keskar et al., 2019) over prompt and output, presence and frequency over the output; in place."""
    params, ids = sequence.request.params, np.frombuffer(sequence.tokens, np.int32)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(ids)).long().to(logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if sequence.output_length:
        unique, counts = np.unique(ids[sequence.prompt_length :], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
        where = torch.from_numpy(unique).long().to(logits.device)
        logits[where] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)


def draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Sampled token ids (n,) int64 by inversion: the first token whose cumulated probability exceeds the draw."""
    params = [s.request.params for s in sequences]
    # the greatest logit becomes 0 first, so that no temperature, however small, divides a score to infinity
    scale = torch.tensor([max(p.temperature, MIN_TEMPERATURE) for p in params], device=logits.device)
    below = logits - logits.amax(-1, keepdim=True)
    probabilities = (below / scale[:, None]).softmax(-1).double()
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        keep_top(probabilities, [p.top_k for p in params], [p.top_p for p in params])
    floor = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=logits.device)
    least = floor * probabilities.amax(-1)
    probabilities.masked_fill_(probabilities < least[:, None], 0.0)
    cumulated = probabilities.cumsum(-1)
    u = uniforms([s.request.key for s in sequences], [s.output_length for s in sequences])
    total = cumulated[:, -1]
    target = torch.from_numpy(u).to(logits.device) * total
    target = torch.minimum(
        target, torch.nextafter(total, torch.zeros_like(total))
    )  # u × total may round to total
    return torch.searchsorted(cumulated, target[:, None], right=True)[:, 0]


def keep_top(probabilities: Tensor, top_k: list[int], top_p: list[float]) -> None:
    """Zero what lies outside top-k, then what lies outside the nucleus of the rest (Holtzman et al., 2020); in place.

    Ties are broken by token id. The token that crosses top_p is kept.
    """
    device, vocab = probabilities.device, probabilities.shape[1]
    ordered, order = probabilities.sort(stable=True, dim=-1, descending=True)
    most = torch.tensor([k if k > 0 else vocab for k in top_k], device=device)
    ordered.masked_fill_(torch.arange(vocab, device=device)[None] >= most[:, None], 0.0)
    before = ordered.cumsum(-1) - ordered
    mass = torch.tensor(top_p, dtype=torch.float64, device=device) * ordered.sum(-1)
    outside = (before >= mass[:, None]) & (torch.tensor(top_p, device=device)[:, None] < 1.0)
    outside[:, 0] = False
    ordered.masked_fill_(outside, 0.0)
    probabilities.scatter_(-1, order, ordered)
