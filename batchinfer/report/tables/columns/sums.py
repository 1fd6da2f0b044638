"""The columns of the tables phases, buckets and prefixes."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.report.column import Column, count, ratio, real, seconds, text, whole
from batchinfer.report.tables.columns.formulas import over
from batchinfer.report.tables.columns.shared import RUN_ID


def _efficiency(engine_s: str, flops: str, read: str) -> Iterator[Column]:
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
    RUN_ID,
    text("phase", "`prefill`, `decode` or `mixed`, as in `steps`; phases without steps have no row", "phase"),
    count("steps", "steps", "engine steps", sql="count(*)"),
    count("prompt_tokens", "tokens", "computed prompt tokens, each counted once", sql="sum(prompt_tokens)"),
    count(
        "decode_tokens",
        "tokens",
        "output tokens computed to sample the next token, each counted once",
        sql="sum(decode_tokens)",
    ),
    count("sampled_tokens", "tokens", "tokens sampled", sql="sum(sampled_tokens - scored_positions)"),
    count(
        "recomputed_tokens", "tokens", "tokens recomputed after a preemption", sql="sum(recomputed_tokens)"
    ),
    count("padded_tokens", "tokens", "unused query positions", sql="sum(padded_tokens)"),
    seconds("device_s", "`model_s` of the phase's steps", sql="sum(model_s) / $engines"),
    *_efficiency("sum(greatest(interval_s, duration_s)) / $engines", "sum(flops)", "sum(bytes)::DOUBLE"),
)


BUCKET_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    count(
        "most_prompt_tokens",
        "tokens",
        "upper limit of the prompts' length; the lower limit is half of it",
        sql="CAST(2 ** ceil(log2(greatest(prompt_tokens, 1))) AS BIGINT)",
    ),
    count("requests", "requests", "finished requests", sql="count(*)"),
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
    RUN_ID,
    count("prefix", "", "number of the prefix in the run"),
    count("parent", "", "the longest shorter prefix in this table with which this prefix begins; null: none"),
    count("depth", "tokens", "length of the prefix"),
    count("tokens", "tokens", "part of `depth` beyond the parent"),
    count("users", "requests", "requests that begin with this prefix"),
    count(
        "saved_tokens", "tokens", "`tokens` × (`users` − 1): upper bound of the tokens that sharing can save"
    ),
    count("cached_tokens", "tokens", "tokens that sharing saved: at most `saved_tokens`"),
    seconds("device_s", "time of computing `tokens`, summed over all users"),
    text("first_key", "key of the first user, as in `requests`"),
)
