"""Finds the keys that a query sees, from the function with which transformers makes masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.foreign.refusal import CannotRun

# (batch, head, query, key), positions as tensors that broadcast → whether the query sees the key
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def window_of(mask_function: MaskFunction, positions: int) -> int | None:
    """Return how many keys, its own included, a query sees in a sequence of that many tokens; None: all before it.

    Raises CannotRun for a mask that is neither causal nor a sliding window.
    """
    last = positions - 1
    window = int(_seen(mask_function, last, positions).sum())
    places = {0, 1, positions // 2, last, window - 1, window, window + 1}
    for query in sorted(place for place in places if 0 <= place <= last):
        keys = torch.arange(positions)
        wanted = (keys <= query) & (keys > query - window)
        if not torch.equal(_seen(mask_function, query, positions), wanted):
            raise CannotRun("its attention is neither causal nor a sliding window", f"see token {query}")
    return None if window == positions else window


def _seen(mask_function: MaskFunction, query: int, positions: int) -> Tensor:
    """Return which positions the query sees, (positions,) bool."""
    zero = torch.zeros((), dtype=torch.long)
    try:
        found = mask_function(zero, zero, torch.tensor(query), torch.arange(positions))
        return torch.as_tensor(found).expand(positions).bool().cpu()
    except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
        raise CannotRun("its mask of attention depends on more than positions") from error
