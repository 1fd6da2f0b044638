"""The columns of the run table about the job, the setting and the hardware."""

from __future__ import annotations

import pyarrow as pa

from batchinfer.report.column import TEXTS, TIME, Column, count, ratio, real, seconds, text
from batchinfer.report.tables.columns.formulas import wall_s

SETTING: tuple[Column, ...] = (
    text("run_id", "id of the run; begins with its UTC start time, so ids sort by time"),
    text("job", "`name` of the job file"),
    text("task", "`task` of the job file; columns that do not apply to a task are null"),
    text("output", "folder of the results"),
    text(
        "model", "`org/name@commit` if the job names the model like this, else the folder of the checkpoint"
    ),
    Column("started_at", TIME, "", "when the command's process started"),
    Column("finished_at", TIME, "", "when the tables were written"),
    seconds(
        "wall_s",
        "`finished_at` − `started_at`; the sum of the phases, `startup_s` to `other_s`",
        formula=wall_s,
    ),
    count("exit_code", "", "exit code of the command"),
    text("exit_status", "[how the run ended](#how-a-run-ended)"),
    Column("trial", pa.bool_(), "", "whether `--limit` ran only the first rows"),
    Column("versions", TEXTS, "", "versions of Python and of the packages that determine the results"),
    text("device", "`cpu` or `cuda`"),
    text("hardware", "model name of the CPU or GPU"),
    count("cores", "cores", "CPU cores that the process may use; null on a GPU"),
    text("dtype", "data type of activations, and of weights that are not quantised"),
    text(
        "quantization",
        "type of the quantised weights of linear layers, or `none`; `stored`, `stored-int8`, `stored-int4`, "
        "`stored-mxfp4`: fp8, int8, int4 or MXFP4 as the checkpoint stores it; "
        "`stored-sparse`: without the zeros of 2:4 sparse weights",
    ),
    real(
        "quality_kl",
        "nats",
        "[measured quality](models.md#measured-quality) of quantised weights: mean KL(unquantised ‖ quantised) of the "
        "next token; null without quantisation, and if the job computes vectors",
    ),
    ratio(
        "quality_top1",
        "share of the `quality_positions` at which both models have the same most likely next token",
    ),
    real(
        "quality_cosine",
        "",
        "mean cosine similarity of the vectors with quantised and unquantised weights; null if the job computes tokens",
    ),
    count(
        "quality_positions",
        "positions",
        "number of positions at which the quality was measured: tokens, or vectors",
    ),
    seconds("quality_s", "part of `other_s`: measuring the quality; null if an earlier run measured it"),
    seconds(
        "calibration_s", "part of `other_s`: calibrating int4 weights; null if they were calibrated already"
    ),
    seconds(
        "draft_model_s",
        "part of `load_s` and `other_s`: answers of the model of `drafts.model`; null unless it runs first",
    ),
    text("draft_model_runs", "where the model of `drafts.model` ran: `first` or `beside`; null without one"),
    text("kv_cache_dtype", "`auto`: the KV cache had values of `dtype`; `int8`, `fp8`: quantised values"),
    Column(
        "deterministic",
        pa.bool_(),
        "",
        "whether `engine.deterministic` made answers independent of other rows",
    ),
    Column("ops", TEXTS, "", "chosen operators of the `decoder` and of its `linear` layers"),
    count("replicas", "engines", "number of replicas; times of the run are means over them"),
    count("ranks", "ranks", "number of ranks of an engine, each with a shard of the model"),
    count("machines", "machines", "machines on which engines ran: this one, or nodes of the Ray cluster"),
    count("threads", "threads", "CPU threads of the operators, summed over engines"),
    real("other_cores", "cores", "CPU cores that other processes used while the engine ran, on average"),
    real(
        "peak_flops_per_s",
        "FLOP/s",
        "peak of linear layers that MFU is measured against, of all devices used",
    ),
    real(
        "peak_bytes_per_s",
        "bytes/s",
        "memory bandwidth that MBU is measured against, of all devices used",
    ),
    text("peak_source", "`measured` on this machine, `datasheet`, or `unknown`"),
    real("datasheet_flops_per_s", "FLOP/s", "the maker's figure for linear layers, without sparsity"),
    real("datasheet_bytes_per_s", "bytes/s", "the maker's figure for memory bandwidth"),
)
