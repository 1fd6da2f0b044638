"""Values of which one rank has each, on all ranks with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.models.parallel.group import Group


def merged(x: Tensor, group: Group) -> Tensor:
    """Return the values of all ranks, of which each is 0 on all ranks but one. Their bytes are added, so that none is
    rounded, and -0 stays what it is."""
    return group.all_reduce(x.contiguous().view(torch.uint8)).view(x.dtype)
