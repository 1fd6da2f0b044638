"""The line of the run summary about labels, scores or vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchinfer.core.wording import count, counted, percent, short_number

_MOST_LABELS = 6  # labels in the summary; the page shows all
Row = Mapping[str, Any]


def answers_line(row: Row) -> tuple[str, str]:
    """Return the line of the run summary about labels, scores or vectors.

    Args:
        row: A row of the run table.

    Returns:
        The name of the line and its text. Both are empty if the run has no such answers.
    """
    if row["mean_label_probability"] is not None:
        return "labels", _labels(row)
    if row["mean_logprob"] is not None:
        return "scores", _scores(row)
    if row["score_p50"] is not None:
        spread = " / ".join(f"{row[f'score_p{at}']:.3g}" for at in (10, 50, 90))
        return "scores", f"{spread}  (p10 / p50 / p90)"
    if row["dimensions"] is not None and row["rows_ok"]:
        return "vectors", f"{count(row['rows_ok'])} of {counted(row['dimensions'], 'number')} each"
    return "", ""


def perplexity(mean_logprob: float) -> float | None:
    """Return the perplexity for a mean log-probability per token, or None if it is too large for a float."""
    try:
        return math.exp(-mean_logprob)
    except OverflowError:
        return None


def _labels(row: Row) -> str:
    labels: Mapping[str, int] = row["labels"] or {}
    rows = sum(labels.values())
    ranked = sorted(labels.items(), key=lambda item: (-item[1], item[0]))
    parts = [
        f"{label.strip()} {count(number)} ({percent(number / rows)})"
        for label, number in ranked[:_MOST_LABELS]
    ]
    if len(ranked) > _MOST_LABELS:
        parts.append(f"{counted(len(ranked) - _MOST_LABELS, 'other label')}")
    probability = f"probability {row['mean_label_probability']:.2f} on average"
    return f"{', '.join(parts)}; {probability}" if parts else probability


def _scores(row: Row) -> str:
    found = perplexity(row["mean_logprob"])
    named = "" if found is None else f" (perplexity {short_number(found)})"
    greedy = f"; greedy decoding gives {counted(row['greedy_rows'], 'row')}" if row["greedy_rows"] else ""
    return f"{short_number(row['scored_tokens'])} tokens, mean log-probability {row['mean_logprob']:.3f}{named}{greedy}"
