"""Runs whole jobs in int4: the first run calibrates the weights, later runs reuse them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from batchinfer import cli
from batchinfer.core.errors import JobFileError, OutputConflict, Unavailable
from batchinfer.engine.config import CalibrationOrder
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.facts import this_machine
from batchinfer.models.calibration.work import CalibrationOutcome
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.pipeline.calibration import calibration
from batchinfer.pipeline.calibration.calibration import MOST_WEIGHTS, Listener, write_calibrated
from batchinfer.pipeline.options import RunOptions
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.report.progress import Progress
from batchinfer.verbs.prompts_job import prompts_job
from batchinfer.verbs.quantize import export_job_model, quantize_job
from tests.batchinfer.int4_jobs import INT4, PLAIN, ROWS, make_divisible
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.checkpoints import make_tokenizer
from tests.published_formats import make_published
from tests.settings import changed, has_gpus

OTHERS = [{"text": f"gamma {number}"} for number in range(5)]
SILENT = Listener(Progress(None, job="test", quiet=True), lambda _: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_divisible(tmp_path_factory.mktemp("model"))


def weights(job: Path) -> dict[str, bytes]:
    """Return the calibrated weights in the state folder, by path."""
    state = next(job.parent.rglob(".batchinfer-res"))
    return {str(path): path.read_bytes() for path in sorted(state.glob("int4/*/*"))}


def test_the_first_run_calibrates_and_later_ones_reuse(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, model, ROWS, **PLAIN)
    off = run(job, RunOptions(limit=2), *INT4, ("model.calibration", "off"))
    assert (off.row["quality_kl"], off.row["calibration_s"]) == (None, None)
    assert not weights(job)
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "calibrate_in_child", die_halfway)
        with pytest.raises(Unavailable):
            run(job, RunOptions(), *INT4)
    first = run(job, RunOptions(limit=3), *INT4)  # a trial has the weights of the whole job
    assert (first.exit_code, first.row["computed_requests"]) == (0, 3), "without calibration it is other work"
    assert first.row["calibration_s"] > 0
    assert 0 < first.row["quality_kl"] < 5
    assert 0 <= first.row["quality_top1"] <= 1
    assert first.row["quality_positions"] > 20
    kept = weights(job)
    assert len(kept) > 5
    assert not any("making" in path or "left" in path for path in kept)
    whole = run(job, RunOptions(), *INT4)
    assert (whole.row["calibration_s"], whole.row["reused_requests"]) == (None, 3)
    assert whole.row["quality_kl"] == first.row["quality_kl"]
    forecast = forecast_job(load_job(job, INT4), lambda _: None, lambda _: None)
    assert (forecast.plan.to_run, forecast.plan.present) == (0, len(ROWS))
    with (tmp_path / "in.jsonl").open("a") as file:  # other prompts
        file.writelines(json.dumps(row) + "\n" for row in OTHERS)
    later = run(job, RunOptions(), *INT4)
    assert later.row["computed_requests"] == len(OTHERS)
    assert weights(job) == kept


def die_halfway(order: CalibrationOrder, *_: Any) -> None:
    (order.folder / "left.safetensors").write_bytes(b"half of a file")
    raise Unavailable("the process that calibrates was killed")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton")
@pytest.mark.parametrize("short", [0, 1])
def test_ranks_calibrate_with_answers_if_the_model_fits_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """A GPU has `short` bytes less than the int4 model needs."""
    has_gpus(monkeypatch, "0", "1")
    model = make_divisible(tmp_path / "model", intermediate_size=128)
    path = write_job(tmp_path, model, ROWS[:4], engine={"device": "cuda", "tensor_parallel_size": 2}, **PLAIN)
    job, told, orders = load_job(path, INT4), list[str](), list[CalibrationOrder]()
    setup = check_setup(job, state_of(job), this_machine(job.engine.device))
    assert isinstance(setup.checkpoint, Checkpoint)
    taken = loaded_bytes(setup.checkpoint.spec.quantized("int4"), setup.checkpoint.parameters, 4)
    memory = -int(-taken // MOST_WEIGHTS) - short
    hardware = replace(setup.setting.placement.hardware, memory_bytes=memory)
    setup = replace(setup, setting=changed(setup.setting, hardware=hardware))

    def calibrated(order: CalibrationOrder, *_: Any) -> CalibrationOutcome:
        orders.append(order)
        return CalibrationOutcome(None)

    monkeypatch.setattr(calibration, "calibrate_in_child", calibrated)
    assert write_calibrated(job, setup, tmp_path / "int4", Listener(SILENT.progress, told.append))
    assert [order.answer_tokens > 0 for order in orders] == [not short]
    assert any("too large for one GPU" in line for line in told) == bool(short)
    assert orders[0].load.device == "cuda"


def test_the_verb_calibrates_again_only_when_asked(model: Path, tmp_path: Path) -> None:
    job, told = load_job(write_job(tmp_path, model, ROWS, **PLAIN), ()), list[str]()
    made = quantize_job(job, False, Listener(SILENT.progress, told.append))
    assert made.made
    assert made.loss is not None
    assert len(told) == 2  # nothing of experts
    assert made.folder.name == name_of(model, "1")
    assert not quantize_job(job, False, SILENT).made
    with (tmp_path / "in.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in OTHERS)
    assert quantize_job(job, False, SILENT).loss == made.loss
    again = quantize_job(job, True, SILENT)
    assert again.made
    assert again.folder == made.folder
    assert again.loss != made.loss


def name_of(model: Path, version: str) -> str:
    """Return the folder name of a model's calibrated weights."""
    of = inspect_checkpoint(model).fingerprint({})
    return hashlib.sha256(f"{of} {version}".encode()).hexdigest()[:24]


def test_experts_with_few_tokens_are_reported(tmp_path: Path) -> None:
    """Models with experts calibrated before this feature have other weights."""
    sparse, told = tmp_path / "sparse", list[str]()
    make_divisible(sparse, "mixtral")
    job = load_job(write_job(tmp_path, sparse, ROWS[:6], **PLAIN), INT4)
    found = quantize_job(job, False, Listener(SILENT.progress, told.append))
    assert re.match("[1-9]0? of 10 experts had fewer than 512 tokens of these rows", told[-1])
    made = inspect_checkpoint(found.folder).for_quantization("int4")
    assert all(linear.stored for linear in made.spec.linears() if linear.experts)
    assert not quantize_job(job, False, SILENT).made
    assert found.folder.name == name_of(sparse, "1 experts")


def test_an_exported_model_is_an_ordinary_checkpoint(model: Path, tmp_path: Path) -> None:
    """A job on it has the calibrating job's answers, and transformers reads the description of its weights."""
    file = write_job(tmp_path, model, ROWS, **PLAIN)
    found = export_job_model(load_job(file, INT4), tmp_path / "exported", 32, SILENT)
    with pytest.raises(OutputConflict, match="is there already"):
        export_job_model(load_job(file, INT4), tmp_path / "exported", 32, SILENT)
    assert {path.name for path in tmp_path.glob("*.tmp")} == set()
    stored = inspect_checkpoint(found.folder).for_quantization("int4")
    assert {form.group for form in stored.spec.forms} == {32}
    config = AutoConfig.from_pretrained(found.folder)
    assert config.quantization_config["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    calibrated = run(file, RunOptions(), *INT4)
    answers = [row["generated_text"] for row in table(file)]
    other = run(file, RunOptions(replace=True), *INT4, ("model.path", str(found.folder)))
    assert [row["generated_text"] for row in table(file)] == answers
    assert calibrated.row["quality_kl"] == pytest.approx(found.loss.kl if found.loss else None, rel=1e-6)
    assert other.row["quality_kl"] is None


def test_models_that_cannot_be_calibrated(model: Path, tmp_path: Path) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", "w4a16")
    make_tokenizer(tmp_path / "packed")
    job = write_job(tmp_path, tmp_path / "packed", ROWS, **PLAIN)
    assert run(job, RunOptions(), *INT4).row["quality_kl"] is None
    with pytest.raises(JobFileError, match="cannot be calibrated: wanted a decoder"):
        quantize_job(load_job(job, ()), False, SILENT)


def test_a_job_without_texts_and_one_of_a_query_calibrate_too(model: Path, tmp_path: Path) -> None:
    """Then the next tokens after prompts are compared. A query runs again for its rows."""
    write_job(tmp_path, model, ROWS, **PLAIN)
    query = {"input": {"sql": "SELECT text FROM 'in.jsonl'", "path": None}}
    job = write_job(tmp_path, model, task="embed", prompt=PLAIN["prompt"], sampling=None, **query)
    done = run(job, RunOptions(), *INT4)
    assert done.exit_code == 0
    assert done.row["quality_positions"] == len(ROWS) // 3


def test_rows_that_are_all_errors_calibrate_nothing(model: Path, tmp_path: Path) -> None:
    rows = ["{not json", {"text": None}]
    job = write_job(tmp_path, model, rows, on_error={"max_error_rate": 1.0}, **PLAIN)
    done = run(job, RunOptions(), *INT4)
    assert (done.exit_code, done.row["quality_kl"]) == (0, None)
    with pytest.raises(JobFileError, match="no row that can be run"):
        quantize_job(load_job(job, ()), False, SILENT)


def test_the_command_calibrates_on_a_file_of_prompts_as_on_a_job_with_these_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the folder remains."""
    job = write_job(tmp_path, model, ROWS, **PLAIN)
    (tmp_path / "lines.txt").write_text("\n\n".join(row["text"] for row in ROWS))
    before, made = {path.name for path in tmp_path.iterdir()}, []
    sources = {
        "of-job": [str(job)],
        "of-rows": [str(model), "--prompts", str(tmp_path / "in.jsonl")],
        "of-lines": [str(model), "--prompts", str(tmp_path / "lines.txt")],
    }
    for name, source in sources.items():
        output = ["--output", str(tmp_path / name), "--group", "64", "--json"]
        assert cli._guarded(["quantize", *source, *output]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["folder"] == str(tmp_path / name)
        assert said["loss"]["tokens"] > 0
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")})
    assert {path.name for path in tmp_path.iterdir()} - before == {*sources}
    assert made[0]
    assert made[0] == made[1] == made[2]
    # 96 inputs are no groups of 64: this layer stays as it was
    form = dict(inspect_checkpoint(tmp_path / "of-job").for_quantization("int4").spec.layers[0].forms)
    assert {name: one.group for name, one in form.items()} == {"qkv": 64, "o": 64, "gate_up": 64}
    assert cli._guarded(["quantize", str(job), "--group", "64"]) == 2
    assert "together with --output" in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "prompt"), [
    ([{"prompt": "a", "text": "b"}], {"user": "{{ prompt }}"}),
    ([{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}], {"messages": "messages"}),
    (["{not json", {"text": "b", "id": 3}], {"text": "text"}),
])  # fmt: skip
def test_prompts_of_a_calibration_file(
    model: Path, tmp_path: Path, rows: list[Any], prompt: dict[str, str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    found = prompts_job(str(model), file, tmp_path, [("model.dtype", "float32")])
    assert found.prompt is not None
    assert found.prompt.model_dump(exclude_none=True, exclude_defaults=True) == prompt
    assert (found.model.path, found.model.dtype) == (model, "float32")


def test_files_without_prompts_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "columns.jsonl": b'{"question": "a", "id": 1}',
        "rows.jsonl": b"{not json",
        "bytes.txt": b"\xff\xfe\x00",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    output = ["--output", str(tmp_path / "out")]
    for name, text in (
        ("columns.jsonl", "the file has the columns question, id; wanted one of messages, prompt, text"),
        ("rows.jsonl", "has no row that can be read"),
        ("bytes.txt", "not a text in UTF-8"),
        ("missing.jsonl", "there is no such file"),
    ):
        code = cli._guarded(["quantize", str(model), "--prompts", str(tmp_path / name), *output])
        assert code == (66 if name == "missing.jsonl" else 2)
        assert text in " ".join(capsys.readouterr().err.split())
    assert cli._guarded(["quantize", str(model), "--prompts", str(tmp_path / "columns.jsonl")]) == 2
    assert "works with a model in place of the job, and with --output" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "out").exists()
