"""Compares the kernel that advances rows by a decode step with its reference, and the reference with the
host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.engine.schedule.step_plan import ARGMAX
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer_kernels.advance_rows import StepRows, advance_rows_reference
from batchinfer_kernels.gpu.advance_rows import advance_rows
from batchinfer_kernels.step_tables import StepTables

PADDING = -7  # the value of padding rows


class Rows:
    """Rows of a graph with padding rows; each row may have its own offset in rotary tables."""

    def __init__(self, count: int, padding: int, block_size: int, seed: int) -> None:
        self.count, self.padding, self.block_size = count, padding, block_size
        self.draw = draw = np.random.default_rng(seed)
        self.contexts = draw.integers(1, 40, self.count).astype(np.int32)
        self.repeats = draw.integers(1, 5, self.count).astype(np.int32)
        blocks = -(-44 // self.block_size)
        self.tables = draw.permutation((self.count + self.padding) * blocks).astype(np.int32)
        self.tables = self.tables.reshape(-1, blocks)
        self.offsets = draw.integers(0, 2, self.count) * 1000

    def tensors(self, device: str) -> dict[str, Tensor]:
        """Return a graph's tensors after the first step."""
        rows = self.count + self.padding
        kept = {name: torch.full((rows,), PADDING) for name in ("slots", "token_ids", "positions")}
        kept["contexts"] = torch.full((rows,), PADDING, dtype=torch.int32)
        kept["positions"][: self.count] = torch.from_numpy(self.offsets + self.contexts - 1)
        return {name: one.to(device) for name, one in kept.items()}

    @property
    def host(self) -> HostBatch:
        """Return the first step as on the host."""
        return HostBatch(
            token_ids=np.zeros(self.count, np.int64),
            positions=self.offsets + self.contexts - 1,
            slots=[np.zeros(self.count, np.int64)],
            tables=[StepTables.of(self.tables[: self.count])],
            keeps_all=[True],
            sampled_rows=np.arange(self.count),
            sampling=ARGMAX,
            query_lens=[1] * self.count,
            context_lens=self.contexts.tolist(),
        )


@pytest.mark.parametrize("rows", [Rows(5, 3, 4, 1), Rows(300, 20, 16, 2), Rows(128, 0, 1, 3)])
def test_rows_are_moved_on_as_the_host_would(rows: Rows, device: str) -> None:
    got, wanted, host = rows.tensors(device), rows.tensors("cpu"), rows.host
    firsts, repeats, tables = map(torch.from_numpy, (rows.contexts, rows.repeats, rows.tables))
    for step in range(1, 5):
        tokens = torch.from_numpy(rows.draw.integers(-1, 50, rows.count))
        advance_rows_reference(tokens, step, firsts, repeats, StepRows(tables, rows.block_size, **wanted))
        *own, blocks = (tensor.to(device) for tensor in (firsts, repeats, tables))
        advance_rows(tokens.to(device), step, *own, StepRows(blocks, rows.block_size, **got))
        assert all(torch.equal(got[name].cpu(), one) for name, one in wanted.items()), step
        later = host.later(np.minimum(step, rows.repeats - 1), rows.block_size)
        said = {
            "slots": later.slots[0],
            "contexts": np.array(later.context_lens, np.int32),
            "positions": later.positions,
            "token_ids": tokens.clamp_min(0).numpy(),
        }
        for name, values in said.items():
            assert np.array_equal(wanted[name][: rows.count].numpy(), values), (step, name)
            assert set(wanted[name][rows.count :].tolist()) <= {PADDING}, (step, name)


def test_a_further_cache_group_has_slots_of_its_own(device: str) -> None:
    """Data that all groups share is written with the first group."""
    rows = Rows(9, 1, 4, 4)
    parts = (rows.contexts, rows.repeats, rows.tables[::-1].copy())
    firsts, repeats, tables = (torch.from_numpy(part).to(device) for part in parts)
    slots, tokens = rows.tensors(device)["slots"], torch.zeros(9, dtype=torch.int64, device=device)
    advance_rows(tokens, 2, firsts, repeats, StepRows(tables, 4, slots))
    last = rows.contexts + np.minimum(2, rows.repeats - 1) - 1
    wanted = parts[2][np.arange(9), last // 4] * 4 + last % 4
    assert slots.tolist() == [*wanted.tolist(), PADDING]


def test_wrong_operands_are_refused() -> None:
    rows = Rows(4, 1, 4, 5)
    kept, tokens = rows.tensors("cpu"), torch.zeros(4, dtype=torch.int64)
    own = [*map(torch.from_numpy, (rows.contexts, rows.repeats, rows.tables))]
    wrong = (
        ([own[0].long(), *own[1:]], {}),
        ([own[0], own[1][:3], own[2]], {}),
        ([*own[:2], own[2][:3]], {}),
        (own, {"contexts": kept["contexts"].long()}),
        (own, {"positions": kept["positions"][:2]}),
    )
    for move in (advance_rows, advance_rows_reference):
        for tensors, more in wrong:
            with pytest.raises(ValueError, match="expected"):
                move(tokens, 1, *tensors[:2], StepRows(tensors[2], 4, **(kept | more)))
    with pytest.raises(ValueError, match="contiguous"):
        advance_rows(tokens, 1, *own[:2], StepRows(own[2][:, ::2], 4, **kept))
