"""Every column of the report's tables: its type, its unit, what it means, and how it is made.

Schemas, rows and sums follow from these declarations, and `docs/report.md` shows the same text, which a test compares.
Null always means "not known", never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.report.column import (
    COUNTS,
    TEXTS,
    TIME,
    Column,
    count,
    ratio,
    real,
    seconds,
    spread,
    text,
    total,
    whole,
)
from batchinfer.report.tables.formulas import (
    cost_of,
    deadline_met,
    energy_per_token,
    forecast_error,
    goodput,
    host_s,
    known_sum,
    over,
    wall_s,
    while_computing,
)

# Since 2, every table has run_id, and there is a table rows; since 3 there are phases, buckets and prefixes;
# since 4 steps and requests say which replica it was; since 5 steps say how they were launched; since 6 there are
# activities; since 7 accuracy, confusion and calibration; since 8 drafts;
# since 9 those of earlier answers and of models; since 10 what proposals of models and heads take; since 11 ranks;
# since 12 guesses of lookahead decoding; since 13 steps say how many were launched at once
TABLE_FORMAT = 13
RUN = "run"
STEPS = "steps"
REQUESTS = "requests"
ROWS = "rows"
EXPERTS = "experts"
RANKS = "ranks"
ACTIVITIES = "activities"
PHASES = "phases"
BUCKETS = "buckets"
PREFIXES = "prefixes"
ACCURACY = "accuracy"
CONFUSION = "confusion"
CALIBRATION = "calibration"
PROMPT_TOKENS = "prefill_tokens - recomputed_tokens"  # SQL over `steps`: prompt tokens run, each once


def schema_of(columns: Sequence[Column], table: str) -> pa.Schema:
    """The Arrow schema of a table, with the format version in its metadata."""
    metadata = {"batchinfer.table": table, "batchinfer.format": str(TABLE_FORMAT)}
    return pa.schema([pa.field(c.name, c.type) for c in columns], metadata=metadata)


_LAUNCHED = {
    "full_graph": "replayed as one graph",
    "piecewise_graph": "replayed as graphs of their pieces, with attention launched between the pieces",
    "eager": "launched one operator at a time",
}


# What engines lack, in sum, to the one that worked longest
_UNUSED_S = "(SELECT coalesce(max(wall_s) * $engines - sum(wall_s), 0) FROM walls)"


_DRAFTED = {
    "prompt": "the row's own prompt and answer",
    "answers": "other answers of the job",
    "earlier": "the row's answer in the job's last result",
    "model": "the model of `drafts.model`",
    "heads": "the heads of `drafts.heads`",
    "lookahead": "what the model said behind drafts that were wrong",
}


def _drafts(of_run: bool) -> Iterator[Column]:
    """Yield the columns of what drafts came to, in a step or in a run."""

    def summed(column: str) -> str:
        return total(column) if of_run else ""

    yield count("drafted_tokens", "tokens", "drafts that steps verified", sql=summed("drafted_tokens"))
    yield count(
        "accepted_tokens",
        "tokens",
        "drafts that were what was sampled in their place; part of `sampled_tokens`",
        sql=summed("accepted_tokens"),
    )
    for source, where in _DRAFTED.items():
        for what in ("drafted", "accepted"):
            name = f"{source}_{what}"
            yield count(name, "tokens", f"part of `{what}_tokens`: from {where}", sql=summed(name))
    yield seconds(
        "proposing_s",
        "part of `duration_s`: proposals of a draft model beside, or of heads"
        if not of_run
        else "proposals of a draft model beside, or of heads, part of the engines' time",
        sql=_mean_of_engines("proposing_s") if of_run else "",
    )
    yield seconds(
        "drafts_saved_s",
        "what the same tokens would have taken without drafts, by the times of such steps, less what they took",
        sql=_mean_of_engines("drafts_saved_s") if of_run else "",
    )


def _mean_of_engines(column: str) -> str:
    return f"{total(column)} / $engines"


def _launches() -> Iterator[Column]:
    """Steps and tokens by the way they were launched, in numbers and shares; all null where no step says."""
    for mode, how in _LAUNCHED.items():
        each, share = _launched("count(*)", mode)
        yield count(f"{mode}_steps", "steps", f"how many of `steps` were {how}; null on a CPU", each)
        yield ratio(f"{mode}_steps_share", "their share of `steps`", share)
    for mode in _LAUNCHED:
        each, share = _launched("sum(tokens)", mode)
        yield count(f"{mode}_tokens", "tokens", f"run in `{mode}_steps`, recomputed ones included", each)
        yield ratio(f"{mode}_tokens_share", "their share of all tokens that were run", share)


def _launched(sums: str, mode: str) -> tuple[str, str]:
    """How much was launched in that way, and which share that is."""
    every = f"nullif({sums} FILTER (launch IS NOT NULL), 0)"
    some = f"coalesce({sums} FILTER (launch = '{mode}'), 0)"
    return f"CASE WHEN {every} > 0 THEN {some} END", f"{some} / {every}"


def _forecast_launches() -> Iterator[Column]:
    for unit in ("steps", "tokens"):
        for mode in _LAUNCHED:
            yield count(f"forecast_{mode}_{unit}", unit, f"the forecast of `{mode}_{unit}`")


_LABELLED: tuple[Column, ...] = (
    count("labelled_rows", "rows", "rows with an expected answer (`input.expected`)"),
    count("labelled_errors", "rows", "part of `labelled_rows`: error rows, which count as wrong"),
    count("exact_rows", "rows", "part of `labelled_rows`: the answer is the expected one"),
    count(
        "normalised_rows",
        "rows",
        "`exact_rows`, and rows whose answer is the expected one once both are normalised",
    ),
    ratio("accuracy", "`exact_rows` ÷ `labelled_rows`", formula=over("exact_rows", "labelled_rows")),
    ratio(
        "normalised_accuracy",
        "`normalised_rows` ÷ `labelled_rows`",
        formula=over("normalised_rows", "labelled_rows"),
    ),
)

RUN_COLUMNS: tuple[Column, ...] = (
    text("run_id", "names the run; starts with its UTC start time, so that names sort by time"),
    text("job", "`name` of the job file"),
    text("output", "folder of the results"),
    text("model", "`org/name@commit` if the job names the model so, else the checkpoint's folder"),
    Column("started_at", TIME, "", "when the command's process started"),
    Column("finished_at", TIME, "", "when the tables were written"),
    seconds(
        "wall_s",
        "`finished_at` − `started_at`; the sum of the phases, `startup_s` to `other_s`",
        formula=wall_s,
    ),
    count("exit_code", "", "exit code of the command"),
    text("exit_status", "how the run ended, in one of the words above"),
    Column("trial", pa.bool_(), "", "whether `--limit` ran only the first rows"),
    Column("versions", TEXTS, "", "versions of Python and of the packages that decide the results"),
    text("device", "`cpu` or `cuda`"),
    text("hardware", "model name of the CPU or GPU"),
    count("cores", "cores", "CPU cores that the process may use; null on a GPU"),
    text("dtype", "data type of activations, and of weights that are not quantised"),
    text(
        "quantization",
        "type to which weights of linear layers were quantised, or `none`; `stored`, `stored-int8`, `stored-int4`, "
        "`stored-mxfp4`: fp8, int8, int4 or MXFP4 as the checkpoint stores it; "
        "`stored-sparse`: without the zeros of 2:4 sparse weights",
    ),
    real(
        "int4_kl",
        "nats",
        "what calibrated int4 weights change: mean KL(unquantised ‖ int4) of the next token, at tokens of answers that "
        "the calibration has not seen; null without one",
    ),
    ratio("int4_same_token", "the share of these tokens at which both models find the same one most likely"),
    count("int4_tokens", "tokens", "how many these are"),
    seconds(
        "calibration_s", "part of `other_s`: calibrating int4 weights; null if they were calibrated already"
    ),
    seconds(
        "draft_model_s",
        "the answers of the model of `drafts.model`, part of `load_s` and `other_s`; null where none answers first",
    ),
    text("draft_model_runs", "where the model of `drafts.model` ran: `first` or `beside`; null without one"),
    text("kv_cache_dtype", "`auto`: the KV cache kept values in `dtype`; `int8`, `fp8`: such codes"),
    Column(
        "deterministic",
        pa.bool_(),
        "",
        "whether `engine.deterministic` made answers independent of other rows",
    ),
    Column("ops", TEXTS, "", "operators that were chosen, for the `decoder` and for its `linear` layers"),
    count("replicas", "engines", "engines that shared the work; times of the run are means over them"),
    count("ranks", "ranks", "processes, each with a part of the model, that were one engine together"),
    count(
        "machines", "machines", "machines on which the engines ran: this one, and its nodes (`engine.nodes`)"
    ),
    count("threads", "threads", "CPU threads of the operators, of all engines together"),
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
    count("rows", "rows", "input rows of the job"),
    count("rows_ok", "rows", "rows with an answer, whichever run computed it"),
    count("rows_error", "rows", "error rows"),
    Column("error_codes", COUNTS, "rows", "error rows by `error_code`"),
    *_LABELLED,
    count("unlabelled_rows", "rows", "rows without an expected answer: they are not measured"),
    count(
        "unreadable_labels",
        "rows",
        "rows whose expected answer is no JSON object as the answers are: they are not measured",
    ),
    ratio(
        "mean_probability", "mean of the answers' probabilities, in labelled rows; null: answers have none"
    ),
    ratio("calibration_error", "expected calibration error of these probabilities, in ten bins"),
    ratio(
        "brier_score",
        "mean squared distance of these probabilities from 1 for right answers, 0 for wrong ones",
    ),
    count("distinct_requests", "requests", "distinct requests of the rows without an input error"),
    count("duplicate_rows", "rows", "rows that got the answer of an equal row"),
    count(
        "waves", "plans", "plans that the engines followed while the input was read; null: it was read before"
    ),
    count(
        "again_tokens",
        "tokens",
        "prompt tokens of beginnings that rows of several waves share: at most so many were run again",
    ),
    count("reused_requests", "requests", "requests whose answer was already in the completion store"),
    count(
        "computed_requests",
        "requests",
        "requests that finished in this run",
        sql="(SELECT count(*) FROM requests)",
    ),
    count(
        "prompt_tokens_run",
        "tokens",
        "prompt tokens run, each once, without recomputation and padding",
        sql=total("prompt_tokens"),
    ),
    count(
        "prefix_saved_tokens",
        "tokens",
        "prompt tokens not run because the cache held their prefix",
        sql=total("cached_tokens"),
    ),
    count(
        "duplicate_saved_tokens",
        "tokens",
        "prompt tokens not run because a row got the answer of an equal row (counted as in the definitions above)",
    ),
    count("duplicate_saved_output_tokens", "tokens", "output tokens not sampled for the same reason"),
    count(
        "decode_tokens_run",
        "tokens",
        "output tokens run to get the next token, each counted once",
        sql=total("decode_tokens"),
    ),
    count(
        "output_tokens",
        "tokens",
        "tokens of the completions that finished in this run",
        sql=f"(SELECT {total('completion_tokens')} FROM requests)",
    ),
    count(
        "sampled_tokens",
        "tokens",
        "tokens sampled, those of unfinished requests included",
        sql=total("sampled_tokens"),
    ),
    count(
        "recomputed_tokens", "tokens", "tokens run again after a preemption", sql=total("recomputed_tokens")
    ),
    count(
        "padded_tokens",
        "tokens",
        "query positions computed without use: padding, steps of rows that had ended, rejected drafts",
        sql=total("padded_tokens"),
    ),
    ratio(
        "padding_share",
        "padded ÷ (prefill + decode + padded) positions",
        sql="sum(padded_tokens) / nullif(sum(tokens + padded_tokens), 0)",
    ),
    ratio(
        "recomputed_share",
        "recomputed ÷ (prefill + decode) tokens",
        sql="sum(recomputed_tokens) / nullif(sum(tokens), 0)",
    ),
    count(
        "preemptions",
        "times",
        "sequences that lost their blocks and were queued again",
        sql=total("preemptions"),
    ),
    count("constrained_requests", "requests", "computed requests that had a constraint, such as a schema"),
    count(
        "steered_requests",
        "requests",
        "constrained requests whose most likely token was forbidden at least once",
    ),
    count(
        "forced_tokens",
        "tokens",
        "output tokens to which a constraint left no alternative: appended, not sampled",
        sql=total("forced_tokens"),
    ),
    seconds(
        "mask_s",
        "part of `model_s`: computing which tokens constraints allow",
        sql=_mean_of_engines("mask_s"),
    ),
    seconds("compile_s", "compiling constraints", sql=_mean_of_engines("compile_s")),
    *_drafts(of_run=True),
    count("steps", "steps", "engine steps", sql="count(*)"),
    *_launches(),
    count(
        "host_launches",
        "times",
        "how often the host launched steps: fewer than `steps` where it launched several at once; null on a CPU",
        sql="CASE WHEN count(launch) > 0 THEN round(sum(1 / launched_steps)) END",
    ),
    seconds(
        "capture_s",
        "part of `engine_wall_s`: capturing graphs; null on a CPU",
        sql="sum(capture_s) / $engines",
    ),
    count(
        "graph_bytes",
        "bytes",
        "GPU memory that graphs captured between steps took; null on a CPU",
        sql="sum(graph_bytes)",
    ),
    seconds(
        "startup_s",
        "starting the command: imports, job file, checkpoint and its fingerprint, the state's lock",
    ),
    seconds("ingest_s", "reading, rendering and tokenising"),
    seconds("plan_s", "looking up stored answers, and planning"),
    seconds("load_s", "waiting for the model to be loaded, once the plan was made"),
    seconds(
        "operators_build_s",
        "compiling the CPU operators, in parallel to the phases up to `load_s`; null if they were compiled already",
    ),
    seconds("operators_wait_s", "part of `load_s`: waiting for the operators to be compiled"),
    seconds(
        "load_capture_s",
        "part of `load_s`: capturing graphs, in the replica that took longest; null on a CPU",
    ),
    count(
        "load_graph_bytes", "bytes", "GPU memory of these graphs, in the replica with the most; null on a CPU"
    ),
    count(
        "load_free_bytes",
        "bytes",
        "GPU memory free after loading, in the replica with the least; null on a CPU",
    ),
    seconds("engine_s", "computing, as the parent process saw it"),
    seconds("publish_s", "counting errors, joining and publishing the results"),
    seconds("close_s", "storing the last answers, ending the worker, writing these tables"),
    seconds("other_s", "part of `wall_s`: time in none of the phases above"),
    seconds(
        "engine_wall_s",
        "start of the first step to end of the last, idle time included, in the replica that took longest",
        sql="coalesce((SELECT max(wall_s) FROM walls), 0)",
    ),
    seconds(
        "model_s",
        "part of `engine_wall_s`: inside the model and the sampler",
        sql=_mean_of_engines("model_s"),
    ),
    seconds(
        "overhead_s",
        "part of `engine_wall_s`: inside a step, outside of model and sampler",
        sql=_mean_of_engines("duration_s - model_s"),
    ),
    seconds(
        "idle_s",
        "part of `engine_wall_s`: between steps of the same engine, and while other replicas still ran",
        sql=f"({total('gap_s')} + {_UNUSED_S}) / $engines",
    ),
    seconds(
        "idle_input_s",
        "devices idle for want of rows: `ingest_s`, and the part of `idle_s` in which the engine had no rows",
        formula=while_computing("ingest_s", "waited_s"),
    ),
    seconds(
        "idle_load_s",
        "devices idle until an engine was ready: `startup_s` and `load_s`",
        formula=while_computing("startup_s", "load_s"),
    ),
    seconds(
        "idle_plan_s", "devices idle while the run was planned: `plan_s`", formula=while_computing("plan_s")
    ),
    seconds(
        "idle_tail_s",
        "devices idle at the end, while other replicas still ran; part of `idle_s`",
        sql=f"{_UNUSED_S} / $engines",
    ),
    seconds(
        "idle_publish_s",
        "devices idle after the last answer: `publish_s` and `close_s`",
        formula=while_computing("publish_s", "close_s"),
    ),
    seconds(
        "idle_devices_s",
        "the sum of the five above; null, as they are, for a run that computed nothing",
        formula=known_sum("idle_input_s", "idle_load_s", "idle_plan_s", "idle_tail_s", "idle_publish_s"),
    ),
    text(
        "expert_placement",
        "how whole experts are divided among ranks: `ranges` of their numbers, or `loads`: by how many tokens earlier "
        "runs gave each; null where they are not divided",
    ),
    count(
        "expert_copies",
        "",
        "experts that ranks have beside the first copy of each, over all layers; null likewise",
    ),
    real(
        "expert_imbalance",
        "",
        "tokens of the rank that has most in a layer ÷ those of the mean rank, over all layers and the whole run, "
        "copies of an expert taken to have even parts; null likewise, and where experts were given no token",
    ),
    seconds(
        "stage_wait_s",
        "time for which a stage waited for steps, for the stage before it, and for the one behind it to take what it "
        "made, as a mean over stages and engines; null without stages (`engine.pipeline_parallel_size`), and on GPUs",
    ),
    ratio(
        "stage_wait_share", "`stage_wait_s` / `engine_wall_s`", formula=over("stage_wait_s", "engine_wall_s")
    ),
    seconds(
        "collective_s",
        "part of `model_s`: sums and gathers over ranks, as rank 0 measured them, its waiting for the others included; "
        "`ranks` has those of each; null where no ranks have the same layers, and on GPUs",
        sql=f"{whole('collective_s')} / $engines",
    ),
    ratio(
        "collective_share", "`collective_s` / `engine_wall_s`", formula=over("collective_s", "engine_wall_s")
    ),
    seconds(
        "metering_s",
        "time that these measurements took: in the engine, for each step, and in the command",
        sql=_mean_of_engines("metering_s"),
    ),
    seconds(
        "wall_load_s", "part of `wall_s`: `startup_s` and `load_s`", formula=known_sum("startup_s", "load_s")
    ),
    seconds(
        "wall_input_s",
        "part of `wall_s`: `ingest_s`, `plan_s`, and the part of `idle_s` in which the engine had no rows",
        formula=known_sum("ingest_s", "plan_s", "waited_s"),
    ),
    seconds("wall_device_s", "part of `wall_s`: `model_s`", formula=known_sum("model_s")),
    seconds("wall_host_s", "part of `wall_s`: the rest of `engine_s`, and `other_s`", formula=host_s),
    seconds(
        "wall_output_s",
        "part of `wall_s`: `publish_s` and `close_s`",
        formula=known_sum("publish_s", "close_s"),
    ),
    seconds("device_roofline_s", "part of `wall_device_s`: `roofline_s`"),
    seconds("device_padding_s", "part of `wall_device_s`: padded positions"),
    seconds("device_recomputation_s", "part of `wall_device_s`: tokens run again after a preemption"),
    *(
        seconds(f"device_{kind}_loss_s", f"part of `wall_device_s`: {what}, beyond the roofline")
        for kind, what in (
            ("linear", "linear layers and experts"),
            ("attention", "attention"),
            ("sampling", "the head and the sampler"),
            ("elementwise", "norms, activations and all other operators"),
        )
    ),
    seconds("device_other_loss_s", "part of `wall_device_s`: the fixed time of each step, and the rest"),
    count(
        "flops",
        "FLOP",
        "useful floating-point operations by the operators' declared costs",
        sql=total("flops"),
    ),
    count(
        "bytes_moved", "bytes", "bytes that had to move by the operators' declared costs", sql=total("bytes")
    ),
    ratio(
        "mfu",
        "`flops` ÷ (`engine_wall_s` × `peak_flops_per_s`)",
        formula=over("flops", "engine_wall_s", "peak_flops_per_s"),
    ),
    ratio(
        "mbu",
        "`bytes_moved` ÷ (`engine_wall_s` × `peak_bytes_per_s`)",
        formula=over("bytes_moved", "engine_wall_s", "peak_bytes_per_s"),
    ),
    seconds(
        "roofline_s",
        "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth)",
        sql=f"{whole('roofline_s')} / $engines",
    ),
    ratio(
        "roofline_efficiency", "`roofline_s` ÷ `engine_wall_s`", formula=over("roofline_s", "engine_wall_s")
    ),
    seconds(
        "step_bound_s",
        "Σ over steps of the same maximum: as if operators overlapped perfectly",
        sql="sum(greatest(flops / $fastest, bytes / $bytes_per_s)) / $engines",
    ),
    ratio(
        "step_bound_efficiency",
        "`step_bound_s` ÷ `engine_wall_s`; no higher than `roofline_efficiency`",
        formula=over("step_bound_s", "engine_wall_s"),
    ),
    real(
        "prompt_tokens_per_s",
        "tokens/s",
        "`prompt_tokens_run` ÷ `engine_wall_s`",
        formula=over("prompt_tokens_run", "engine_wall_s"),
    ),
    real(
        "output_tokens_per_s",
        "tokens/s",
        "`output_tokens` ÷ `engine_wall_s`",
        formula=over("output_tokens", "engine_wall_s"),
    ),
    real(
        "total_tokens_per_s",
        "tokens/s",
        "sum of the two above",
        formula=known_sum("prompt_tokens_per_s", "output_tokens_per_s"),
    ),
    *spread("queue", "from when the engine got the request to the start of its first step"),
    *spread("ttft", "from when the engine got the request to its first token (offline, mostly waiting)"),
    *spread("tpot", "seconds per output token after the first, one value per request"),
    *spread("itl", "gap between two tokens of a sequence, one value per decoded token"),
    *spread("latency", "from when the engine got the request to its last token"),
    real("energy_j", "J", "energy that the machine used while the engine ran: the sum of the next two"),
    real(
        "cpu_energy_j",
        "J",
        "energy by the counters of the CPUs (RAPL); null if there are none, or only root may read them",
    ),
    real(
        "gpu_energy_j",
        "J",
        "energy by the GPU's counter (NVML); null if there is none, or the package `nvidia-ml-py` is missing",
    ),
    real(
        "energy_j_per_token",
        "J/token",
        "`energy_j` ÷ (`prompt_tokens_run` + `output_tokens`)",
        formula=energy_per_token,
    ),
    real("price_per_hour", "money/h", "price of the machine, as given by `--price-per-hour`"),
    real("cost", "money", "`wall_s` at this price", formula=cost_of("wall_s")),
    real("engine_cost", "money", "`engine_wall_s` at this price", formula=cost_of("engine_wall_s")),
    real("forecast_engine_cost", "money", "the forecast of `engine_cost`", formula=cost_of("forecast_s")),
    count(
        "worker_restarts",
        "times",
        "workers started in place of dead ones; null: the run needed no worker at all",
    ),
    count("parent_peak_rss_bytes", "bytes", "peak resident memory of the command"),
    count(
        "worker_peak_rss_bytes",
        "bytes",
        "peak resident memory of the worker with the model; sum over all workers",
    ),
    count(
        "rank_peak_rss_bytes",
        "bytes",
        "peak resident memory of the rank that had the most, part of `worker_peak_rss_bytes`; null without ranks",
    ),
    count(
        "rank_read_bytes",
        "bytes",
        "bytes of the model's files that a rank read, of the rank that read the most; null without ranks",
    ),
    seconds("forecast_s", "the forecast of `engine_wall_s` before the run, by simulation"),
    real(
        "forecast_error",
        "",
        "`engine_wall_s` ÷ `forecast_s` − 1; negative: faster than forecast",
        formula=forecast_error,
    ),
    count("forecast_steps", "steps", "the forecast of `steps`"),
    *_forecast_launches(),
    count("forecast_prompt_tokens", "tokens", "the forecast of `prompt_tokens_run`"),
    count("forecast_recomputed_tokens", "tokens", "the forecast of `recomputed_tokens`"),
    count("forecast_output_tokens", "tokens", "the forecast of `output_tokens`"),
    seconds("forecast_revised_s", "the forecast of `engine_wall_s` during the run, from its first answers"),
    ratio("forecast_mfu", "the forecast of `mfu`"),
    ratio("forecast_mbu", "the forecast of `mbu`"),
    text(
        "forecast_basis",
        "where the times of steps came from: earlier `runs`, `measured` by `doctor --measure`, a share of the "
        "peaks that is only `declared`, or at the `limit` of the peaks",
    ),
    count(
        "forecast_answers_from",
        "runs",
        "earlier runs from which lengths of answers were taken; 0: answers were counted at their `max_tokens`",
    ),
    Column("deadline", TIME, "", "when the results were wanted; null: the job has no `deadline`"),
    Column(
        "deadline_met",
        pa.bool_(),
        "",
        "whether the results were published by the deadline",
        formula=deadline_met,
    ),
    count("deadline_rows", "rows", "rows that this run had answered by the deadline, without error rows"),
    count("deadline_output_tokens", "tokens", "tokens of these answers, each answer counted once"),
    real(
        "goodput_tokens_per_s",
        "tokens/s",
        "`deadline_output_tokens` ÷ the time from `started_at` to the deadline, or `finished_at` if that is earlier",
        formula=goodput,
    ),
)

_RUN_ID = text("run_id", "the run, as in the table `run`")
_WHICH_ENGINE: tuple[Column, ...] = (
    count("engine", "", "number of the engine's process in this run, from 0; a restart gets the next number"),
    count("replica", "", "number of the replica, from 0; an engine started in place of a dead one keeps it"),
)

STEP_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    *_WHICH_ENGINE,
    count("step", "", "number of the step in its engine"),
    seconds("started_s", "start of the step, since the engine started"),
    seconds("duration_s", "length of the step"),
    seconds("interval_s", "end of the previous step to end of this step; null in an engine's first step"),
    seconds("model_s", "part of `duration_s`: inside the model and the sampler"),
    count("prefill_tokens", "tokens", "prompt tokens run, and all tokens run again after a preemption"),
    count("decode_tokens", "tokens", "output tokens run for the first time, to get the next token"),
    count("recomputed_tokens", "tokens", "part of `prefill_tokens`: tokens run again after a preemption"),
    count("cached_tokens", "tokens", "prompt tokens not run because the cache held their prefix"),
    count("sampled_tokens", "tokens", "tokens sampled"),
    count(
        "padded_tokens",
        "tokens",
        "query positions computed without use: padding, steps of rows that had ended, rejected drafts",
    ),
    count("running", "sequences", "running sequences after scheduling"),
    count("waiting", "sequences", "waiting sequences after scheduling"),
    count("preemptions", "times", "sequences preempted"),
    count("blocks_used", "blocks", "KV blocks in use"),
    count("blocks_total", "blocks", "KV blocks in total"),
    count("flops", "FLOP", "useful floating-point operations: without padding and recomputation"),
    count("bytes", "bytes", "bytes that had to move"),
    seconds("roofline_s", "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth); null: peaks unknown"),
    count(
        "forced_tokens",
        "tokens",
        "tokens appended after the sampled ones because a constraint left no alternative",
    ),
    seconds("mask_s", "part of `model_s`: computing which tokens constraints allow"),
    seconds("compile_s", "compiling constraints, since the previous step"),
    text("phase", "`prefill`: the step ran only prompts; `decode`: no prompts; `mixed`: both"),
    seconds("scheduled_s", "when the step's scheduling began; earlier than `started_s` if steps overlap"),
    seconds("ended_s", "`started_s` + `duration_s`"),
    count("pairs", "pairs", "useful (query, key) pairs of attention, summed over layers"),
    count("kv_tokens", "tokens", "distinct cached tokens read, summed over layers"),
    seconds("metering_s", "time that the engine spent on measuring the step"),
    count(
        "copied_tokens", "tokens", "part of `cached_tokens`: copied from the middle of another row's KV block"
    ),
    text(
        "launch",
        "`full_graph`: replayed as one graph; `piecewise_graph`: as graphs of its pieces, with attention launched "
        "between the pieces; `eager`: launched one operator at a time; null on a CPU",
    ),
    seconds("capture_s", "capturing graphs for the step; null on a CPU"),
    count("graph_bytes", "bytes", "GPU memory that these graphs took; null on a CPU"),
    *_drafts(of_run=False),
    seconds(
        "collective_s",
        "part of `model_s`: sums and gathers over ranks, as rank 0 measured them, its waiting for the others included; "
        "null where no ranks have the same layers, and on GPUs",
    ),
    count(
        "launched_steps",
        "steps",
        "the host launched so many steps at once, this one among them, as it does on GPUs where rows only decode",
    ),
)

REQUEST_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    text("key", "the work key in hexadecimal, as in the completion store"),
    *_WHICH_ENGINE,
    count("prompt_tokens", "tokens", "length of the prompt"),
    count("completion_tokens", "tokens", "length of the completion, including its end token"),
    count("cached_tokens", "tokens", "prompt tokens served from a shared prefix"),
    count("preemptions", "times", "how often the request was preempted"),
    count(
        "forced_tokens",
        "tokens",
        "part of the completion: tokens to which its constraint left no alternative",
    ),
    count("unrun_tokens", "tokens", "part of the completion: its last tokens, which the model never ran"),
    Column("cut", pa.bool_(), "", "whether `max_tokens` or the model's context ended the completion"),
    seconds("queued_s", "when the engine got the request, since the engine started"),
    seconds("scheduled_s", "when its first step began"),
    seconds("first_token_s", "when its first token was sampled"),
    seconds("finished_s", "when its last token was sampled"),
    seconds("queue_s", "`scheduled_s` − `queued_s`", sql="scheduled_s - queued_s"),
    seconds("ttft_s", "`first_token_s` − `queued_s`", sql="first_token_s - queued_s"),
    seconds(
        "tpot_s",
        "(`finished_s` − `first_token_s`) ÷ (`completion_tokens` − 1); null under two tokens",
        sql="CASE WHEN completion_tokens > 1 THEN (finished_s - first_token_s) / (completion_tokens - 1) END",
    ),
    seconds("latency_s", "`finished_s` − `queued_s`", sql="finished_s - queued_s"),
    count("rows", "rows", "input rows that the request answers"),
    count("prefix", "", "longest prefix that the request shares with others, as in `prefixes`; null: none"),
    seconds(
        "device_s",
        "the request's part of the steps' `model_s`; the time of shared prefixes is split among all users",
    ),
    seconds(
        "ran_device_s", "as `device_s`, but the time of a shared prefix counts for the request that ran it"
    ),
    seconds("answer_device_s", "part of both: running the request's output tokens"),
    count("flops", "FLOP", "useful floating-point operations of the tokens that the request ran"),
    real("bytes", "bytes", "the request's part of the steps' `bytes`"),
    seconds("roofline_s", "the request's part of the steps' `roofline_s`; null: peaks unknown"),
)


def _efficiency(engine_s: str, flops: str, read: str) -> Iterator[Column]:
    """How well the hardware was used in `engine_s`, by sums over the table that `flops` and `read` stand in."""
    yield seconds("engine_s", "part of the run's `engine_wall_s`", engine_s)
    yield count("flops", "FLOP", "useful floating-point operations", flops)
    yield real("bytes", "bytes", "bytes that had to move", read)
    bound = f"{whole('roofline_s')} / $engines"
    yield seconds("roofline_s", "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth)", bound)
    used = over("flops", "engine_s", "peak_flops_per_s")
    yield ratio("mfu", "`flops` ÷ (`engine_s` × the run's `peak_flops_per_s`)", formula=used)
    moved = over("bytes", "engine_s", "peak_bytes_per_s")
    yield ratio("mbu", "`bytes` ÷ (`engine_s` × the run's `peak_bytes_per_s`)", formula=moved)
    yield ratio("roofline_efficiency", "`roofline_s` ÷ `engine_s`", formula=over("roofline_s", "engine_s"))


PHASE_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    text("phase", "`prefill`, `decode` or `mixed`, as in `steps`; phases without steps have no row", "phase"),
    count("steps", "steps", "engine steps", sql="count(*)"),
    count("prompt_tokens", "tokens", "prompt tokens run, each counted once", sql="sum(prompt_tokens)"),
    count(
        "decode_tokens",
        "tokens",
        "output tokens run to get the next token, each counted once",
        sql="sum(decode_tokens)",
    ),
    count("sampled_tokens", "tokens", "tokens sampled", sql="sum(sampled_tokens)"),
    count("recomputed_tokens", "tokens", "tokens run again after a preemption", sql="sum(recomputed_tokens)"),
    count("padded_tokens", "tokens", "query positions computed without use", sql="sum(padded_tokens)"),
    seconds("device_s", "`model_s` of the phase's steps", sql="sum(model_s) / $engines"),
    *_efficiency("sum(greatest(interval_s, duration_s)) / $engines", "sum(flops)", "sum(bytes)::DOUBLE"),
)

BUCKET_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    count(
        "most_prompt_tokens",
        "tokens",
        "upper limit of the prompts' length; the lower limit is half of it",
        sql="CAST(2 ** ceil(log2(greatest(prompt_tokens, 1))) AS BIGINT)",
    ),
    count("requests", "requests", "requests that finished", sql="count(*)"),
    count("rows", "rows", "input rows that these requests answer", sql="sum(rows)"),
    count("prompt_tokens", "tokens", "length of the requests' prompts", sql="sum(prompt_tokens)"),
    count(
        "cached_tokens",
        "tokens",
        "part of `prompt_tokens`: served from shared prefixes",
        sql="sum(cached_tokens)",
    ),
    count("completion_tokens", "tokens", "length of the requests' completions", sql="sum(completion_tokens)"),
    seconds("device_s", "sum of the requests' `device_s`", sql="sum(device_s)"),
    seconds(
        "ran_device_s",
        "sum of the requests' `ran_device_s`; `engine_s` is split in proportion to it",
        sql="sum(ran_device_s)",
    ),
    *_efficiency(
        "$engine_wall_s * sum(ran_device_s) / nullif((SELECT sum(ran_device_s) FROM requests), 0)",
        whole("flops"),
        "sum(bytes)",
    ),
    seconds(
        "latency_p50_s", "the requests' `latency_s`, 50th percentile", sql="quantile_cont(latency_s, 0.5)"
    ),
    seconds(
        "latency_p99_s", "the requests' `latency_s`, 99th percentile", sql="quantile_cont(latency_s, 0.99)"
    ),
)

PREFIX_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    count("prefix", "", "names the prefix in its run"),
    count("parent", "", "the next shorter shared prefix with which this prefix begins; null: none"),
    count("depth", "tokens", "length of the prefix"),
    count("tokens", "tokens", "part of `depth` beyond the parent"),
    count("users", "requests", "requests that begin with this prefix, also with a longer one"),
    count("saved_tokens", "tokens", "`tokens` × (`users` − 1): the most that sharing can save"),
    count("cached_tokens", "tokens", "tokens that sharing did save: at most `saved_tokens`"),
    seconds("device_s", "time in which `tokens` ran, for all users together"),
    text("first_key", "key of the first user, as in `requests`"),
)

ROW_COLUMNS: tuple[Column, ...] = (
    text("run_id", "the run that published the row"),
    count("row_id", "", "the row, as in the results"),
    text("key", "the work key of the row's answer in hexadecimal, as in `requests`"),
)

EXPERT_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    count("layer", "", "number of the layer, from 0; layers without experts have no rows"),
    count("expert", "", "number of the expert, from 0"),
    count(
        "tokens",
        "tokens",
        "tokens that the expert got, recomputed ones included, without padding; since "
        "the engine last started, if `worker_restarts` of `run` is above 0",
    ),
    real("load", "", "`tokens` ÷ the mean over the layer's experts; 1: an even share"),
)

RANK_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    *_WHICH_ENGINE,
    count("rank", "", "number of the rank in its engine, from 0"),
    count("stage", "", "the stage that it is of, from 0, in the order of the layers"),
    count("weight_bytes", "bytes", "weights of its part of the model, as they are loaded"),
    count("kv_bytes", "bytes", "its part of the KV cache"),
    count(
        "read_bytes",
        "bytes",
        "bytes of the model's tensors that it read from its files, out of the page cache or from the disk; those of "
        "adapters and draft models are not counted",
    ),
    count(
        "before_rss_bytes",
        "bytes",
        "resident memory before it loaded anything: Python and libraries; null where the system does not say",
    ),
    count("peak_rss_bytes", "bytes", "peak resident memory"),
    seconds(
        "collective_s",
        "as in `steps`, as this rank measured it, over all steps: the rank with the least waited the least for others",
    ),
    seconds(
        "stage_wait_s",
        "time for which it waited for steps and for ranks of other stages; null without stages, and on GPUs",
    ),
)

ACTIVITY_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    text(
        "process", "`command`; `engine` and the number of its process, as in `steps`; `reader` and its number"
    ),
    text("activity", "what the process did"),
    seconds("from_s", "since the command was started"),
    seconds("until_s", "since the command was started"),
)

ACCURACY_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    text(
        "field", "a field of answers that are objects; null: the answer as a whole, right if all fields are"
    ),
    *_LABELLED,
)

CONFUSION_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    text("field", "as in `accuracy`; only fields of few labels are here"),
    text("expected", "the label that was expected, as it was first written"),
    text(
        "outcome",
        "`label`: the answer is a label; `other`: it is none; `error`: the row is an error row",
    ),
    text("answer", "the label that was answered; null for the other outcomes"),
    count("rows", "rows", "how many rows"),
)

CALIBRATION_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    ratio("from_probability", "answers whose probability is at least so much"),
    ratio("to_probability", "and less than so much, or 1"),
    count("rows", "rows", "labelled rows with such an answer"),
    count("right_rows", "rows", "part of `rows`: the answer is the expected one, once both are normalised"),
    ratio("mean_probability", "of these answers"),
    ratio("accuracy", "`right_rows` ÷ `rows`", formula=over("right_rows", "rows")),
)

COLUMNS = {
    RUN: RUN_COLUMNS,
    STEPS: STEP_COLUMNS,
    REQUESTS: REQUEST_COLUMNS,
    ROWS: ROW_COLUMNS,
    EXPERTS: EXPERT_COLUMNS,
    RANKS: RANK_COLUMNS,
    ACTIVITIES: ACTIVITY_COLUMNS,
    PHASES: PHASE_COLUMNS,
    BUCKETS: BUCKET_COLUMNS,
    PREFIXES: PREFIX_COLUMNS,
    ACCURACY: ACCURACY_COLUMNS,
    CONFUSION: CONFUSION_COLUMNS,
    CALIBRATION: CALIBRATION_COLUMNS,
}
SCHEMAS = {table: schema_of(columns, table) for table, columns in COLUMNS.items()}


def sampled(columns: Sequence[Column], sample: type[StepSample | RequestSample]) -> tuple[str, ...]:
    """The names of those columns that stand in an engine's sample."""
    names = {field.name for field in fields(sample)}
    return tuple(column.name for column in columns if column.name in names and column.name != "key")


def completed(row: dict[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    """The row with what formulas make of it; it has all other columns, and other values that formulas need."""
    for column in columns:
        if column.formula is not None:
            row[column.name] = column.formula(row)
    return {column.name: row[column.name] for column in columns}


def markdown(columns: Sequence[Column]) -> str:
    """The columns as the Markdown table that the documentation shows."""
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines = [f"| `{c.name}` | {_type_name(c.type)} | {c.unit} | {c.meaning} |" for c in columns]
    return "\n".join([*head, *lines])


def _type_name(kind: pa.DataType) -> str:
    return "timestamp UTC" if pa.types.is_timestamp(kind) else str(kind).removesuffix(" ('entries')")
