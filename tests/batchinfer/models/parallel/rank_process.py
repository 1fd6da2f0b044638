"""A rank as a process: `python -m … FOLDER RANK` computes its part of FOLDER's checkpoint with three others, two stages
of two ranks each, over gloo, and leaves the logits that it has in FOLDER/logits.RANK."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed

from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.interface import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.parallel.place import Portion, RankPlace
from batchinfer.models.parallel.ranks import Ranks
from batchinfer.models.parallel.torch_group import TorchGroup
from tests.batchinfer.models.paged import run_paged
from tests.batchinfer.models.parallel.parts import load_part

RANKS, TENSOR = 4, 2
PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 2, 17, 63)]


def group_of(folder: Path, name: str, rank: int, size: int) -> TorchGroup:
    """Meet the others, on the loopback."""
    made: Any = distributed.ProcessGroupGloo
    options = made._Options()
    options._devices = [made.create_device(hostname="127.0.0.1")]
    store = distributed.FileStore(str(folder / f"meeting.{name}"), size)
    return TorchGroup(made(store, rank, size, options))


@dataclass
class Stage:
    """A stage that waits for the one before it."""

    decoder: Decoder
    everyone: TorchGroup

    @property
    def spec(self) -> Any:
        return self.decoder.spec

    @property
    def max_positions(self) -> int:
        return self.decoder.max_positions

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        rank, before = self.everyone.rank, None
        if rank >= TENSOR:
            before = torch.empty(len(token_ids), self.spec.hidden)
            self.everyone.receive(before, rank - TENSOR)
        found = self.decoder.forward(token_ids, inputs, caches, plans, before)
        if rank < TENSOR:
            self.everyone.send(found, rank + TENSOR)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden) if self.spec.ends else hidden


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    checkpoint = inspect_checkpoint(folder)
    stage, part = divmod(rank, TENSOR)
    everyone = group_of(folder, "all", rank, RANKS)
    tensor = group_of(folder, f"stage{stage}", part, TENSOR)
    half = len(checkpoint.spec.layers) // 2
    layers = (0, half) if stage == 0 else (half, len(checkpoint.spec.layers))
    place, ops = RankPlace(Portion(part, TENSOR), layers=layers), TorchOps()
    decoder: Any = Stage(load_part(checkpoint, ops, place, Ranks(tensor)), everyone)
    found = run_paged(decoder, ops, PROMPTS, chunk=20)
    if stage:
        save_file({str(i): each.contiguous() for i, each in enumerate(found)}, folder / f"logits.{rank}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
