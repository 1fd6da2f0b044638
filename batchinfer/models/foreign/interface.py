"""Our attention behind transformers' attention interface.

transformers looks attention up by a name, and hands the function the module that called it. What the function writes
to and reads is the module's own: `attach` gives every module of a model the same object, so that two models in one
process do not meet.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "batchinfer_paged"
_ATTRIBUTE = "batchinfer_attention"


class Attending(Protocol):
    """The receiver of a model's calls of attention."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, **more: Any
    ) -> Tensor:
        """(1, heads, T, D) each → (1, T, q_heads, v_dim)"""

    def mask(self, **of: Any) -> Any:
        """Return the mask that the layers get."""


def attach(model: Any, attending: Attending) -> None:
    """Send the attention of all layers of `model`, and its masks, to `attending`."""
    for module in model.modules():
        setattr(module, _ATTRIBUTE, attending)
    setattr(model.config, _ATTRIBUTE, attending)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: object = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    attending: Attending = getattr(module, _ATTRIBUTE)
    return attending.attend(module, query, key, value, attention_mask, scaling, **more), None


def _mask(**of: Any) -> Any:
    attending: Attending = getattr(of["config"], _ATTRIBUTE)
    return attending.mask(**of)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)
