"""Savings that `plan` reports for a reordered prompt, compared with a plan of that prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.plan.forecast import lint
from batchinfer.plan.forecast.lint import LintFinding
from batchinfer.plan.forecast.text import forecast_json
from batchinfer.plan.order.sharing import field_order
from tests.batchinfer.pipeline.test_pipeline import write_job
from tests.batchinfer.plan.forecast.forecasts import planned, quick_plan, text

pytestmark = pytest.mark.usefixtures("findings")

WORDS = ["alpha", "beta", "gamma", "delta", "psi", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
INSTRUCTIONS = (
    "Say in one short sentence what the customer wants, and whether it is urgent.\n"
    "Do not greet, and do not apologise to anyone."
)


def tickets(count: int) -> list[dict[str, Any]]:
    """Return tickets with different texts about four products, whose descriptions are long."""
    return [
        {
            "id": f"t{i}",
            "text": " ".join(WORDS[(i * 7 + k * k + i // 5) % 12] for k in range(8)) + f" {i}",
            "product": " ".join([WORDS[i % 4]] * 30),
        }
        for i in range(count)
    ]


def ticket_job(folder: Path, model: Path, user: str, rows: list[dict[str, Any]], **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    prompt, sampling = {"system": None, "user": user}, {"max_tokens": 2, "ignore_eos": True}
    return write_job(folder, model, rows, prompt=prompt, sampling=sampling, **sections)


def tokens_to_run(path: Path) -> int:
    """Return the number of prompt tokens that a run computes."""
    with pytest.MonkeyPatch.context() as patch:
        quick_plan(patch)
        plan = planned(path).plan
    return plan.prompt_tokens - plan.shared_prefix_tokens


def findings(path: Path) -> dict[str, LintFinding]:
    return {finding.kind: finding for finding in planned(path).findings}


@pytest.mark.usefixtures("known_peaks")
def test_the_saving_of_another_order_is_what_its_plan_saves(tmp_path: Path, model: Path) -> None:
    user = "Ticket: {{ text }}\nProduct: {{ product }}\n\n" + INSTRUCTIONS
    rows = tickets(24)
    path = ticket_job(tmp_path / "as it is", model, user, rows)
    found = findings(path)
    assert set(found) == {"text_behind_fields", "field_order"}
    before, sofar = tokens_to_run(path), user
    for kind in ("text_behind_fields", "field_order"):
        finding = found[kind]
        assert sorted(finding.template.split()) == sorted(sofar.split()), "the same words"
        after = tokens_to_run(ticket_job(tmp_path / kind, model, finding.template, rows))
        assert finding.saved_tokens == pytest.approx(before - after, rel=0.05)
        assert finding.share == pytest.approx((before - after) / before, rel=0.05)
        assert finding.saved_s > 0
        before = after
    assert found["text_behind_fields"].template.startswith("Say in one")
    assert "lines 4-5 of prompt.user" in found["text_behind_fields"].text
    assert found["field_order"].template.index("product") < found["field_order"].template.index("text }}")
    assert "{{ product }}, {{ text }}" in found["field_order"].text
    assert findings(ticket_job(tmp_path / "best", model, found["field_order"].template, rows)) == {}


@pytest.mark.usefixtures("known_peaks")
def test_rows_that_differ_only_in_space_and_case_are_counted(tmp_path: Path, model: Path) -> None:
    rows = [{"id": f"t{i}", "text": f"{' '.join(WORDS[i % 7 :])} {i}"} for i in range(30)]
    texts = [row["text"].upper() if i % 2 else f"  {row['text']} " for i, row in enumerate(rows[:10])]
    careless = [{"id": f"c{i}", "text": text} for i, text in enumerate(texts)]
    path = ticket_job(tmp_path / "careless", model, "Greet {{ text }}", rows + careless)
    finding = findings(path)["near_duplicates"]
    assert finding.rows == 10
    assert finding.template is None
    careful = [{**row, "text": rows[i]["text"]} for i, row in enumerate(careless)]
    before = tokens_to_run(path)
    after = tokens_to_run(ticket_job(tmp_path / "careful", model, "Greet {{ text }}", rows + careful))
    assert finding.saved_tokens == pytest.approx(before - after, rel=0.05)
    assert findings(ticket_job(tmp_path / "again", model, "Greet {{ text }}", rows + rows)) == {}


def test_lint_looks_at_the_first_rows(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint, "MOST_ROWS", 20)
    path = ticket_job(tmp_path, model, "{{ text }}\n" + INSTRUCTIONS, tickets(40))
    part = findings(path)["text_behind_fields"]
    monkeypatch.undo()
    whole = findings(path)["text_behind_fields"]
    assert part.saved_tokens == pytest.approx(whole.saved_tokens, rel=0.05)


@pytest.mark.usefixtures("known_peaks")
def test_findings_are_in_text_and_json(tmp_path: Path, model: Path) -> None:
    found = planned(ticket_job(tmp_path, model, "{{ text }}\n" + INSTRUCTIONS, tickets(40)))
    (finding,) = found.findings
    (line,) = (line for line in text(found).splitlines() if line.strip().startswith("lint"))
    assert "if it were before the first field" in line
    assert f"{finding.saved_tokens:,} prompt tokens fewer" in line
    (told,) = json.loads(json.dumps(forecast_json(found, None)))["lint"]
    assert told["kind"] == "text_behind_fields"
    assert told["saved_tokens"] == finding.saved_tokens


def test_instructions_after_a_field_in_its_line_are_found(tmp_path: Path, model: Path) -> None:
    tail = "Say in one short sentence what the customer wants, and do not greet or apologise to anyone."
    path = ticket_job(tmp_path / "as it is", model, "Ticket: {{ text }}. " + tail, tickets(40))
    finding = findings(path)["text_behind_fields"]
    assert "in line 1 of prompt.user" in finding.text
    assert finding.template == tail + "\nTicket: {{ text }}."
    better = ticket_job(tmp_path / "better", model, finding.template, tickets(40))
    assert finding.saved_tokens == tokens_to_run(path) - tokens_to_run(better) > 0


def test_a_template_that_ends_with_a_question_keeps_it_there(tmp_path: Path, model: Path) -> None:
    user = "{{ text }}\n" + INSTRUCTIONS + "\nAnswer:"
    parts = findings(ticket_job(tmp_path, model, user, tickets(40)))
    template = parts["text_behind_fields"].template
    assert template == INSTRUCTIONS + "\n{{ text }}\nAnswer:"


@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), max_size=4), st.data())
def test_the_first_field_is_the_one_that_saves_most(fields: list[list[int]], data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(1, 9)) for _ in fields]
    order = field_order(fields, lengths)
    assert sorted(order) == list(range(len(fields)))
    if order:
        saved = [(5 - len(set(field))) * length for field, length in zip(fields, lengths, strict=True)]
        assert saved[order[0]] == max(saved)
