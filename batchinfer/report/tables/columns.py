"""Every column of the report's tables: its type, its unit and what it means.

`docs/report.md` shows the same text; a test compares the two. Null always means "not known", never zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchinfer.report.column import COUNTS as _COUNTS
from batchinfer.report.column import REAL as _REAL
from batchinfer.report.column import TEXTS as _TEXTS
from batchinfer.report.column import TIME as _TIME
from batchinfer.report.column import Column
from batchinfer.report.column import count as _count
from batchinfer.report.column import ratio as _ratio
from batchinfer.report.column import seconds as _seconds
from batchinfer.report.column import spread as _spread
from batchinfer.report.column import text as _text

# Since 2, every table has run_id, and there is a table rows; since 3 there are phases, buckets and prefixes;
# since 4 steps and requests say which replica it was; since 5 steps say how they were launched
TABLE_FORMAT = 5
RUN = "run"
STEPS = "steps"
REQUESTS = "requests"
ROWS = "rows"
EXPERTS = "experts"
PHASES = "phases"
BUCKETS = "buckets"
PREFIXES = "prefixes"


def schema_of(columns: Sequence[Column], table: str) -> pa.Schema:
    """The Arrow schema of a table, with the format version in its metadata."""
    metadata = {"batchinfer.table": table, "batchinfer.format": str(TABLE_FORMAT)}
    return pa.schema([pa.field(c.name, c.type) for c in columns], metadata=metadata)


_LAUNCHED = {
    "full_graph": "replayed as one graph",
    "piecewise_graph": "replayed as graphs of their pieces, with attention launched between the pieces",
    "eager": "launched one operator at a time",
}


def _launches() -> Iterator[Column]:
    """Steps and tokens by the way they were launched, in numbers and shares."""
    for mode, how in _LAUNCHED.items():
        yield _count(f"{mode}_steps", "steps", f"how many of `steps` were {how}; null on a CPU")
        yield _ratio(f"{mode}_steps_share", "their share of `steps`")
    for mode in _LAUNCHED:
        yield _count(f"{mode}_tokens", "tokens", f"run in `{mode}_steps`, recomputed ones included")
        yield _ratio(f"{mode}_tokens_share", "their share of all tokens that were run")


def _forecast_launches() -> Iterator[Column]:
    for unit in ("steps", "tokens"):
        for mode in _LAUNCHED:
            yield _count(f"forecast_{mode}_{unit}", unit, f"the forecast of `{mode}_{unit}`")


RUN_COLUMNS: tuple[Column, ...] = (
    _text("run_id", "names the run; starts with its UTC start time, so that names sort by time"),
    _text("job", "`name` of the job file"),
    _text("output", "folder of the results"),
    _text("model", "`org/name@commit` if the job names the model so, else the checkpoint's folder"),
    Column("started_at", _TIME, "", "when the command's process started"),
    Column("finished_at", _TIME, "", "when the tables were written"),
    _seconds("wall_s", "`finished_at` − `started_at`; the sum of the phases, `startup_s` to `other_s`"),
    _count("exit_code", "", "exit code of the command"),
    _text("exit_status", "how the run ended, in one of the words above"),
    Column("trial", pa.bool_(), "", "whether `--limit` ran only the first rows"),
    Column("versions", _TEXTS, "", "versions of Python and of the packages that decide the results"),
    _text("device", "`cpu` or `cuda`"),
    _text("hardware", "model name of the CPU or GPU"),
    _count("cores", "cores", "CPU cores that the process may use; null on a GPU"),
    _text("dtype", "data type of activations, and of weights that are not quantised"),
    _text(
        "quantization",
        "type to which weights of linear layers were quantised, or `none`; `stored`: fp8 as the checkpoint stores it",
    ),
    _text("kv_cache_dtype", "`auto`: the KV cache kept values in `dtype`; `int8`, `fp8`: such codes"),
    Column(
        "deterministic",
        pa.bool_(),
        "",
        "whether `engine.deterministic` made answers independent of other rows",
    ),
    Column("ops", _TEXTS, "", "operators that were chosen, for the `decoder` and for its `linear` layers"),
    _count("replicas", "engines", "engines that shared the work; times of the run are means over them"),
    _count("threads", "threads", "CPU threads of the operators, of all engines together"),
    Column(
        "other_cores", _REAL, "cores", "CPU cores that other processes used while the engine ran, on average"
    ),
    Column(
        "peak_flops_per_s",
        _REAL,
        "FLOP/s",
        "peak of linear layers that MFU is measured against, of all devices used",
    ),
    Column(
        "peak_bytes_per_s",
        _REAL,
        "bytes/s",
        "memory bandwidth that MBU is measured against, of all devices used",
    ),
    _text("peak_source", "`measured` on this machine, `datasheet`, or `unknown`"),
    Column(
        "datasheet_flops_per_s", _REAL, "FLOP/s", "the maker's figure for linear layers, without sparsity"
    ),
    Column("datasheet_bytes_per_s", _REAL, "bytes/s", "the maker's figure for memory bandwidth"),
    _count("rows", "rows", "input rows of the job"),
    _count("rows_ok", "rows", "rows with an answer, whichever run computed it"),
    _count("rows_error", "rows", "error rows"),
    Column("error_codes", _COUNTS, "rows", "error rows by `error_code`"),
    _count("distinct_requests", "requests", "distinct requests of the rows without an input error"),
    _count("duplicate_rows", "rows", "rows that got the answer of an equal row"),
    _count("reused_requests", "requests", "requests whose answer was already in the completion store"),
    _count("computed_requests", "requests", "requests that finished in this run"),
    _count("prompt_tokens_run", "tokens", "prompt tokens run, each once, without recomputation and padding"),
    _count("prefix_saved_tokens", "tokens", "prompt tokens not run because the cache held their prefix"),
    _count(
        "duplicate_saved_tokens",
        "tokens",
        "prompt tokens not run because a row got the answer of an equal row (counted as in the definitions above)",
    ),
    _count("duplicate_saved_output_tokens", "tokens", "output tokens not sampled for the same reason"),
    _count("decode_tokens_run", "tokens", "output tokens run to get the next token, each counted once"),
    _count("output_tokens", "tokens", "tokens of the completions that finished in this run"),
    _count("sampled_tokens", "tokens", "tokens sampled, those of unfinished requests included"),
    _count("recomputed_tokens", "tokens", "tokens run again after a preemption"),
    _count(
        "padded_tokens",
        "tokens",
        "query positions computed without use: padding, steps of rows that had ended, rejected drafts",
    ),
    _ratio("padding_share", "padded ÷ (prefill + decode + padded) positions"),
    _ratio("recomputed_share", "recomputed ÷ (prefill + decode) tokens"),
    _count("preemptions", "times", "sequences that lost their blocks and were queued again"),
    _count("constrained_requests", "requests", "computed requests that had a constraint, such as a schema"),
    _count(
        "steered_requests",
        "requests",
        "constrained requests whose most likely token was forbidden at least once",
    ),
    _count(
        "forced_tokens",
        "tokens",
        "output tokens to which a constraint left no alternative: appended, not sampled",
    ),
    _seconds("mask_s", "part of `model_s`: computing which tokens constraints allow"),
    _seconds("compile_s", "compiling constraints"),
    _count("steps", "steps", "engine steps"),
    *_launches(),
    _seconds("capture_s", "part of `engine_wall_s`: capturing graphs; null on a CPU"),
    _count("graph_bytes", "bytes", "GPU memory that graphs captured between steps took; null on a CPU"),
    _seconds(
        "startup_s",
        "starting the command: imports, job file, checkpoint and its fingerprint, the state's lock",
    ),
    _seconds("ingest_s", "reading, rendering and tokenising"),
    _seconds("plan_s", "looking up stored answers, and planning"),
    _seconds("load_s", "starting the worker and loading the model"),
    _seconds(
        "operators_build_s",
        "compiling the CPU operators, in parallel to the phases up to `load_s`; null if they were compiled already",
    ),
    _seconds("operators_wait_s", "part of `load_s`: waiting for the operators to be compiled"),
    _seconds(
        "load_capture_s",
        "part of `load_s`: capturing graphs, in the replica that took longest; null on a CPU",
    ),
    _count(
        "load_graph_bytes", "bytes", "GPU memory of these graphs, in the replica with the most; null on a CPU"
    ),
    _count(
        "load_free_bytes",
        "bytes",
        "GPU memory free after loading, in the replica with the least; null on a CPU",
    ),
    _seconds("engine_s", "computing, as the parent process saw it"),
    _seconds("publish_s", "counting errors, joining and publishing the results"),
    _seconds("close_s", "storing the last answers, ending the worker, writing these tables"),
    _seconds("other_s", "part of `wall_s`: time in none of the phases above"),
    _seconds(
        "engine_wall_s",
        "start of the first step to end of the last, idle time included, in the replica that took longest",
    ),
    _seconds("model_s", "part of `engine_wall_s`: inside the model and the sampler"),
    _seconds("overhead_s", "part of `engine_wall_s`: inside a step, outside of model and sampler"),
    _seconds(
        "idle_s",
        "part of `engine_wall_s`: between steps of the same engine, and while other replicas still ran",
    ),
    _seconds(
        "metering_s", "time that these measurements took: in the engine, for each step, and in the command"
    ),
    _seconds("wall_load_s", "part of `wall_s`: `startup_s` and `load_s`"),
    _seconds(
        "wall_input_s",
        "part of `wall_s`: `ingest_s`, `plan_s`, and the part of `idle_s` in which the engine had no rows",
    ),
    _seconds("wall_device_s", "part of `wall_s`: `model_s`"),
    _seconds("wall_host_s", "part of `wall_s`: the rest of `engine_s`, and `other_s`"),
    _seconds("wall_output_s", "part of `wall_s`: `publish_s` and `close_s`"),
    _seconds("device_roofline_s", "part of `wall_device_s`: `roofline_s`"),
    _seconds("device_padding_s", "part of `wall_device_s`: padded positions"),
    _seconds("device_recomputation_s", "part of `wall_device_s`: tokens run again after a preemption"),
    *(
        _seconds(f"device_{kind}_loss_s", f"part of `wall_device_s`: {what}, beyond the roofline")
        for kind, what in (
            ("linear", "linear layers and experts"),
            ("attention", "attention"),
            ("sampling", "the head and the sampler"),
            ("elementwise", "norms, activations and all other operators"),
        )
    ),
    _seconds("device_other_loss_s", "part of `wall_device_s`: the fixed time of each step, and the rest"),
    _count("flops", "FLOP", "useful floating-point operations by the operators' declared costs"),
    _count("bytes_moved", "bytes", "bytes that had to move by the operators' declared costs"),
    _ratio("mfu", "`flops` ÷ (`engine_wall_s` × `peak_flops_per_s`)"),
    _ratio("mbu", "`bytes_moved` ÷ (`engine_wall_s` × `peak_bytes_per_s`)"),
    _seconds("roofline_s", "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth)"),
    _ratio("roofline_efficiency", "`roofline_s` ÷ `engine_wall_s`"),
    _seconds("step_bound_s", "Σ over steps of the same maximum: as if operators overlapped perfectly"),
    _ratio("step_bound_efficiency", "`step_bound_s` ÷ `engine_wall_s`; no higher than `roofline_efficiency`"),
    Column("prompt_tokens_per_s", _REAL, "tokens/s", "`prompt_tokens_run` ÷ `engine_wall_s`"),
    Column("output_tokens_per_s", _REAL, "tokens/s", "`output_tokens` ÷ `engine_wall_s`"),
    Column("total_tokens_per_s", _REAL, "tokens/s", "sum of the two above"),
    *_spread("queue", "from when the engine got the request to the start of its first step"),
    *_spread("ttft", "from when the engine got the request to its first token (offline, mostly waiting)"),
    *_spread("tpot", "seconds per output token after the first, one value per request"),
    *_spread("itl", "gap between two tokens of a sequence, one value per decoded token"),
    *_spread("latency", "from when the engine got the request to its last token"),
    Column(
        "energy_j", _REAL, "J", "energy that the machine used while the engine ran: the sum of the next two"
    ),
    Column(
        "cpu_energy_j",
        _REAL,
        "J",
        "energy by the counters of the CPUs (RAPL); null if there are none, or only root may read them",
    ),
    Column(
        "gpu_energy_j",
        _REAL,
        "J",
        "energy by the GPU's counter (NVML); null if there is none, or the package `nvidia-ml-py` is missing",
    ),
    Column("energy_j_per_token", _REAL, "J/token", "`energy_j` ÷ (`prompt_tokens_run` + `output_tokens`)"),
    Column("price_per_hour", _REAL, "money/h", "price of the machine, as given by `--price-per-hour`"),
    Column("cost", _REAL, "money", "`wall_s` at this price"),
    Column("engine_cost", _REAL, "money", "`engine_wall_s` at this price"),
    Column("forecast_engine_cost", _REAL, "money", "the forecast of `engine_cost`"),
    _count(
        "worker_restarts",
        "times",
        "workers started in place of dead ones; null: the run needed no worker at all",
    ),
    _count("parent_peak_rss_bytes", "bytes", "peak resident memory of the command"),
    _count(
        "worker_peak_rss_bytes",
        "bytes",
        "peak resident memory of the worker with the model; sum over all workers",
    ),
    _seconds("forecast_s", "the forecast of `engine_wall_s` before the run, by simulation"),
    Column("forecast_error", _REAL, "", "`engine_wall_s` ÷ `forecast_s` − 1; negative: faster than forecast"),
    _count("forecast_steps", "steps", "the forecast of `steps`"),
    *_forecast_launches(),
    _count("forecast_prompt_tokens", "tokens", "the forecast of `prompt_tokens_run`"),
    _count("forecast_recomputed_tokens", "tokens", "the forecast of `recomputed_tokens`"),
    _count("forecast_output_tokens", "tokens", "the forecast of `output_tokens`"),
    _seconds("forecast_revised_s", "the forecast of `engine_wall_s` during the run, from its first answers"),
    _ratio("forecast_mfu", "the forecast of `mfu`"),
    _ratio("forecast_mbu", "the forecast of `mbu`"),
    _text(
        "forecast_basis",
        "where the times of steps came from: earlier `runs`, `measured` by `doctor --measure`, a share of the "
        "peaks that is only `declared`, or at the `limit` of the peaks",
    ),
    _count(
        "forecast_answers_from",
        "runs",
        "earlier runs from which lengths of answers were taken; 0: answers were counted at their `max_tokens`",
    ),
    Column("deadline", _TIME, "", "when the results were wanted; null: the job has no `deadline`"),
    Column("deadline_met", pa.bool_(), "", "whether the results were published by the deadline"),
    _count("deadline_rows", "rows", "rows that this run had answered by the deadline, without error rows"),
    _count("deadline_output_tokens", "tokens", "tokens of these answers, each answer counted once"),
    Column(
        "goodput_tokens_per_s",
        _REAL,
        "tokens/s",
        "`deadline_output_tokens` ÷ the time from `started_at` to the deadline, or `finished_at` if that is earlier",
    ),
)

_RUN_ID = _text("run_id", "the run, as in the table `run`")
_WHICH_ENGINE: tuple[Column, ...] = (
    _count(
        "engine", "", "number of the engine's process in this run, from 0; a restart gets the next number"
    ),
    _count("replica", "", "number of the replica, from 0; an engine started in place of a dead one keeps it"),
)

STEP_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    *_WHICH_ENGINE,
    _count("step", "", "number of the step in its engine"),
    _seconds("started_s", "start of the step, since the engine started"),
    _seconds("duration_s", "length of the step"),
    _seconds("interval_s", "end of the previous step to end of this step; null in an engine's first step"),
    _seconds("model_s", "part of `duration_s`: inside the model and the sampler"),
    _count("prefill_tokens", "tokens", "prompt tokens run, and all tokens run again after a preemption"),
    _count("decode_tokens", "tokens", "output tokens run for the first time, to get the next token"),
    _count("recomputed_tokens", "tokens", "part of `prefill_tokens`: tokens run again after a preemption"),
    _count("cached_tokens", "tokens", "prompt tokens not run because the cache held their prefix"),
    _count("sampled_tokens", "tokens", "tokens sampled"),
    _count(
        "padded_tokens",
        "tokens",
        "query positions computed without use: padding, steps of rows that had ended, rejected drafts",
    ),
    _count("running", "sequences", "running sequences after scheduling"),
    _count("waiting", "sequences", "waiting sequences after scheduling"),
    _count("preemptions", "times", "sequences preempted"),
    _count("blocks_used", "blocks", "KV blocks in use"),
    _count("blocks_total", "blocks", "KV blocks in total"),
    _count("flops", "FLOP", "useful floating-point operations: without padding and recomputation"),
    _count("bytes", "bytes", "bytes that had to move"),
    _seconds("roofline_s", "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth); null: peaks unknown"),
    _count(
        "forced_tokens",
        "tokens",
        "tokens appended after the sampled ones because a constraint left no alternative",
    ),
    _seconds("mask_s", "part of `model_s`: computing which tokens constraints allow"),
    _seconds("compile_s", "compiling constraints, since the previous step"),
    _text("phase", "`prefill`: the step ran only prompts; `decode`: no prompts; `mixed`: both"),
    _seconds("scheduled_s", "when the step's scheduling began; earlier than `started_s` if steps overlap"),
    _seconds("ended_s", "`started_s` + `duration_s`"),
    _count("pairs", "pairs", "useful (query, key) pairs of attention, summed over layers"),
    _count("kv_tokens", "tokens", "distinct cached tokens read, summed over layers"),
    _seconds("metering_s", "time that the engine spent on measuring the step"),
    _count(
        "copied_tokens", "tokens", "part of `cached_tokens`: copied from the middle of another row's KV block"
    ),
    _text(
        "launch",
        "`full_graph`: replayed as one graph; `piecewise_graph`: as graphs of its pieces, with attention launched "
        "between the pieces; `eager`: launched one operator at a time; null on a CPU",
    ),
    _seconds("capture_s", "capturing graphs for the step; null on a CPU"),
    _count("graph_bytes", "bytes", "GPU memory that these graphs took; null on a CPU"),
)

REQUEST_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    _text("key", "the work key in hexadecimal, as in the completion store"),
    *_WHICH_ENGINE,
    _count("prompt_tokens", "tokens", "length of the prompt"),
    _count("completion_tokens", "tokens", "length of the completion, including its end token"),
    _count("cached_tokens", "tokens", "prompt tokens served from a shared prefix"),
    _count("preemptions", "times", "how often the request was preempted"),
    _count(
        "forced_tokens",
        "tokens",
        "part of the completion: tokens to which its constraint left no alternative",
    ),
    _count("unrun_tokens", "tokens", "part of the completion: its last tokens, which the model never ran"),
    Column("cut", pa.bool_(), "", "whether `max_tokens` or the model's context ended the completion"),
    _seconds("queued_s", "when the engine got the request, since the engine started"),
    _seconds("scheduled_s", "when its first step began"),
    _seconds("first_token_s", "when its first token was sampled"),
    _seconds("finished_s", "when its last token was sampled"),
    _seconds("queue_s", "`scheduled_s` − `queued_s`"),
    _seconds("ttft_s", "`first_token_s` − `queued_s`"),
    _seconds("tpot_s", "(`finished_s` − `first_token_s`) ÷ (`completion_tokens` − 1); null under two tokens"),
    _seconds("latency_s", "`finished_s` − `queued_s`"),
    _count("rows", "rows", "input rows that the request answers"),
    _count("prefix", "", "longest prefix that the request shares with others, as in `prefixes`; null: none"),
    _seconds(
        "device_s",
        "the request's part of the steps' `model_s`; the time of shared prefixes is split among all users",
    ),
    _seconds(
        "ran_device_s", "as `device_s`, but the time of a shared prefix counts for the request that ran it"
    ),
    _seconds("answer_device_s", "part of both: running the request's output tokens"),
    _count("flops", "FLOP", "useful floating-point operations of the tokens that the request ran"),
    Column("bytes", _REAL, "bytes", "the request's part of the steps' `bytes`"),
    _seconds("roofline_s", "the request's part of the steps' `roofline_s`; null: peaks unknown"),
)

_EFFICIENCY: tuple[Column, ...] = (
    _seconds("engine_s", "part of the run's `engine_wall_s`"),
    _count("flops", "FLOP", "useful floating-point operations"),
    Column("bytes", _REAL, "bytes", "bytes that had to move"),
    _seconds("roofline_s", "Σ over operators of max(flops ÷ peak, bytes ÷ bandwidth)"),
    _ratio("mfu", "`flops` ÷ (`engine_s` × the run's `peak_flops_per_s`)"),
    _ratio("mbu", "`bytes` ÷ (`engine_s` × the run's `peak_bytes_per_s`)"),
    _ratio("roofline_efficiency", "`roofline_s` ÷ `engine_s`"),
)

PHASE_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    _text("phase", "`prefill`, `decode` or `mixed`, as in `steps`; phases without steps have no row"),
    _count("steps", "steps", "engine steps"),
    _count("prompt_tokens", "tokens", "prompt tokens run, each counted once"),
    _count("decode_tokens", "tokens", "output tokens run to get the next token, each counted once"),
    _count("sampled_tokens", "tokens", "tokens sampled"),
    _count("recomputed_tokens", "tokens", "tokens run again after a preemption"),
    _count("padded_tokens", "tokens", "query positions computed without use"),
    _seconds("device_s", "`model_s` of the phase's steps"),
    *_EFFICIENCY,
)

BUCKET_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    _count(
        "most_prompt_tokens", "tokens", "upper limit of the prompts' length; the lower limit is half of it"
    ),
    _count("requests", "requests", "requests that finished"),
    _count("rows", "rows", "input rows that these requests answer"),
    _count("prompt_tokens", "tokens", "length of the requests' prompts"),
    _count("cached_tokens", "tokens", "part of `prompt_tokens`: served from shared prefixes"),
    _count("completion_tokens", "tokens", "length of the requests' completions"),
    _seconds("device_s", "sum of the requests' `device_s`"),
    _seconds("ran_device_s", "sum of the requests' `ran_device_s`; `engine_s` is split in proportion to it"),
    *_EFFICIENCY,
    _seconds("latency_p50_s", "the requests' `latency_s`, 50th percentile"),
    _seconds("latency_p99_s", "the requests' `latency_s`, 99th percentile"),
)

PREFIX_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    _count("prefix", "", "names the prefix in its run"),
    _count("parent", "", "the next shorter shared prefix with which this prefix begins; null: none"),
    _count("depth", "tokens", "length of the prefix"),
    _count("tokens", "tokens", "part of `depth` beyond the parent"),
    _count("users", "requests", "requests that begin with this prefix, also with a longer one"),
    _count("saved_tokens", "tokens", "`tokens` × (`users` − 1): the most that sharing can save"),
    _count("cached_tokens", "tokens", "tokens that sharing did save: at most `saved_tokens`"),
    _seconds("device_s", "time in which `tokens` ran, for all users together"),
    _text("first_key", "key of the first user, as in `requests`"),
)

ROW_COLUMNS: tuple[Column, ...] = (
    _text("run_id", "the run that published the row"),
    _count("row_id", "", "the row, as in the results"),
    _text("key", "the work key of the row's answer in hexadecimal, as in `requests`"),
)

EXPERT_COLUMNS: tuple[Column, ...] = (
    _RUN_ID,
    _count("layer", "", "number of the layer, from 0; layers without experts have no rows"),
    _count("expert", "", "number of the expert, from 0"),
    _count(
        "tokens",
        "tokens",
        "tokens that the expert got, recomputed ones included, without padding; since "
        "the engine last started, if `worker_restarts` of `run` is above 0",
    ),
    Column("load", _REAL, "", "`tokens` ÷ the mean over the layer's experts; 1: an even share"),
)

RUN_SCHEMA = schema_of(RUN_COLUMNS, RUN)
STEP_SCHEMA = schema_of(STEP_COLUMNS, STEPS)
REQUEST_SCHEMA = schema_of(REQUEST_COLUMNS, REQUESTS)
ROW_SCHEMA = schema_of(ROW_COLUMNS, ROWS)
EXPERT_SCHEMA = schema_of(EXPERT_COLUMNS, EXPERTS)
PHASE_SCHEMA = schema_of(PHASE_COLUMNS, PHASES)
BUCKET_SCHEMA = schema_of(BUCKET_COLUMNS, BUCKETS)
PREFIX_SCHEMA = schema_of(PREFIX_COLUMNS, PREFIXES)
SCHEMAS = {
    RUN: RUN_SCHEMA,
    STEPS: STEP_SCHEMA,
    REQUESTS: REQUEST_SCHEMA,
    ROWS: ROW_SCHEMA,
    EXPERTS: EXPERT_SCHEMA,
    PHASES: PHASE_SCHEMA,
    BUCKETS: BUCKET_SCHEMA,
    PREFIXES: PREFIX_SCHEMA,
}


def markdown(columns: Sequence[Column]) -> str:
    """The columns as the Markdown table that the documentation shows."""
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines = [f"| `{c.name}` | {_type_name(c.type)} | {c.unit} | {c.meaning} |" for c in columns]
    return "\n".join([*head, *lines])


def _type_name(kind: pa.DataType) -> str:
    return "timestamp UTC" if pa.types.is_timestamp(kind) else str(kind).removesuffix(" ('entries')")
