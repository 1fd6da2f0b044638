"""How the ranks of an engine come together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from batchinfer.engine.ranks.seat import Seat
from batchinfer.models.parallel.alone import Alone
from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.torch_group import TorchGroup

# A rank that computes, or is stopped, keeps the others waiting: whoever watches the engine decides how long. One that
# ends is noticed at once.
_ENDLESS = timedelta(days=365)
_LOOPBACK = "127.0.0.1"


def join(seat: Seat | None, device: torch.device) -> Group:
    """Meet the other ranks, and return their group once all are there; None: there are no others. No group of torch's
    is made the default of this process."""
    if seat is None:
        return Alone()
    store = c10d.FileStore(seat.meeting, seat.division.ranks)
    processes = c10d.ProcessGroup(store, seat.rank, seat.division.ranks)
    on_gpu = device.type == "cuda"
    kind = c10d.ProcessGroup.BackendType.NCCL if on_gpu else c10d.ProcessGroup.BackendType.GLOO
    processes._set_default_backend(kind)
    processes._register_backend(torch.device(device.type), kind, (_nccl if on_gpu else _gloo)(store, seat))
    return TorchGroup(processes)


def _gloo(store: c10d.Store, seat: Seat) -> Any:
    """Return what speaks on CPUs, and listens on the loopback alone: gloo's own choice would be the host's name."""
    made: Any = distributed.ProcessGroupGloo  # what its stubs say of options is not what it takes
    options = made._Options()
    options._devices = [made.create_device(hostname=_LOOPBACK)]
    options._timeout = _ENDLESS
    return made(store, seat.rank, seat.division.ranks, options)


def _nccl(store: c10d.Store, seat: Seat) -> Any:
    made: Any = distributed.ProcessGroupNCCL
    return made(store, seat.rank, seat.division.ranks)


def fewest(count: int, group: Group, device: torch.device) -> int:
    """Return the least of all ranks' counts."""
    return int(group.all_gather(torch.tensor([count], device=device)).min())
