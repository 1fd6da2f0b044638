"""Agreement of answers with expected ones, and its confidence intervals, compared with plain counting."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from datetime import date
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.store.accuracy.expected import mark_expected
from batchinfer.store.accuracy.grades import Grade, text_grade, value_grade
from batchinfer.store.accuracy.labels import MOST_LABELS
from batchinfer.store.accuracy.mcnemar import MOST_EXACT, mcnemar
from batchinfer.store.accuracy.measure import Accuracy, ConfusionCell, Tally, measure_accuracy
from batchinfer.store.accuracy.normalise import normalise
from batchinfer.store.accuracy.reliability import BINS, Reliability
from batchinfer.store.columns.answer_check import parse_answer
from tests.examples import examples


@pytest.mark.parametrize(("one", "other"), [
    ("Yes", " yes.\n"),
    ('**"Paris."**', "paris"),
    ("ｙｅｓ", "YES"),
    ("STRASSE", "Straße"),
    ("(B)", "b"),
    ("new\u00a0york", "New  York!"),
    ("„Ja“", "ja"),
    ("ﬁne", "FINE"),
])  # fmt: skip
def test_spelling_does_not_count(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    "texts", [("C", "C++", "C#"), ("5", "-5", "5%", ".5"), ("A", "The", ""), ("?", "!"), ("10", "1.0", "1,0")]
)
def test_values_with_different_meanings_stay_different(texts: tuple[str, ...]) -> None:
    assert len({normalise(text) for text in texts}) == len(texts)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text('aB."()*_“” ẞﬁİͅ', max_size=12)
)
@settings(max_examples=examples(300, 20_000), deadline=None)
def test_a_normalised_text_is_normalised(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)
    if normalise(text):
        assert normalise(f' "{text}" . ') == normalise(text)


@pytest.mark.parametrize(("expected", "answer", "grade"), [
    (3, "3", Grade.EXACT),
    (3.0, "3", Grade.EXACT),
    (3, "3.0", Grade.NORMALISED),
    (0.1, "1e-1", Grade.NORMALISED),
    (3, "three", Grade.WRONG),
    (3, "nan", Grade.WRONG),
    (True, "true", Grade.EXACT),
    (True, "True.", Grade.NORMALISED),
    ("3", "3.0", Grade.WRONG),
])  # fmt: skip
def test_numbers_as_texts(expected: Any, answer: str, grade: Grade) -> None:
    assert text_grade(expected, answer) is grade


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON, JSON)
@settings(max_examples=examples(200, 20_000), deadline=None)
def test_a_json_value_is_what_it_says(one: Any, other: Any) -> None:
    assert value_grade(one, parse_answer(json.dumps(one))) is Grade.EXACT
    assert value_grade({"a": one, "b": None}, {"a": one}) is Grade.EXACT
    if _bare(one) != _bare(other):
        assert value_grade(one, other) is not Grade.EXACT
    assert value_grade(True, 1) is value_grade(1, True) is value_grade("1", 1) is Grade.WRONG


def _bare(value: Any) -> Any:
    """Return a value without null fields, and with booleans replaced: True would equal 1."""
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return ("bool", value) if isinstance(value, bool) else value


def result(folder: str, rows: list[dict[str, Any]], kind: pa.DataType, typed: bool) -> list[Path]:
    """Write rows into two files of a result. The column `label` is marked as typed if `typed`."""
    fields = [
        ("row_id", pa.int64()),
        ("status", pa.string()),
        ("generated_text", pa.string()),
        ("label", kind),
    ]
    table = pa.Table.from_pylist(rows, mark_expected(pa.schema(fields), "label", typed))
    half, files = len(rows) // 2, [Path(folder, "a.parquet"), Path(folder, "b.parquet")]
    for file, part in zip(files, (table.slice(0, half), table.slice(half)), strict=True):
        pq.write_table(part, file)
    return files


def row(at: int, label: Any, answer: str | None) -> dict[str, Any]:
    return {
        "row_id": at,
        "status": "error" if answer is None else "ok",
        "generated_text": answer,
        "label": label,
    }


def accuracy_of(
    rows: Sequence[tuple[Any, str | None]], kind: pa.DataType | None = None, typed: bool = True
) -> Accuracy:
    """Measure rows of an expected value and an answer each."""
    with TemporaryDirectory() as folder:
        made = [row(at, *one) for at, one in enumerate(rows)]
        found = measure_accuracy(result(folder, made, kind or pa.string(), typed))
    assert found is not None
    return found


SPELLED = ["yes", "Yes", "no", "no.", "maybe"]


@given(
    st.lists(
        st.tuples(
            st.none() | st.sampled_from(SPELLED), st.none() | st.sampled_from([*SPELLED, "I do not know"])
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([pa.string(), pa.dictionary(pa.int32(), pa.string())]),
)
@settings(max_examples=examples(20, 2_000), deadline=None)
def test_texts_are_counted(drawn: list[tuple[str | None, str | None]], kind: pa.DataType) -> None:
    found = accuracy_of(drawn, kind, typed=False)
    labelled = [(label, answer) for label, answer in drawn if label is not None]
    exact = sum(label == answer for label, answer in labelled)
    near = sum(answer is not None and normalise(label) == normalise(answer) for label, answer in labelled)
    assert found.overall == Tally(len(labelled), sum(one is None for _, one in labelled), exact, near)
    assert (found.unlabelled, found.fields) == (len(drawn) - len(labelled), {})
    first: dict[str, str] = {}
    for label, _ in labelled:
        first.setdefault(normalise(label), label)
    pairs = Counter(
        (first[normalise(label)], "error", None)
        if answer is None
        else (
            first[normalise(label)],
            "label" if normalise(answer) in first else "other",
            first.get(normalise(answer)),
        )
        for label, answer in labelled
    )
    few = len(labelled) >= 2 * len(first)
    assert {(one.expected, one.outcome, one.answer): one.rows for one in found.confusion} == (
        pairs if few else {}
    )


def test_objects_are_counted_by_field() -> None:
    found = accuracy_of(
        [
            ('{"a": "x", "n": 1}', '{"n": 1.0, "a": "x"}'),
            ('{"a": "X.", "n": 2}', '{"a": "x", "n": 2}'),
            ('{"a": "x"}', '{"a": "y", "n": 5}'),
            ('{"a": null}', '{"n": 5}'),
            ('{"a": "x", "n": 3}', None),
            (None, '{"a": "x"}'),
            ('{"a": ', '{"a": "x"}'),
            ("x", '{"a": "x"}'),
            ("{}", '{"a": "x"}'),
        ]
    )
    assert found.overall == Tally(5, 1, 2, 3)
    assert found.fields == {"a": Tally(5, 1, 2, 3), "n": Tally(3, 1, 2, 2)}
    assert (found.unlabelled, found.unreadable, found.first_unreadable) == (2, 2, 6)
    assert found.notice is not None
    assert "row_id 6" in found.notice


def test_fields_of_a_struct_that_are_null_are_not_measured() -> None:
    kind = pa.struct([("a", pa.string()), ("d", pa.date32()), ("l", pa.list_(pa.int64()))])
    day = {"a": None, "d": date(2026, 3, 14), "l": [1, 2]}
    found = accuracy_of(
        [(day, '{"a": "x", "d": "2026-03-14", "l": [1, 2]}'), (dict.fromkeys("adl"), "{}")], kind
    )
    assert (found.overall, found.unlabelled) == (Tally(1, 0, 1, 1), 1)
    assert found.fields.keys() == {"d", "l"}


def test_labels_of_whole_answers_that_are_json() -> None:
    found = accuracy_of([("open", '"open"'), ("open", '"paid"'), ("[1]", "[1]"), ("[1", "[1]")])
    assert (found.overall, found.unreadable, found.confusion) == (Tally(3, 0, 2, 2), 1, ())


def test_confused_labels_are_few_and_most_frequent_first() -> None:
    rows = [(f"l{at % MOST_LABELS}", "l0") for at in range(2 * MOST_LABELS)]
    few = accuracy_of([*rows, ("l7", "l7")], typed=False)
    assert len(few.confusion) == MOST_LABELS + 1
    assert few.confusion[0] == ConfusionCell(None, "l7", "label", "l0", 2)
    many = accuracy_of([*rows, *2 * [("more", "l0")]], typed=False)
    assert many.confusion == ()
    assert many.overall.rows == 2 * MOST_LABELS + 2


def test_a_result_without_the_column_has_no_accuracy(tmp_path: Path) -> None:
    pq.write_table(pa.table({"row_id": [1]}), tmp_path / "a.parquet")
    assert measure_accuracy([tmp_path / "a.parquet"]) is None


@given(st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=examples(100, 5_000), deadline=None)
def test_mcnemars_test_is_the_binomial_one(b: int, c: int) -> None:
    tail = Fraction(2 * sum(math.comb(b + c, k) for k in range(min(b, c) + 1)), 2 ** (b + c))
    assert mcnemar(b, c) == pytest.approx(float(min(Fraction(1), tail)), rel=1e-9)
    assert mcnemar(b, c) == mcnemar(c, b)


def test_mcnemars_test_of_many_rows() -> None:
    """Known values of R (mcnemar.test, binom.test), and no jump between the exact and the asymptotic form."""
    assert mcnemar(2, 10) == pytest.approx(0.03857421875)
    assert mcnemar(33, 61) == pytest.approx(0.00507, abs=5e-5)
    below, above = MOST_EXACT // 2 - 400, MOST_EXACT // 2 + 400
    assert mcnemar(below, above) == pytest.approx(mcnemar(below + 1, above + 1), abs=1e-4)
    assert mcnemar(10**7, 10**7 + 10**5) < 1e-100
    with pytest.raises(ValueError, match="not negative"):
        mcnemar(-1, 2)


ANSWERS = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=examples(100, 2000), deadline=None)
@given(answers=ANSWERS)
def test_reliability_is_that_of_all_answers_at_once(answers: list[tuple[float, bool]]) -> None:
    """Compared with NumPy over all probabilities at once."""
    found = Reliability()
    for one in answers:
        found.add(*one)
    p, right = (np.array(values, np.float64) for values in zip(*answers, strict=True))
    which = np.minimum((p * BINS).astype(int), BINS - 1)
    error = 0.0
    for at in range(BINS):
        here = which == at
        assert (found.bins[at].rows, found.bins[at].right) == (here.sum(), right[here].sum())
        if here.any():
            error += here.sum() / len(p) * abs(p[here].mean() - right[here].mean())
    assert found.rows == len(answers)
    assert found.expected_error == pytest.approx(error, abs=1e-9)
    assert found.brier_score == pytest.approx(((p - right) ** 2).mean(), abs=1e-9)
    assert found.mean_probability == pytest.approx(p.mean(), abs=1e-9)


def test_no_answers_have_no_reliability() -> None:
    found = Reliability()
    means = (found.mean_probability, found.expected_error, found.brier_score)
    assert (found.rows, *means) == (0, None, None, None)
