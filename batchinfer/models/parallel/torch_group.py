"""A group whose ranks speak through torch.distributed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class TorchGroup:
    """The ranks of a process group of torch's."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self.rank, self.size = processes.rank(), processes.size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add x up over all ranks, in place."""
        self._processes.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the ranks' tensors."""
        found = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._processes.allgather([[*found.unbind()]], [x.contiguous()]).wait()
        return found

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite x with that of the rank `source`."""
        self._processes.broadcast(x, source).wait()
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x, and wait until it is taken."""
        self._processes.send([x], to, 0).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for a tensor, which overwrites x."""
        self._processes.recv([x], source, 0).wait()
        return x
