"""Connects the ranks of an engine in process groups."""

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
from batchinfer.engine.ranks.division import UNDIVIDED, Division, RankConfig
from batchinfer.models.parallel.group import Group, SingleRankGroup, SpentTime, TimedGroup, TorchGroup

# No timeout in the groups: the watchdog of the engine decides how long to wait. A rank that ends is noticed at once.
_ENDLESS = timedelta(days=365)
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The process groups through which a rank communicates with the other ranks of its engine.

    Attributes:
        rank: The number of the rank.
        division: How the model is sharded.
        everyone: The group of all ranks of the engine.
        peers: The group of the ranks in the same pipeline stage, which compute the same layers.
        wait: The time spent waiting for other pipeline stages so far.
        sums: The time spent in collectives so far. None: there are no peers, or the ranks use GPUs.
    """

    rank: int = 0
    division: Division = UNDIVIDED
    everyone: Group = field(default_factory=SingleRankGroup)
    peers: Group = field(default_factory=SingleRankGroup)
    wait: SpentTime = field(default_factory=SpentTime)
    sums: SpentTime | None = None

    @property
    def is_sharded(self) -> bool:
        """True if the engine has more than one rank."""
        return self.division.ranks > 1

    @property
    def has_head(self) -> bool:
        """True if the rank has a shard of the output layer: with tensor parallelism, in the last pipeline stage."""
        return self.division.tensor > 1 and self.division.neighbour(self.rank, 1) is None


def join_ranks(rank_config: RankConfig | None, device: torch.device) -> RankGroups:
    """Connect to the other ranks of the engine, and return when all are connected.

    The default process group of torch is not set.

    Args:
        rank_config: The rank of this process. None: the model is not sharded.
        device: The device of this rank.

    Raises:
        Unavailable: The GPUs cannot communicate, or are different models.
    """
    if rank_config is None:
        return RankGroups()
    rank, division = rank_config.rank, rank_config.division
    store = _file_store(rank_config)
    connect = partial(_connect, device=device)
    everyone: Group = connect(c10d.PrefixStore("everyone", store), rank, division.ranks)
    peers = everyone if division.stages == 1 else SingleRankGroup()
    if division.stages > 1 and division.peers > 1:
        stage = c10d.PrefixStore(f"stage {division.stage(rank)}", store)
        peers = connect(stage, division.peer(rank), division.peers)
    _warm_up_groups(rank, division, (everyone, peers), device)
    if device.type == "cuda" or division.peers == 1:
        return RankGroups(rank, division, everyone, peers)
    sums = SpentTime()
    everyone, peers = (TimedGroup(group, sums) for group in (everyone, peers))
    return RankGroups(rank, division, everyone, peers, sums=sums)


def _file_store(rank_config: RankConfig) -> c10d.Store:
    store = c10d.FileStore(rank_config.rendezvous, rank_config.division.ranks)
    store.set_timeout(_ENDLESS)  # NCCL uses the store whenever two ranks first communicate
    return store


def _warm_up_groups(rank: int, division: Division, groups: tuple[Group, Group], device: torch.device) -> None:
    everyone, peers = groups
    try:
        # NCCL allocates memory when two ranks first communicate, which must be before the KV cache is sized.
        # Neighbouring stages connect in their first step.
        kinds = everyone.all_gather(_kind(device))
        word = peers.all_reduce(torch.ones(1, dtype=torch.int64, device=device))
        first = [other for other in range(1, division.ranks) if division.stage(other) == 0]
        if division.stages > 1 and rank == 0:  # rank 0 sends tokens to all ranks of the first stage
            for other in first:
                everyone.send(word, other)
        elif division.stages > 1 and rank in first:
            everyone.receive(word, 0)
        same = bool((kinds == kinds[0]).all())  # waits for the device
    except DistBackendError as error:
        raise Unavailable(
            f"the ranks' GPUs cannot communicate: {error}; a container needs more than 64 MiB of shared memory "
            "(--ipc=host or --shm-size=2g). Set NCCL_DEBUG=WARN in the environment for details"
        ) from error
    if not same:
        raise Unavailable(
            "the ranks of an engine have different GPUs (multiprocessors and compute capabilities are "
            f"{kinds.tolist()}); set CUDA_VISIBLE_DEVICES to GPUs of the same model"
        )


def _kind(device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.zeros(3, dtype=torch.int64)
    found = torch.cuda.get_device_properties(device)
    return torch.tensor([found.multi_processor_count, found.major, found.minor], device=device)


def _connect(store: c10d.Store, rank: int, size: int, device: torch.device) -> TorchGroup:
    processes = c10d.ProcessGroup(store, rank, size)
    on_gpu = device.type == "cuda"
    kind = c10d.ProcessGroup.BackendType.NCCL if on_gpu else c10d.ProcessGroup.BackendType.GLOO
    processes._set_default_backend(kind)
    backend = _nccl(store, rank, size) if on_gpu else _gloo(store, rank, size)
    processes._register_backend(torch.device(device.type), kind, backend)
    return TorchGroup(processes)


def _gloo(store: c10d.Store, rank: int, size: int) -> Any:
    # gloo would listen on the host's address without a host name
    made: Any = distributed.ProcessGroupGloo  # its type stubs do not describe the options
    options = made._Options()
    options._devices = [made.create_device(hostname=_LOOPBACK)]
    options._timeout = _ENDLESS
    return made(store, rank, size, options)


def _nccl(store: c10d.Store, rank: int, size: int) -> Any:
    # The ranks are on one machine
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    made: Any = distributed.ProcessGroupNCCL
    return made(store, rank, size, _ENDLESS)


def min_over_ranks(count: int, group: Group, device: torch.device) -> int:
    """Return the minimum of a number over all ranks of a group. All of them must call this function.

    Args:
        count: The number on this rank.
        group: The ranks.
        device: The device of this rank.
    """
    return int(group.all_gather(torch.tensor([count], device=device)).min())
