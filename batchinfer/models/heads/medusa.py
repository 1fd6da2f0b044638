"""Medusa heads (Cai et al., 2024, arXiv:2401.10774): each proposes the token that is one place further away."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear, silu

from batchinfer.models.heads.stored_medusa import StoredMedusa


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The weights of a head: residual blocks, (hidden, hidden) and (hidden,) each, and the logits', (vocab, hidden)."""

    blocks: list[tuple[Tensor, Tensor]]
    out: Tensor

    def tokens(self, states: Tensor, ranks: int) -> Tensor:
        """Return the tokens with the greatest logits, in descending order: states (n, hidden) → (n, ranks) int64."""
        for weight, bias in self.blocks:
            states = states + silu(linear(states, weight, bias))
        logits = linear(states, self.out)
        return logits.argmax(-1, keepdim=True) if ranks == 1 else logits.topk(ranks).indices


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """Heads on their device. The model's own head says which token follows a state, and head i the one that is i + 2
    places behind the state's."""

    heads: list[_Head]

    @classmethod
    def load(cls, stored: StoredMedusa, dtype: torch.dtype, device: torch.device) -> MedusaHeads:
        """Load all of them, in the dtype of their model."""
        with safe_open(str(stored.weights), framework="pt", device="cpu") as file:
            heads = []
            for head in range(stored.count):
                *blocks, out = (file.get_tensor(name).to(device, dtype) for name, _ in stored.names(head))
                heads.append(_Head(list(zip(blocks[::2], blocks[1::2], strict=True)), out))
        return cls(heads)

    @torch.inference_mode()
    def tokens(self, states: Tensor, count: int, ranks: int = 1) -> Tensor:
        """Return the likeliest tokens of each of the first `count` heads: states behind the final norm, (n, hidden) →
        (n, count, ranks) int64."""
        return torch.stack([head.tokens(states, ranks) for head in self.heads[:count]], 1)
