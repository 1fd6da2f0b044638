"""The summary and the page of runs that generate no tokens describe the answers, and omit output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.report.page.document import page
from batchinfer.report.summary import summary
from batchinfer.report.tables.columns.of_tasks import OF_OUTPUT, OF_PREFIXES
from tests.batchinfer.report.parsed_page import ParsedPage
from tests.batchinfer.report.reported_runs import read_run, write_tables

ROWS = 300
PROBABILITIES = [0.5 + number % 50 / 100 for number in range(ROWS)]
LABELS = ["yes" if number % 3 else "no" for number in range(ROWS)]
TASKS: dict[str, tuple[dict[str, Any], dict[str, list[Any]], list[str], str]] = {
    "classify": ({"labels": {"yes": 200, "no": 100}, "mean_label_probability": 0.745},
        {"label": LABELS, "probability": PROBABILITIES}, ["labels", "probabilities"],
        "labels   yes 200 (67%), no 100 (33%); probability 0.74 on average"),
    "score": ({"scored_tokens": 3000, "mean_logprob": -2.0, "greedy_rows": 3},
        {"logprob": [-20.0 - number for number in range(ROWS)], "scored_tokens": [10] * ROWS}, ["scores"],
        "scores   3k tokens, mean log-probability -2.000 (perplexity 7.39); greedy decoding gives 3 rows"),
    "rerank": ({"score_p10": 0.01, "score_p50": 0.4, "score_p90": 0.99}, {"score": PROBABILITIES}, ["scores"],
        "scores   0.01 / 0.4 / 0.99  (p10 / p50 / p90)"),
    "embed": ({"dimensions": 384}, {}, [], "vectors  300 of 384 numbers each"),
}  # fmt: skip
OF_TOKENS = {"batch", "kv", "phases", "answers"}  # sections that mean nothing without output


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_a_summary_and_a_page_of_its_own(tmp_path: Path, task: str) -> None:
    facts, columns, sections, line = TASKS[task]
    results = pa.table(
        {"row_id": range(ROWS), "status": ["ok"] * ROWS, "error_code": [None] * ROWS, **columns}
    )
    results = results.append_column("custom_id", pa.array([f"r{number}" for number in range(ROWS)]))
    counts = {"rows": ROWS, "rows_ok": ROWS, "rows_error": 0}
    meaningless = [*OF_OUTPUT, *OF_PREFIXES]
    write_tables(tmp_path, steps=20, requests=30, meaningless=meaningless, task=task, **counts, **facts)
    run = read_run(tmp_path, results)
    told = summary(run.row)
    assert f"  {line}\n" in told
    assert not any(word in told for word in ("output", "TTFT", "ITL", "saved by shared prefixes"))
    parsed = ParsedPage(page(run))
    names = [attributes["id"] for tag, attributes in parsed.tags if tag == "section"]
    assert names[: len(sections)] == sections
    assert not {*names} & {*OF_TOKENS, "prefixes"}
    for name in sections:
        assert sum(parsed.tables[f"{name}-table"].column("rows")) == ROWS
    assert "decode_tokens" not in parsed.tables["throughput-table"].columns
    shown = {name for name, table in parsed.tables.items() if "completion_tokens" in table.columns}
    assert not shown, "tables about the tokens of answers"
    if task == "classify":  # labels are counted even after the result was replaced
        replaced = ParsedPage(page(read_run(tmp_path))).tables
        assert replaced["labels-table"].column("rows") == [200, 100]
        assert "probabilities-table" not in replaced
