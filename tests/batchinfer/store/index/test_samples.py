"""Rows with several answers: an input that repeats the row gives the same index."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from batchinfer.store.index.even_batches import BATCH_ROWS
from batchinfer.store.index.index import INPUT_ROW, SAMPLE, Index
from tests.batchinfer.store.index.ingest_kit import carried, checkpoint, make_job, prompts_of, rows_of, run
from tests.batchinfer.store.index.test_keeping import SINGLE, Nights, jsonl

LADDER = ({"seed": 1}, {"temperature": 0.2})


def asking(seed: int, count: int) -> list[dict[str, Any]]:
    """Return rows, many of them equal except for their n, and some of them error rows."""
    draw = random.Random(seed)
    numbers = [None, 1, 1, 2, 3, 7, BATCH_ROWS + 1]
    texts = [f"word {n}" for n in range(count // 5)] + [None]
    return [
        {"id": f"r{at}", "text": draw.choice(texts), "n": draw.choice(numbers), "more": at}
        for at in range(count)
    ]


def request(row: dict[str, Any], n: int | None) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": row["text"]}], "n": n, "max_tokens": 5}
    return {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions", "body": body}


def indexed(folder: Path, rows: list[dict[str, Any]], n: str | None, **source: Any) -> Index:
    """Ingest rows. `n`: the column with the number of answers, or None."""
    folder.mkdir()
    checkpoint(folder / "model")
    path = jsonl(folder, rows)
    if source:
        return run(make_job(folder, prompt=None, path=str(path), on_invalid=LADDER, **source))
    sampling = {"temperature": 1.0, "from_columns": {"n": n} if n else {}}
    user = {"user": "Say {{ text }}"}
    usual = {"columns": ("more",), "sampling": sampling, "on_invalid": LADDER, "id": "id"}
    return run(make_job(folder, prompt=user, path=str(path), **usual))


@pytest.mark.parametrize("form", ["columns", "openai"])
def test_a_row_with_n_equals_n_repeated_rows(tmp_path: Path, form: str) -> None:
    """Including their work keys in all attempts. Occurrences are numbered in the order of all answers."""
    rows = asking(7, 40)
    times = [row["n"] or 1 if row["text"] is not None else 1 for row in rows]
    often = [row for row, n in zip(rows, times, strict=True) for _ in range(n)]
    if form == "openai":
        several = indexed(tmp_path / "a", [request(row, row["n"]) for row in rows], None, format="openai")
        repeated = indexed(tmp_path / "b", [request(row, None) for row in often], None, format="openai")
    else:
        several = indexed(tmp_path / "a", rows, "n")
        repeated = indexed(tmp_path / "b", often, None)
        one, other = (carried(index).to_pylist() for index in (several, repeated))
        assert one == other
    found, wanted = rows_of(several), rows_of(repeated)
    places = [(row.pop(INPUT_ROW.name), row.pop(SAMPLE.name)) for row in found]
    assert places == [(at, sample) for at, n in enumerate(times) for sample in range(n)]
    assert [row.pop("row_index") for row in found] == [at for at, _ in places]
    assert prompts_of(several) == prompts_of(repeated)
    mine = [name for name in found[0] if name not in ("token_offset", "file")]
    assert [[row[name] for name in mine] for row in found] == [[row[name] for name in mine] for row in wanted]
    assert len({row["key"] for row in found if row["key"]}) == sum(row["key"] is not None for row in found)
    assert (several.rows, several.error_rows) == (len(often), repeated.error_rows)
    assert several.total_tokens == repeated.total_tokens
    assert (several.samples, repeated.samples) == (True, False)


@pytest.mark.slow
def test_rows_with_several_answers_are_prepared_again(tmp_path: Path) -> None:
    """Greedy rows, each of them a chunk, are kept."""
    nights = Nights(tmp_path, prompt=None, format="openai", columns=(), id=None)
    texts = [{"id": f"r{at}", "text": f"word {at}"} for at in range(24)]
    alone = [request(row, None) for row in texts]
    for row in alone:
        row["body"]["temperature"] = 0
    rows = [request(texts[at], 3) if at in (9, 17) else row for at, row in enumerate(alone)]
    nights.ingest(jsonl(tmp_path, rows), **SINGLE)
    later = [*rows, alone[9], request(texts[2], 2), request({"id": "new", "text": "new"}, 2)]
    assert nights.check(jsonl(tmp_path, later), **SINGLE) == 22
    assert nights.check(jsonl(tmp_path, alone), **SINGLE) == 22
    assert nights.check(jsonl(tmp_path, alone), **SINGLE) == 24


def test_a_bad_number_of_answers_names_its_column(tmp_path: Path) -> None:
    rows = [{"text": "a", "n": n, "id": "r", "more": 0} for n in ("three", 0, 2000, 2)]
    found = rows_of(indexed(tmp_path / "job", rows, "n"))
    assert [row["error_code"] for row in found] == ["bad_parameter"] * 2 + ["n_over_limit"] + [None] * 2
    assert "1024" in found[2]["error_message"]
