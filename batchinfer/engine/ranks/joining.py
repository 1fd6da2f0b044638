"""How the ranks of an engine come together."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError

from batchinfer.core.errors import Unavailable
from batchinfer.engine.ranks.seat import UNDIVIDED, Division, Seat
from batchinfer.models.parallel.group import Group, SingleRankGroup, SpentTime, TimedGroup, TorchGroup

# A rank that computes, or is stopped, keeps the others waiting: whoever watches the engine decides how long. One that
# ends is noticed at once.
_ENDLESS = timedelta(days=365)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Company:
    """All ranks of an engine, as one of them sees them: `everyone`, and the `peers` that compute the same layers."""

    rank: int = 0
    division: Division = UNDIVIDED
    everyone: Group = field(default_factory=SingleRankGroup)
    peers: Group = field(default_factory=SingleRankGroup)
    wait: SpentTime = field(default_factory=SpentTime)  # for ranks of other stages
    # On collectives; None: no rank computes the same layers, or they are a GPU's, for which nobody waits
    sums: SpentTime | None = None

    @property
    def divided(self) -> bool:
        """Whether there are others."""
        return self.division.ranks > 1

    @property
    def has_head(self) -> bool:
        """Whether the rank has a part of what makes logits, and not all of it, or nothing."""
        return self.division.tensor > 1 and self.division.neighbour(self.rank, 1) is None


def join(seat: Seat | None, device: torch.device) -> Company:
    """Meet the other ranks, and return once all are there; None: there are no others. No group of torch's is made the
    default of this process."""
    if seat is None:
        return Company()
    rank, division = seat.rank, seat.division
    store = _file_store(seat)
    met = partial(_met, device=device)
    everyone: Group = met(c10d.PrefixStore("everyone", store), rank, division.ranks)
    peers = everyone if division.stages == 1 else SingleRankGroup()
    if division.stages > 1 and division.peers > 1:
        stage = c10d.PrefixStore(f"stage {division.stage(rank)}", store)
        peers = met(stage, division.peer(rank), division.peers)
    _speak(rank, division, (everyone, peers), device)
    if device.type == "cuda" or division.peers == 1:
        return Company(rank, division, everyone, peers)
    sums = SpentTime()
    everyone, peers = (TimedGroup(group, sums) for group in (everyone, peers))
    return Company(rank, division, everyone, peers, sums=sums)


def _file_store(seat: Seat) -> c10d.Store:
    store = c10d.FileStore(seat.meeting, seat.division.ranks)
    store.set_timeout(_ENDLESS)  # NCCL asks it whenever two ranks first speak
    return store


def _speak(rank: int, division: Division, groups: tuple[Group, Group], device: torch.device) -> None:
    """Have all ranks exchange a word that will speak later; neighbouring stages do so in their first step.

    NCCL connects two ranks when they first speak, which takes memory that has to be gone when the cache is sized.
    Raises Unavailable where it cannot, and where ranks have GPUs of several kinds: these would capture other graphs.
    """
    everyone, peers = groups
    try:
        kinds = everyone.all_gather(_kind(device))
        word = peers.all_reduce(torch.ones(1, dtype=torch.int64, device=device))
        first = [other for other in range(1, division.ranks) if division.stage(other) == 0]
        if division.stages > 1 and rank == 0:  # which sends tokens to all of the first stage
            for other in first:
                everyone.send(word, other)
        elif division.stages > 1 and rank in first:
            everyone.receive(word, 0)
        same = bool((kinds == kinds[0]).all())  # waits for the device
    except DistBackendError as error:
        raise Unavailable(
            f"the ranks' GPUs cannot speak to one another: {error}; a container needs more shared memory than 64 MiB "
            "(--ipc=host or --shm-size=2g), and NCCL_DEBUG=WARN in the environment says more"
        ) from error
    if not same:
        raise Unavailable(
            "the ranks of an engine have GPUs of several kinds (multiprocessors and compute capabilities are "
            f"{kinds.tolist()}); name some of one kind in CUDA_VISIBLE_DEVICES"
        )


def _kind(device: torch.device) -> torch.Tensor:
    """Return what sizes of kernels depend on, (3,): multiprocessors and compute capability; zeros for a CPU."""
    if device.type != "cuda":
        return torch.zeros(3, dtype=torch.int64)
    found = torch.cuda.get_device_properties(device)
    return torch.tensor([found.multi_processor_count, found.major, found.minor], device=device)


def _met(store: c10d.Store, rank: int, size: int, device: torch.device) -> TorchGroup:
    processes = c10d.ProcessGroup(store, rank, size)
    on_gpu = device.type == "cuda"
    kind = c10d.ProcessGroup.BackendType.NCCL if on_gpu else c10d.ProcessGroup.BackendType.GLOO
    processes._set_default_backend(kind)
    backend = _nccl(store, rank, size) if on_gpu else _gloo(store, rank, size)
    processes._register_backend(torch.device(device.type), kind, backend)
    return TorchGroup(processes)


def _gloo(store: c10d.Store, rank: int, size: int) -> Any:
    """Return the backend of CPUs. It listens on the loopback only: gloo's default is the address of the host's name."""
    made: Any = distributed.ProcessGroupGloo  # what its stubs say of options is not what it takes
    options = made._Options()
    options._devices = [made.create_device(hostname=_LOOPBACK)]
    options._timeout = _ENDLESS
    return made(store, rank, size, options)


def _nccl(store: c10d.Store, rank: int, size: int) -> Any:
    """Return what speaks on GPUs of one machine, and listens on the loopback unless the user says otherwise."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    made: Any = distributed.ProcessGroupNCCL
    return made(store, rank, size, _ENDLESS)


def fewest(count: int, group: Group, device: torch.device) -> int:
    """Return the least of all ranks' counts."""
    return int(group.all_gather(torch.tensor([count], device=device)).min())
