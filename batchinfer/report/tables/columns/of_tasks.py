"""Columns of the run table about answers of certain tasks, and the columns that are null for some tasks."""

from __future__ import annotations

from batchinfer.report.column import COUNTS, Column, count, ratio, real
from batchinfer.report.tables.columns.shared import drafts

WITHOUT_OUTPUT = frozenset({"embed", "score", "classify", "rerank"})  # tasks that generate no tokens
OF_PREFIXES = ("prefix_saved_tokens", "again_tokens")  # null if prompts do not share prefixes
OF_OUTPUT = (  # null for tasks that generate no tokens
    "output_tokens",
    "sampled_tokens",
    "decode_tokens_run",
    "duplicate_saved_output_tokens",
    "constrained_requests",
    "steered_requests",
    "forced_tokens",
    "mask_s",
    "compile_s",
    *(column.name for column in drafts(of_run=True)),
    *(f"{latency}_p{percentile}_s" for latency in ("ttft", "tpot", "itl") for percentile in (50, 90, 99)),
    "forecast_output_tokens",
    "deadline_output_tokens",
)

ANSWERS: tuple[Column, ...] = (
    Column(
        "labels", COUNTS, "rows", "rows by label (`classify` with labels of the job); null for other tasks"
    ),
    ratio("mean_label_probability", "mean `probability` of all labels (`classify`); null for other tasks"),
    count("scored_tokens", "tokens", "tokens that have a log-probability (`score`); null for other tasks"),
    real(
        "mean_logprob",
        "nats",
        "mean log-probability of the `scored_tokens`; perplexity is exp(−`mean_logprob`)",
    ),
    count("greedy_rows", "rows", "rows in which each scored token is the most likely one (`is_greedy`)"),
    *(
        real(f"score_p{at}", "", f"the rows' `score`, {at}th percentile (`rerank`); null for other tasks")
        for at in (10, 50, 90)
    ),
    count("dimensions", "", "numbers of a vector (`embed`); null for other tasks"),
)
