"""Runs whole jobs on GGUF files and compares the answers with the dequantised checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from batchinfer.core.errors import JobFileError
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import load_job
from batchinfer.models.opening import open_checkpoint
from batchinfer.pipeline.options import RunOptions
from batchinfer.verbs.starter import write_starter
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.checkpoints import EOS, make_family_tokenizer, make_tokenizer
from tests.gguf_files import make_gguf, tokenizer_keys

ROWS = [{"text": text} for text in ("alpha", "beta and gamma", "alpha and more", "delta")]
MIXED = (Type.Q4_K, Type.Q6_K, Type.Q4_0)
NAME = "models/tiny-Q4_K_M.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF model in the folder `models`, and its dequantised checkpoint in `plain`."""
    folder = tmp_path_factory.mktemp("gguf")
    keys = tokenizer_keys(make_tokenizer(folder / "plain"))
    (folder / "models").mkdir()
    make_gguf(folder / NAME, folder / "plain", "llama", MIXED, metadata=keys)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize("named", [NAME, "models"])
def test_answers_equal_the_dequantised_checkpoint(tmp_path: Path, folder: Path, named: str) -> None:
    answers = []
    for model in (folder / named, folder / "plain"):
        job_folder = tmp_path / f"job-{len(answers)}"
        job_folder.mkdir()
        job = write_job(job_folder, model, ROWS)
        outcome = run(job, RunOptions(), ("model.dtype", "float32"))
        assert (outcome.exit_code, outcome.row["rows_ok"]) == (0, len(ROWS))
        answers.append([row["generated_text"] for row in table(job)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_values_of_4_bits_stay_as_they_are_stored(tmp_path: Path, folder: Path) -> None:
    job, int4 = write_job(tmp_path, folder / NAME, ROWS), ("model.quantization", "int4")
    outcome = run(job, RunOptions(), int4)
    assert (outcome.exit_code, outcome.row["quantization"]) == (0, "int4")
    found = "\n".join(validate_job(load_job(job, (int4,))))
    assert re.search(r"[\d.]+% of the weights of linear layers stay in int4 as they are stored", found)
    found = "\n".join(validate_job(load_job(job, ())))
    assert (
        "weights stored as Q4_0 and Q4_K and Q6_K are dequantised when they are loaded: all weights" in found
    )
    assert "bfloat16" in found or "float32" in found


def test_a_file_is_read_through_a_link_that_the_job_names(tmp_path: Path, folder: Path) -> None:
    """A link in the folder that leads elsewhere is rejected."""
    link = tmp_path / "x.gguf"
    link.symlink_to(folder / NAME)
    assert open_checkpoint(link).spec == open_checkpoint(folder / NAME).spec


def test_every_token_that_ends_a_turn_ends_an_answer(tmp_path: Path) -> None:
    """The file names one. Others are known by their texts, if they are control tokens."""
    special = ["<|eot_id|>", "<|end_of_text|>", "<|other|>"]
    fast = make_family_tokenizer(tmp_path / "plain", "x", special, ["<end_of_turn>"])
    keys = tokenizer_keys(fast)
    make_gguf(tmp_path / "x.gguf", tmp_path / "plain", "llama", metadata=keys, vocab=len(fast))
    ids = [fast.convert_tokens_to_ids(each) for each in special[:2]]
    assert open_checkpoint(tmp_path / "x.gguf").spec.eos_token_ids == (EOS, *ids)
    assert Tokenizer.load(tmp_path / "x.gguf").decode([65, EOS]) != ""


def test_a_job_with_another_model_in_the_folder_names_the_file(tmp_path: Path, folder: Path) -> None:
    models = shutil.copytree(folder / "models", tmp_path / "models")
    shutil.copy(folder / NAME, models / "tiny-Q8_0.gguf")
    with pytest.raises(
        JobFileError, match=r"contains 2 models in GGUF: .*name the file, such as .*tiny-Q4_K_M\.gguf"
    ):
        validate_job(load_job(write_job(tmp_path, models, ROWS), ()))


def test_init_takes_a_file(tmp_path: Path, folder: Path) -> None:
    for name, ready in ((NAME, True), ("models", True), ("models/none.gguf", False)):
        model = folder / name
        starter = write_starter(tmp_path / f"new-{model.name}", str(model))
        assert starter.ready is ready
        if ready:
            assert load_job(tmp_path / f"new-{model.name}/job.yaml").model.path.samefile(model)
