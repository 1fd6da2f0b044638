"""The columns of the run table with counts of tokens, drafts and steps."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.report.column import Column, count, ratio, seconds, total
from batchinfer.report.tables.columns.shared import LAUNCHED, drafts, mean_of_engines


def _launches() -> Iterator[Column]:
    # Null on a CPU
    for mode, how in LAUNCHED.items():
        each, share = _launched("count(*)", mode)
        yield count(f"{mode}_steps", "steps", f"number of `steps` that were {how}; null on a CPU", each)
        yield ratio(f"{mode}_steps_share", f"`{mode}_steps` ÷ `steps`", share)
    for mode in LAUNCHED:
        each, share = _launched("sum(tokens)", mode)
        yield count(f"{mode}_tokens", "tokens", f"computed in `{mode}_steps`, recomputed ones included", each)
        yield ratio(f"{mode}_tokens_share", f"`{mode}_tokens` ÷ all computed tokens", share)


def _launched(sums: str, mode: str) -> tuple[str, str]:
    every = f"nullif({sums} FILTER (launch IS NOT NULL), 0)"
    some = f"coalesce({sums} FILTER (launch = '{mode}'), 0)"
    return f"CASE WHEN {every} > 0 THEN {some} END", f"{some} / {every}"


WORK: tuple[Column, ...] = (
    count(
        "prompt_tokens_run",
        "tokens",
        "computed prompt tokens, each counted once, without recomputation and padding",
        sql=total("prompt_tokens"),
    ),
    count(
        "prefix_saved_tokens",
        "tokens",
        "prompt tokens not computed because their prefix was in the KV cache",
        sql=total("cached_tokens"),
    ),
    count(
        "duplicate_saved_tokens",
        "tokens",
        "prompt tokens not computed because rows [are duplicates](#saved-and-repeated-tokens)",
    ),
    count("duplicate_saved_output_tokens", "tokens", "output tokens not sampled because rows are duplicates"),
    count(
        "decode_tokens_run",
        "tokens",
        "output tokens computed to sample the next token, each counted once",
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
        "sampled tokens, including unfinished requests",
        sql=total("sampled_tokens - scored_positions"),
    ),
    count(
        "recomputed_tokens", "tokens", "tokens recomputed after a preemption", sql=total("recomputed_tokens")
    ),
    count(
        "padded_tokens",
        "tokens",
        "unused query positions: padding, steps of rows that had ended, rejected drafts",
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
        "output tokens without an alternative under a constraint: appended, not sampled",
        sql=total("forced_tokens"),
    ),
    seconds(
        "mask_s",
        "part of `model_s`: computing the tokens that constraints allow",
        sql=mean_of_engines("mask_s"),
    ),
    seconds("compile_s", "compiling constraints", sql=mean_of_engines("compile_s")),
    *drafts(of_run=True),
    count("steps", "steps", "engine steps", sql="count(*)"),
    *_launches(),
    count(
        "host_launches",
        "times",
        "number of launches by the host: fewer than `steps` with multi-step decoding; null on a CPU",
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
        "GPU memory of graphs captured between steps; null on a CPU",
        sql="sum(graph_bytes)",
    ),
)
