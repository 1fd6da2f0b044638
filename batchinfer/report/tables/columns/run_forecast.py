"""The columns of the run table that say what was forecast, and whether the deadline was met."""

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
        "peaks that is only `declared`, or from the `limit` of the peaks, of which a CPU is assumed to reach a half",
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
