"""A causal model as two halves: the decoder, and what makes logits of its hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Given(nn.Module):
    """Stands in for a decoder whose hidden states are known: the model around it then computes their logits alone.

    They are handed in as `inputs_embeds`. `kind`: the class of what the decoder returns.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """The hidden states, as the decoder would return them."""
        return self._kind(last_hidden_state=inputs_embeds)
