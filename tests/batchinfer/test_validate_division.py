"""Tests that `validate` rejects a division from a checkpoint's headers, and names the possible ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import CannotSplit
from batchinfer.job import load_job
from batchinfer.models.checkpoint import weights
from batchinfer.plan.forecast.layouts import LayoutForecast
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.plan.forecast.forecasts import planned
from tests.batchinfer.test_replicas import pytestmark  # noqa: F401  (two ranks need two cores)
from tests.checkpoints import make_checkpoint, make_model_folder, make_tokenizer
from tests.lora_adapters import make_adapter
from tests.published_formats import make_published

TENSOR, STAGES = (f"engine.{way}_parallel_size" for way in ("tensor", "pipeline"))


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a weight is read."""

    def read(*given: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(weights.CheckpointWeights, "layer", read)


def stored_as(folder: Path, form: str) -> Path:
    make_published(folder / "packed", folder / "plain", form)
    make_tokenizer(folder / "packed")
    return write_job(folder, folder / "packed", people(2))


@pytest.mark.parametrize("held", ["none", "stored"])
def test_groups_that_ranks_would_divide_are_refused(tmp_path: Path, held: str) -> None:
    """Halves of a feed-forward layer have 96 columns in groups of 32: thirds would fit, if the heads allowed
    three ranks."""
    path = stored_as(tmp_path, "gptq")
    quantization = ("model.quantization", held)
    with pytest.raises(CannotSplit, match="no whole groups of 32") as refused:
        validate_job(load_job(path, [(TENSOR, "2"), quantization]))
    assert "engine.tensor_parallel_size can be 1, and engine.pipeline_parallel_size 1 to 2" in str(
        refused.value
    )
    assert refused.value.exit_code == 69
    assert validate_job(load_job(path, [(STAGES, "2"), quantization]))[-1] == "the job file has no mistakes"


def test_formats_that_are_read_as_a_whole_are_refused(tmp_path: Path) -> None:
    path = stored_as(tmp_path, "nf4")
    with pytest.raises(CannotSplit, match=r"are read as a whole.*tensor_parallel_size can be 1, and"):
        validate_job(load_job(path, [(TENSOR, "2")]))
    assert validate_job(load_job(path, [(STAGES, "2")]))[-1] == "the job file has no mistakes"


def test_layouts_are_refused_for_how_weights_are_stored(tmp_path: Path) -> None:
    found = planned(stored_as(tmp_path, "nf4"), hardware="2xl4").layouts

    def layout(tensor: int, stages: int) -> LayoutForecast:
        return next(one for one in found if (one.tensor, one.stages) == (tensor, stages))

    assert "are read as a whole" in str(layout(2, 1).refused)
    assert layout(1, 2).refused is None


def test_a_dora_is_refused_if_ranks_have_parts_of_rows(tmp_path: Path) -> None:
    source = make_model_folder(tmp_path / "model")
    make_adapter(tmp_path / "dora", source, ["q_proj"], dora=True)
    adapted = {
        "path": str(tmp_path / "model"),
        "adapters": {"dora": str(tmp_path / "dora")},
        "adapter": "dora",
    }
    path = write_job(tmp_path, tmp_path / "model", people(2), model=adapted)
    with pytest.raises(CannotSplit, match="a DoRA is merged into whole rows"):
        validate_job(load_job(path, [(TENSOR, "2")]))
    assert validate_job(load_job(path, [(STAGES, "2")]))[-1] == "the job file has no mistakes"


@pytest.mark.sample(3)
@pytest.mark.parametrize("calibration", ["auto", "off"])
@pytest.mark.parametrize(
    ("experts", "columns", "ranks", "works"),
    [(5, 96, 2, "1"), (5, 64, 4, "1, 2"), (6, 96, 4, "1, 2")],  # of 6 experts two ranks have whole ones
)
def test_experts_that_ranks_would_split_inside_a_group_are_refused(
    tmp_path: Path, calibration: str, experts: int, columns: int, ranks: int, works: str
) -> None:
    """The error comes before weights are calibrated or loaded."""
    sizes = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    make_checkpoint(
        tmp_path / "model", "mixtral", **sizes, intermediate_size=columns, num_local_experts=experts
    )
    make_tokenizer(tmp_path / "model")
    path = write_job(tmp_path, tmp_path / "model", people(2))
    int4 = [("model.quantization", "int4"), ("model.calibration", calibration)]
    with pytest.raises(CannotSplit, match=r"experts\.down are no whole groups of 32") as refused:
        validate_job(load_job(path, [(TENSOR, str(ranks)), *int4]))
    assert str(refused.value).endswith(f"can be divided among {works}")
    assert refused.value.exit_code == 69
    for size in works.split(", "):
        assert validate_job(load_job(path, [(TENSOR, size), *int4]))[-1] == "the job file has no mistakes"
