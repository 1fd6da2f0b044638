"""Tests the MTP layer of DeepSeek-V3 in published checkpoints, which shares the blocks of its model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from batchinfer.core.errors import JobFileError
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_mtp import StoredMtp
from tests.batchinfer.engine.asking_heads import compare_drawn, compare_sharing
from tests.batchinfer.engine.random_work import Work, works
from tests.batchinfer.engine.small_engine import checkpoint
from tests.batchinfer.mtp_layers import MtpReference, add_mtp, weights_changed
from tests.checkpoints import kept_folder
from tests.examples import examples


@cache
def made(**options: Any) -> tuple[Checkpoint, StoredMtp, MtpReference]:
    folder = kept_folder()
    reference = add_mtp(folder, **options)
    model = inspect_checkpoint(folder)
    stored = inspect_heads(folder, model)
    assert isinstance(stored, StoredMtp)
    own = [
        one
        for name, one in reference.stored.items()
        if not name.endswith(("head.weight", "embed_tokens.weight"))
    ]
    assert stored.weight_bytes(2) == 2 * sum(one.numel() for one in own)
    return model, stored, reference


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", [1, 3], ids=["experts", "dense"])
@settings(max_examples=examples(2, 80), deadline=None, print_blob=True)
@given(work=works(may_constrain=False))
def test_a_layer_proposes_the_tokens_of_the_reference(first: int, work: Work) -> None:
    """Chunks, shared prefixes, copied blocks, preemptions and right drafts change nothing."""
    compare_drawn(*made(first_k_dense_replace=first), work)


def test_an_mtp_layer_reads_shared_prefixes() -> None:
    compare_sharing(*made(first_k_dense_replace=1), 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("eh_proj.weight"),
            r"the checkpoint has no tensor model\.layers\.2\.eh_proj\.weight",
        ),
        (
            lambda w: w.update({"enorm.weight": torch.ones(7)}),
            r"model\.layers\.2\.enorm\.weight is of shape .7,., and the model's heads are of .48,.",
        ),
        (
            lambda w: w.update({"shared_head.head.weight": torch.ones(7, 48)}),
            r"shared_head\.head\.weight is of shape .7, 48., and the model's heads are of .260, 48.",
        ),
        (
            lambda w: w.update({"eh_proj.bias": torch.ones(48)}),
            r"has the tensor model\.layers\.2\.eh_proj\.bias, which no MTP layer has",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = Path(shutil.copytree(made(first_k_dense_replace=1)[0].path, tmp_path / "model"))
    weights_changed(folder, change)
    model = inspect_checkpoint(folder)
    with pytest.raises(JobFileError, match=message):
        inspect_heads(folder, model)


def test_tables_of_its_own_may_be_left_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made(first_k_dense_replace=1)[0].path, tmp_path / "model"))
    weights_changed(
        folder, lambda w: [w.pop(name) for name in ("embed_tokens.weight", "shared_head.head.weight")]
    )
    assert isinstance(inspect_heads(folder, inspect_checkpoint(folder)), StoredMtp)


@pytest.mark.parametrize("count", [0, 2])
def test_checkpoints_without_exactly_one_mtp_layer_are_refused(tmp_path: Path, count: int) -> None:
    folder = Path(shutil.copytree(made(first_k_dense_replace=1)[0].path, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    weights_changed(folder, lambda w: w.clear() if not count else None)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    with pytest.raises(JobFileError, match=f"num_nextn_predict_layers is {count}; one layer is supported"):
        inspect_heads(folder, inspect_checkpoint(folder))
    llama = checkpoint("llama")
    with pytest.raises(JobFileError, match=r"is the job's model, .* a llama has no MTP layers"):
        inspect_heads(llama.path, llama)
