from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from batchinfer import cli
from batchinfer.bench import session
from batchinfer.bench.options import BenchOptions
from batchinfer.bench.report import BenchReport, WorkloadResult
from batchinfer.bench.session import best_peaks, run_bench
from batchinfer.bench.vocabulary import made_up_tokenizer
from batchinfer.bench.workloads import WORKLOADS, make_workload
from batchinfer.core.errors import UsageError
from batchinfer.engine.drafts import backoff
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.schedule.budget import step_tokens
from batchinfer.job import load_job
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import hardware_by_name
from batchinfer.models.ops.peaks import MeasuredPeaks
from batchinfer_kernels.cost import Peaks
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.packed_weights import make_fp8

ROWS = dict.fromkeys(WORKLOADS, 12) | {"long-context": 2}
MOST = 24  # tokens of an answer
PEAKS = MeasuredPeaks(None, {"float32": 1e11, "bfloat16": 2e11, "int8": 4e11}, 2e10, 1e10, 0.0)


def bench(*workloads: str, **options: Any) -> BenchReport:
    """Run a bench of the tiny shape in float32 with one thread and fixed peaks."""
    chosen = {"model": "tiny", "dtype": "float32", "device": "cpu", "threads": 1, "repeat": 1, "rows": 24}
    setting = BenchOptions(workloads, **{**chosen, **options})
    return run_bench(setting, lambda line: None, lambda device, dtypes: PEAKS)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[WorkloadResult, dict[str, Any]]]:
    """Results and JSON reports: one run per workload, and two runs of `duplicates`."""
    short = [name for name in WORKLOADS if name not in ("duplicates", "long-context")]
    asked = [((*short,), 12, 1), (("duplicates",), 12, 2), (("long-context",), 2, 1)]
    reports = [bench(*names, rows=rows, repeat=runs, max_tokens=MOST) for names, rows, runs in asked]
    pairs = (pair for one in reports for pair in zip(one.results, one.json["results"], strict=True))
    return {found["workload"]: (result, found) for result, found in pairs}


@pytest.fixture(scope="module")
def every(results) -> dict[str, dict[str, Any]]:
    """The JSON report of each workload."""
    return {name: found for name, (_, found) in results.items()}


@pytest.fixture(scope="module")
def plain() -> BenchReport:
    """A report of a few short rows, for comparisons."""
    return bench("decode", rows=2, max_tokens=16)


@pytest.mark.parametrize("name", WORKLOADS)
def test_metrics_are_consistent(every, name):
    found, workload = every[name], make_workload(name, 512, ROWS[name], MOST)
    wall = found["wall_s"]
    assert len(wall["runs"]) == (2 if name == "duplicates" else 1)
    assert wall["min"] == min(wall["runs"]) <= wall["median"]
    assert 0 < found["plan_s"] < max(wall["runs"])
    assert found["prompt_tokens"] == workload.prompt_tokens
    assert found["output_tokens"] == workload.output_tokens
    assert found["output_tokens_per_s"] == pytest.approx(workload.output_tokens / wall["median"])
    assert found["decode_tokens_run"] == found["decode_tokens_optimum"]
    assert found["prompt_tokens_run"] >= found["prompt_tokens_optimum"]
    assert found["steps"] >= max(row.max_tokens for row in workload.rows)
    assert found["rows_run"] == len(set(workload.rows))
    assert found["preemptions"] == found["recomputed_tokens"] == found["padding_share"] == 0
    # the ideal job needs at most the time of the run, and no efficiency exceeds its whole
    assert 0 < found["ideal_s"] <= found["roofline_s"] * (1 + 1e-9)
    assert found["plan_efficiency"] <= found["roofline_efficiency"] * (1 + 1e-9)
    assert 0 < found["mfu"] <= found["roofline_efficiency"]
    assert 0 < found["mbu"] <= found["roofline_efficiency"]
    assert 0 < found["step_bound_s"] <= found["roofline_s"]
    assert 0 < found["overhead_share"] < 1
    assert sum(found["operators_s"].values()) == pytest.approx(found["roofline_s"], rel=1e-6)
    assert list(found["operators_s"].values()) == sorted(found["operators_s"].values(), reverse=True)


def test_mfu_and_mbu_agree_with_the_engine_s_samples(results):
    result, found = results["mixed"]
    run = result.series.ours[0]
    assert found["mfu"] == pytest.approx(sum(s.flops for s in run.steps) / (run.wall_s * 1e11), rel=1e-6)
    assert found["mbu"] == pytest.approx(sum(s.bytes for s in run.steps) / (run.wall_s * 2e10), rel=1e-6)
    assert len(run.shapes) == len(run.steps) == found["steps"]


def test_duplicates_run_once(every, results):
    found, series = every["duplicates"], results["duplicates"][0].series
    assert found["rows_run"] == 12 - found["duplicates"]
    assert found["duplicates"] == round(12 * 0.4)
    other = found["without_deduplication"]
    assert len(other["wall_s"]["runs"]) == 2
    assert other["relative"] > 0
    assert series.without[0].plan.to_run == 12
    assert series.without[0].answers == series.ours[0].answers
    assert all("without_deduplication" not in every[name] for name in WORKLOADS if name != "duplicates")


def test_a_prefix_tree_runs_every_prefix_once(every):
    """Every prefix fills whole KV blocks."""
    found = every["prefix-tree"]
    assert found["prompt_tokens_run"] == found["prompt_tokens_optimum"] < found["prompt_tokens"] / 3


def test_answers_do_not_depend_on_limits_of_a_step():
    """In float32. Answers depend on the prompt, or equal answers would prove nothing."""
    wide = bench("decode", rows=5, max_tokens=64).results[0].series.ours[0]
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
    report = bench("decode", rows=5, max_tokens=64, **limits)
    narrow = report.results[0].series.ours[0]
    assert report.info.max_num_batched_tokens == 16
    assert max(step.prefill_tokens + step.decode_tokens for step in narrow.steps) <= 16
    assert max(step.running for step in narrow.steps) <= 3
    assert wide.answers == narrow.answers
    assert len(set(wide.answers)) == 5
    assert all(len(set(answer)) > 10 for answer in wide.answers)


def test_transformers_does_the_same_work():
    report = bench("duplicates", rows=6, max_tokens=24, against="transformers")
    (result,) = report.json["results"]
    other = result["against"]
    assert other["name"] == "transformers"
    assert re.match(r"\d+\.\d+", other["version"])
    assert other["equal_rows"] >= 0.75, "in float32 few rows differ: where two logits are almost equal"
    assert other["relative"] == pytest.approx(result["wall_s"]["median"] / other["wall_s"]["median"])
    assert "transformers" in report.table()


def test_a_checkpoint_folder_is_run_with_its_weights(tmp_path):
    make_checkpoint(tmp_path / "model", "qwen2", vocab=300)
    found = bench("decode", rows=4, max_tokens=24, model=str(tmp_path / "model"), against="transformers")
    assert found.json["dummy_weights"] is False
    assert found.json["results"][0]["against"]["equal_rows"] == 1


def test_int8_weights_are_a_byte_each_and_have_a_peak_of_their_own(plain):
    asked = []

    def measure(device: str, dtypes: tuple[str, ...]) -> MeasuredPeaks:
        asked.append((device, dtypes))
        return PEAKS

    options = BenchOptions(
        ("decode",), "tiny", dtype="bfloat16", device="cpu", threads=1, quantization="int8", rows=2, repeat=1,
        max_tokens=16,
    )  # fmt: skip
    report = run_bench(options, lambda line: None, measure)
    assert asked == [("cpu", ("bfloat16", "int8"))] * 2
    assert report.peaks == Peaks(2e11, 2e10, 4e11)
    assert report.info.max_num_batched_tokens == step_tokens(report.cost, report.peaks, 256, 2048)
    assert (report.json["quantization"], report.json["dtype"]) == ("int8", "bfloat16")
    assert report.json["peaks"]["coded_ops_per_s"] == 4e11
    assert "int8" in report.table()
    linear, head = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128), 64 * 512
    assert plain.json["weight_bytes"] == 4 * (linear + head + 5 * 64)
    assert report.json["weight_bytes"] == linear + head + 2 * (head + 5 * 64)


def test_other_arithmetic_is_used_and_reported(plain):
    asked = {"deterministic": True, "kv_cache_dtype": "int8"}
    found = bench("decode", rows=2, max_tokens=16, **asked)
    assert {name: found.json[name] for name in asked} == asked
    assert "deterministic" in found.table()
    assert "int8 KV cache" in found.table()
    assert plain.json["kv_cache_dtype"] == "auto"
    assert "KV cache" not in plain.table()
    assert found.cost.kv_bytes(100) < plain.cost.kv_bytes(100)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    made = tmp_path_factory.mktemp("fp8")
    make_fp8(made / "stored", made / "plain", "llama", block=128)
    return made


class Loading(Exception):
    pass


@pytest.mark.parametrize("asked", ["auto", "stored", "none"])
def test_a_gpu_that_can_runs_codes_as_a_checkpoint_stores_them(fp8, monkeypatch, asked):
    def load(config, source):
        raise Loading(config.load.quantization, any(layer.forms for layer in source.spec.layers))

    measured = []

    def measure(device, dtypes):
        measured.append(dtypes)
        return MeasuredPeaks(None, {"bfloat16": 1e14, "fp8": 2e14}, 1e12, 1e12, 0.0)

    monkeypatch.setattr(session, "load_model", load)
    monkeypatch.setattr(session, "this_machine", lambda device: MachineFacts(hardware_by_name("h100")))
    options = BenchOptions(("decode",), str(fp8 / "stored"), "bfloat16", asked, device="cuda", rows=2)
    with pytest.raises(Loading) as loading:
        run_bench(options, lambda line: None, measure)
    coded = asked != "none"
    assert loading.value.args == ("stored" if coded else "none", coded)
    assert measured == [("bfloat16", "fp8") if coded else ("bfloat16",)]


def test_stored_codes_are_dequantised_on_a_cpu_and_refused_where_there_are_none(fp8):
    found = bench("decode", rows=2, max_tokens=16, model=str(fp8 / "stored"))
    assert found.json["quantization"] == "none"
    for model, why in (
        ("tiny", "tiny runs on dummy weights"),
        (str(fp8 / "plain"), "stores no quantised weights that can"),
    ):
        with pytest.raises(UsageError, match=f"--quantization is 'stored', but .*{why}"):
            bench("decode", rows=2, model=model, quantization="stored")


def test_codes_of_latents_are_refused(tmp_path):
    make_checkpoint(tmp_path / "model", "deepseek_v3")
    with pytest.raises(UsageError, match="--kv-cache-dtype is 'int8', but deepseek_v3 caches latents"):
        bench("decode", rows=2, model=str(tmp_path / "model"), kv_cache_dtype="int8")


def test_the_better_peaks_count():
    assert best_peaks(Peaks(1, 5, 7), Peaks(3, 4, 6)) == Peaks(3, 5, 7)
    assert best_peaks(Peaks(1, 5), Peaks(1, 5)).coded_ops_per_s is None


# The page


def test_every_workload_and_number_is_documented(every):
    page = (Path(__file__).parents[3] / "docs" / "bench.md").read_text("utf-8")
    sizes = re.findall(r"(?m)^\| `([a-z-]+)` \| (\d+) \|", page)
    assert sizes == [(name, str(rows)) for name, (_, rows) in WORKLOADS.items()]
    table = page.split("## What each number says")[1].split("\n## ")[0]
    told = set(re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"(?m)^\|[^|]*\|([^|]*)\|", table))))
    optional = {"without_deduplication", "against", "under_schemas", "with_drafts"}
    parts = {"step_relative", "relative", "drafted_tokens", "accepted_tokens"}  # keys of the optional objects
    plain = {"workload", "rows", "duplicates", "prompt_tokens", "output_tokens", "model_s", "preemptions"}
    plain |= {
        "recomputed_tokens",
        "decode_tokens_run",
        "decode_tokens_optimum",
    }  # not documented
    assert told - optional - parts == set(every["mixed"]) - plain
    assert optional <= told


# The verb


def test_the_last_line_of_stdout_is_json():
    sizes = ["--rows", "2", "--max-tokens", "8", "--repeat", "1", "--threads", "1"]
    done = CliRunner().invoke(cli.app, ["bench", "decode", "prefix-tree", "--model", "tiny", *sizes])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    facts = json.loads(lines[-1])
    assert [result["workload"] for result in facts["results"]] == ["decode", "prefix-tree"]
    assert math.isfinite(facts["peaks"]["flops_per_s"])
    assert "roofline efficiency" in "\n".join(lines[:-1])
    assert "warm-up" in done.stderr
    assert "warm-up" not in done.stdout


@pytest.mark.parametrize(("options", "told"), [
    ({"workloads": ("w1",)}, "WORKLOAD is 'w1'; it can be shared-prefix, mixed, decode"),
    ({"model": "gpt-5"}, "--model is 'gpt-5'; it can be tiny, llama-135m"),
    ({"dtype": "int8"}, "--dtype is 'int8'; it can be auto, float32, bfloat16, float16"),
    ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype is 'int4'; it can be auto, int8, fp8"),
    ({"quantization": "int3"}, "--quantization is 'int3'; it can be auto, none, int4, int8, fp8"),
    ({"device": "tpu"}, "--device is 'tpu'; it can be auto, cpu, cuda"),
    ({"against": "vllm"}, "--against is 'vllm'; it can be transformers"),
    ({"repeat": 0}, "--repeat is 0; at least 1"),
    ({"rows": -1}, "--rows is -1; at least 1"),
    ({"threads": 0}, "--threads is 0; at least 1"),
    ({"max_num_seqs": 0}, "--max-num-seqs is 0; at least 1"),
    ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens is 0; at least 1"),
    ({"export": Path("x.jsonl")}, "--export writes one workload; 3 are named, name one"),
    ({"schemas": (0, 2)}, "--schemas is 0; at least 1"),
    ({"schemas": (2,), "export": Path("x.jsonl")}, "name one\n--export writes rows without schemas; leave out"),
])  # fmt: skip
def test_a_wrong_option_is_named_with_valid_values(options, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        BenchOptions(**options).check()


def test_a_wrong_option_ends_with_2(capsys):
    assert cli._guarded(["bench", "decoding"]) == 2
    assert "WORKLOAD is 'decoding'" in capsys.readouterr().err


def test_an_exported_workload_is_a_valid_input(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    assert cli._guarded(["bench", "mixed", "--model", "tiny", "--rows", "6", "--export", str(file)]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts == {"export": str(file), "workload": "mixed", "rows": 6}
    before = file.read_bytes()
    assert cli._guarded(["bench", "mixed", "--model", "tiny", "--rows", "3", "--export", str(file)]) == 73
    assert "is there already; choose another name" in capsys.readouterr().err
    assert file.read_bytes() == before
    make_checkpoint(tmp_path / "model", "llama", vocab=512, max_position_embeddings=2048)
    make_tokenizer(tmp_path / "model")
    documented = (Path(__file__).parents[3] / "docs" / "bench.md").read_text("utf-8")
    job_file = re.search(r"```yaml\n(.*?)```", documented, re.DOTALL)
    assert job_file is not None
    (tmp_path / "job.yaml").write_text(job_file.group(1))
    assert load_job(tmp_path / "job.yaml").sampling.ignore_eos
    assert cli._guarded(["run", str(tmp_path / "job.yaml"), "--quiet"]) == 0, capsys.readouterr().err
    expected = [row.max_tokens for row in make_workload("mixed", 512, 6).rows]
    sql = "SELECT completion_tokens FROM results ORDER BY row_id"
    assert cli._guarded(["query", str(tmp_path / "out"), sql, "--json"]) == 0
    got = [json.loads(line)["completion_tokens"] for line in capsys.readouterr().out.splitlines()]
    assert got == expected


def test_rows_under_schemas_sample_as_many_tokens():
    report = bench("decode", rows=3, max_tokens=24, repeat=2, schemas=(1, 3))
    series = report.results[0].series
    for number, found in zip((1, 3), report.json["results"][0]["under_schemas"], strict=True):
        assert found["schemas"] == number
        assert min(found["relative"], found["step_relative"], found["mask_s"], found["compile_s"]) > 0
        for run in series.under[number]:
            assert sum(step.forced_tokens for step in run.steps) == 0
            assert [len(answer) for answer in run.answers] == [24] * 3
            assert {text_of(answer)[: len(BEGINNING)] for answer in run.answers} == {BEGINNING}
    assert len(set(series.under[3][0].answers)) == 3
    assert series.under[1][0].answers[0] != series.ours[0].answers[0]


def test_a_workload_with_drafts_has_the_same_answers(monkeypatch):
    """The clock makes the search for drafts free, and steps take their roofline."""
    monkeypatch.setattr(DraftedStepTimes, "record_time", lambda *_: None)
    monkeypatch.setattr(backoff, "SHARE", 1e9)
    report = bench("decode", rows=2, max_tokens=64, repeat=1, drafts=True)
    found, series = report.json["results"][0]["with_drafts"], report.results[0].series
    assert [run.answers for run in series.drafted] == [run.answers for run in series.ours]
    assert found["relative"] > 0
    assert 0 < found["accepted_tokens"] <= found["drafted_tokens"], (
        "answers on dummy weights repeat themselves"
    )
    assert not any(step.drafted_tokens for run in series.ours for step in run.steps)


BEGINNING = '{"orders": [{"custom'


def text_of(tokens):
    return Tokenizer.from_str(made_up_tokenizer(512)).decode(list(tokens))


def test_a_made_up_tokenizer_fills_the_vocabulary():
    made = Tokenizer.from_str(made_up_tokenizer(2000))
    assert made.get_vocab_size() == 2000
    assert made_up_tokenizer(2000) == made_up_tokenizer(2000)
    text = 'Größe: {"a": 1}'
    assert made.decode(made.encode(text).ids) == text
