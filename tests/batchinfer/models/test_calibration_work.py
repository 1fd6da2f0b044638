"""Tests the work of a calibration: counted from sizes, and done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batchinfer.models.calibration import search
from batchinfer.models.calibration.layer import WatchedLinear
from batchinfer.models.calibration.work import COLUMNS_AT_ONCE, calibration_work
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer_kernels import int4_feedback
from batchinfer_kernels.int4_linear import quantize_groups
from tests.batchinfer.models.test_calibrated_folder import FAMILIES, SIZES, calibrate, sequences
from tests.checkpoints import make_checkpoint
from tests.examples import first_of


def _in_place(mine: Any, one: Any, other: Any, **_: Any) -> int:
    rows = one[:-1]
    count = 2 * other[-1] * one[-1]
    for size in rows:
        count *= size
    return int(count)


COUNTED = {torch.ops.aten.addmm_: _in_place, torch.ops.aten.baddbmm_: _in_place}


class Counts:
    """Counts of a calibration's parts."""

    def __init__(self) -> None:
        self.flops = 0
        self.values = Counter[str]()

    def products(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
                found = call(*args)
            self.flops += counter.get_total_flops()
            return found

        return counted

    def scaled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(weight: torch.Tensor, group: int) -> Any:
            self.values["scaled"] += weight.numel()
            return call(weight, group)

        return counted


@pytest.mark.parametrize(
    ("family", "inner"),
    first_of(
        [("qwen2_moe", 20), ("cohere", None), ("llama", None), ("qwen2_moe", None), ("gpt_oss", None)], 1
    ),
)
def test_counted_products_and_scales_equal_the_work_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, inner: int | None
) -> None:
    """`inner`: values of experts that are no whole groups and stay unquantised, next to a shared expert."""
    changed = {} if inner is None else {"moe_intermediate_size": inner}
    make_checkpoint(tmp_path / "model", family, **{**SIZES, **FAMILIES[family], **changed})
    counts = Counts()
    monkeypatch.setattr(search, "round_layer", counts.products(search.round_layer))
    for module in ("channels", "layer", "experts"):
        name = f"batchinfer.models.calibration.{module}.quantize_groups"
        monkeypatch.setattr(name, counts.scaled(quantize_groups))
    usual = WatchedLinear.__call__

    def watched(self: WatchedLinear, x: torch.Tensor) -> torch.Tensor:
        plain, self._inner = self._inner, lambda x: x  # type: ignore[assignment]
        counts.products(usual)(self, x)
        return plain(x)

    monkeypatch.setattr(WatchedLinear, "__call__", watched)
    calibrate(tmp_path / "model", tmp_path / "made")
    tokens = sum(int(row.counted.sum()) for row in sequences(12, 1).rows)
    found = calibration_work(inspect_checkpoint(tmp_path / "model"), tokens, 32)
    assert found.products == pytest.approx(counts.flops, rel=0.02)
    assert found.scaled == counts.values["scaled"]


def test_both_round_as_many_columns_at_once() -> None:
    assert COLUMNS_AT_ONCE == int4_feedback.COLUMNS_AT_ONCE
