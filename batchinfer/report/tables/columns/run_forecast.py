"""The columns of the run table about memory, the forecast and the deadline."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from batchinfer.report.column import TIME, Column, count, ratio, real, seconds, text
from batchinfer.report.tables.columns.formulas import cost_of, deadline_met, forecast_error, goodput
from batchinfer.report.tables.columns.shared import LAUNCHED


def _forecast_launches() -> Iterator[Column]:
    for unit in ("steps", "tokens"):
        for mode in LAUNCHED:
            yield count(f"forecast_{mode}_{unit}", unit, f"the forecast of `{mode}_{unit}`")


FORECAST: tuple[Column, ...] = (
    real("forecast_engine_cost", "money", "the forecast of `engine_cost`", formula=cost_of("forecast_s")),
    count(
        "worker_restarts",
        "times",
        "workers that replaced dead ones; null if the run needed no worker",
    ),
    count("parent_peak_rss_bytes", "bytes", "peak resident memory of the command"),
    count(
        "worker_peak_rss_bytes",
        "bytes",
        "peak resident memory of the workers, summed over all workers",
    ),
    count(
        "rank_peak_rss_bytes",
        "bytes",
        "part of `worker_peak_rss_bytes`: the rank with the largest peak resident memory; null without ranks",
    ),
    count(
        "rank_read_bytes",
        "bytes",
        "bytes that a rank read from the model's files, for the rank that read the most; null without ranks",
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
        "source of the times of steps: earlier `runs`; `measured` by `doctor --measure`; `declared`: 60 % of a GPU's "
        "peaks; `limit`: half of a CPU's peaks",
    ),
    count(
        "forecast_answers_from",
        "runs",
        "number of earlier runs with the lengths of answers; 0: every answer was assumed to have `max_tokens` tokens",
    ),
    Column("deadline", TIME, "", "the `deadline` of the job; null: it has none"),
    Column(
        "deadline_met",
        pa.bool_(),
        "",
        "whether the results were published by the deadline",
        formula=deadline_met,
    ),
    count("deadline_rows", "rows", "rows that this run had answered by the deadline, without error rows"),
    count(
        "deadline_output_tokens",
        "tokens",
        "tokens of the answers of `deadline_rows`; an answer of several rows counts once",
    ),
    real(
        "goodput_tokens_per_s",
        "tokens/s",
        "`deadline_output_tokens` ÷ the time from `started_at` to the deadline, or `finished_at` if that is earlier",
        formula=goodput,
    ),
)
