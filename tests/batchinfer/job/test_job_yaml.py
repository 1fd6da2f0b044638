"""YAML of job files: its values, and mistakes in any text."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.job.file import read_job_file
from batchinfer.job.variables import Variables
from batchinfer.job.yaml_tree import read_yaml, resolve
from tests.examples import examples

PLAIN = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=examples(25, 150),
)
VARIABLES = Variables("2026-01-02", {"A": "a", "EMPTY": "", "BRACES": "{{ x }}"})


def values(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "job.yaml").write_text(text)
    file = read_job_file(tmp_path / "job.yaml", [], VARIABLES)
    assert file.mistakes == ()
    return file.values


YAML_1_1 = "no yes on off y N 1_000 0b11 2026-01-01 12:30:00 0o8 1e + . nan tRUE << ="


@pytest.mark.parametrize("text", YAML_1_1.split())
def test_what_yaml_1_1_would_convert_is_text(text: str) -> None:
    assert resolve(text) == text


@pytest.mark.parametrize(("text", "value"), [
    ("true", True),
    ("FALSE", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("017", 17),
    ("-5", -5),
    ("0o17", 15),
    ("0xfF", 255),
    ("1e3", 1000.0),
    ("1.", 1.0),
    (".5", 0.5),
    ("-.inf", -math.inf),
    ("+.INF", math.inf),
])  # fmt: skip
def test_the_core_schema(text: str, value: object) -> None:
    assert (resolve(text), type(resolve(text))) == (value, type(value))
    assert math.isnan(float(str(resolve(".nan"))))


@given(
    st.integers()
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | st.text(st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_characters="\x7f\x85\xa0"))
)
@PLAIN
def test_json_is_yaml(value: object) -> None:
    if isinstance(value, float):
        value = float(f"{value:.3f}") if abs(value) < 1e12 and math.isfinite(value) else 0.5
    root, findings = read_yaml("x: " + json.dumps(value))
    assert findings == []
    assert root is not None
    assert isinstance(root.value, dict)
    read = root.value["x"].node.value
    assert read == value
    assert type(read) is type(value)


def test_quoted_values_stay_text_and_aliases_are_followed(tmp_path: Path) -> None:
    read = values(tmp_path, 'a: &x {p: "1", q: [1, two]}\nb: *x\nc: [*x]\n"3": \'no\'\n')
    same = {"p": "1", "q": (1, "two")}
    assert read == {"a": same, "b": same, "c": (same,), "3": "no"}


def test_escaped_surrogate_pairs_are_one_character(tmp_path: Path) -> None:
    assert values(tmp_path, json.dumps({"\U0001f600": "\U0001f601"})) == {"\U0001f600": "\U0001f601"}


def test_bom_and_crlf_are_fine(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: |\r\n  x\r\n  y\r\n")
    assert read_job_file(tmp_path / "job.yaml", [], VARIABLES).values == {"a": 1, "b": "x\ny\n"}


@pytest.mark.parametrize(("text", "value"), [
    ("${A}", "a"),
    ("x${A}y${A}", "xaya"),
    ("${NOPE:-}", ""),
    ("${NOPE:-d e-f:g}", "d e-f:g"),
    ("${EMPTY}", ""),
    ("${EMPTY:-full}", "full"),
    ("${A:-d}", "a"),
    ("${date}/x", "2026-01-02/x"),
    ("$$", "$"),
    ("$${A}", "${A}"),
    ("$$$${A}", "$${A}"),
    ("$5 and a $", "$5 and a $"),
    ("{{ A }} {% if x %}{# y #}", "{{ A }} {% if x %}{# y #}"),
    ("costs ${{ price }}${% if x %}${# y #}", "costs ${{ price }}${% if x %}${# y #}"),
    ("${BRACES}", "{{ x }}"),
])  # fmt: skip
def test_variables(text: str, value: str) -> None:
    assert VARIABLES.expand(text) == (value, [])


def test_what_a_variable_holds_is_not_expanded_again() -> None:
    assert Variables("d", {"X": "${Y}$$"}).expand("${X}") == ("${Y}$$", [])


@given(st.text())
def test_a_doubled_dollar_keeps_any_text(text: str) -> None:
    assert VARIABLES.expand(text.replace("$", "$$")) == (text, [])


def test_lines_are_those_of_an_editor() -> None:
    text = 'a: "\u2028\x85 x"\r\nb: |\n  \u2028\n\nc: !t 1\rd: [\n'
    _, findings = read_yaml(text)
    assert [one.line for one in findings] == [5, 7]


def test_variables_only_in_values_and_a_number_stays_text(tmp_path: Path) -> None:
    assert values(tmp_path, "${A}: 1\nb: ${date}\nc: '${NOPE:-5}'\n") == {
        "${A}": 1,
        "b": "2026-01-02",
        "c": "5",
    }


def refusal(folder: Path, data: bytes, overrides: list[tuple[str, str]]) -> JobFileError | None:
    (folder / "job.yaml").write_bytes(data)
    try:
        load_job(folder / "job.yaml", overrides, env={"A": "a"})
    except JobFileError as error:
        return error
    return None


def only_job_file_errors(folder: Path, data: bytes, overrides: list[tuple[str, str]]) -> None:
    error = refusal(folder, data, overrides)
    if error is not None:
        lines = len(re.findall(rb"\r\n?|\n", data)) + 1
        assert error.mistakes
        assert all(one.line is None or 1 <= one.line <= lines for one in error.mistakes)
        assert str(error).encode()


@given(st.binary(max_size=200))
@PLAIN
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    only_job_file_errors(tmp_path, data, [])


# Separated by spaces. BLANKS and ODD are items with white space or control characters.
MARKS = "[ ] { } | ' \" # & * ? - : , % @ ` \\ << !x !!str &a *a >- ${ {{ }} {% %} ${A} $$ name model: path"
SCALARS = "1 -1 1e999 .nan .inf true null ~ auto 0x --- ... é 😀"
BLANKS = ["\n", "\n  ", "\n user: ", "\nprompt:", "---\n", "- ", ": ", "? ", "  ", "\t", "\r", "9" * 500]
ODD = ["\x00", "\x85", "\u2028", "\ufeff"]
YAML_PIECES = st.sampled_from([*MARKS.split(" "), *SCALARS.split(" "), *BLANKS, *ODD])


@given(st.lists(YAML_PIECES, max_size=30).map("".join))
@PLAIN
def test_any_arrangement_of_yaml(tmp_path: Path, text: str) -> None:
    only_job_file_errors(tmp_path, text.encode(), [])


KEYS = "name model input prompt sampling output engine cache path sql user columns stop seed kv_memory"
NAMES = st.sampled_from(KEYS.split(" "))
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "4GiB", "openai", "{{ x }}", "{%", "${A}", "~", "/", "..", "*", "s3://b"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, ANYTHING, max_size=4) | ANYTHING, max_size=7))
@PLAIN
def test_any_values(tmp_path: Path, tree: dict[str, object]) -> None:
    only_job_file_errors(tmp_path, json.dumps(tree, ensure_ascii=True).encode(), [])


@given(
    st.lists(
        st.tuples(
            st.text(max_size=6) | st.sampled_from(["engine.threads", "model", "a.b.c", "prompt.user"]),
            st.text(max_size=12) | YAML_PIECES,
        ),
        max_size=4,
    )
)
@PLAIN
def test_any_overrides(tmp_path: Path, overrides: list[tuple[str, str]]) -> None:
    only_job_file_errors(tmp_path, b"name: a\nmodel: {path: m}\nengine:\n", overrides)
