"""Stored answers become two texts and a number of reasoning tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.reasoning import CLOSED, NO_MARKER, OPEN, Reasoning
from batchinfer.input.tokenizer.reasoning_styles import find_reasoning
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.store.index.index import OPENING
from batchinfer.store.outputs.answer_texts import AnswerReader
from batchinfer.store.outputs.frame import Frame
from batchinfer.store.outputs.reasoning_columns import SplitAnswer, StoredAnswer, split_reasoning
from tests.checkpoints import kept_folder
from tests.reasoning_models import make_reasoning_tokenizer


@cache
def family(name: str) -> tuple[Tokenizer, Reasoning]:
    folder = kept_folder()
    make_reasoning_tokenizer(folder, name)
    tokenizer = Tokenizer.load(folder)
    found = find_reasoning("auto", tokenizer)
    assert found is not None
    return tokenizer, found


def ids_of(name: str, text: str) -> list[int]:
    return list(family(name)[0].rust.encode(text, add_special_tokens=False).ids)


def split(name: str, text: str, opening: int = NO_MARKER, limit: int | None = None) -> SplitAnswer:
    tokenizer, reasoning = family(name)
    (found,) = split_reasoning([StoredAnswer(ids_of(name, text), limit, opening)], reasoning, tokenizer)
    return found


THINK = "<think>\nA\nhm\n</think>\n\n"
TWO_MESSAGES = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>so"
    "<|end|><|start|>assistant<|channel|>final<|message|>Two<|return|>"
)
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(("name", "text", "opening", "told"), [
    ("qwen3", THINK + " Two<|im_end|>", NO_MARKER, (" Two", "A\nhm", 6)),
    ("qwen3", "Two <think>x</think>", NO_MARKER, ("Two <think>x</think>", None, 0)),
    ("qwen3", "<think>x</think> \nTwo", NO_MARKER, ("Two", "x", 1)),
    ("qwen3", "<think>hm, <|im_end|>", NO_MARKER, (None, "hm,", 5)),
    ("qwen3", "Two</think>", CLOSED, ("Two</think>", None, 0)),
    ("deepseek-r1", "hm\n</think>\n\nTwo", OPEN, ("Two", "hm", 3)),
    ("deepseek-r1", "</think>", OPEN, ("", None, 0)),
    ("deepseek-r1", "", OPEN, (None, None, 0)),
    ("qwen3", "<think></think>\n\nTwo", NO_MARKER, ("Two", None, 0)),
    ("qwen3", "<think>\n\n</think>\n\nTwo", NO_MARKER, ("Two", None, 2)),
    ("gpt-oss", HARMONY.replace("hm", "") + "Two", NO_MARKER, ("Two", None, 0)),
    ("granite", "Here is my thought process: Here is my response: Two", NO_MARKER, ("Two", None, 1)),
    ("deepseek-r1", "hm", OPEN, (None, "hm", 2)),
    ("gpt-oss", HARMONY + "Two<|return|>", NO_MARKER, ("Two", "hm", 2)),
    ("gpt-oss", TWO_MESSAGES, NO_MARKER, ("Two", "hm\nso", 4 + len("assistantcommentary") + 4)),
    ("gpt-oss", "<|channel|>final<|message|>Two", NO_MARKER, ("Two", None, 0)),
    ("gpt-oss", HARMONY[: -len("<|message|>")], NO_MARKER, (None, "hm", 2)),
    ("magistral", "[THINK]hm[/THINK]Two", NO_MARKER, ("Two", "hm", 2)),
    ("granite", "Here is my thought process: hm\n\nHere is my response: Two", NO_MARKER, ("Two", "hm", 5)),
    ("granite", "Here is my thought process: hm", NO_MARKER, (None, "hm", 3)),
    ("granite", "Two", NO_MARKER, ("Two", None, 0)),
    ("nemotron", "hm</think>Two", OPEN, ("Two", "hm", 2)),
])  # fmt: skip
def test_each_family_is_read(
    name: str, text: str, opening: int, told: tuple[str | None, str | None, int]
) -> None:
    assert split(name, text, opening) == told


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1", "gpt-oss"])
def test_the_token_that_ends_an_answer_is_no_reasoning(name: str) -> None:
    """It counts if it is sampled and the answer continues."""
    tokenizer, reasoning = family(name)
    opening = OPEN if name == "deepseek-r1" else NO_MARKER
    begin = "" if opening == OPEN else reasoning.begin
    eos = ids_of(
        name, {"qwen3": "<|im_end|>", "deepseek-r1": "<｜end▁of▁sentence｜>", "gpt-oss": "<|return|>"}[name]
    )
    inside, whole = ids_of(name, begin + "hm"), ids_of(name, begin + "hm" + reasoning.end)
    ids = [(inside + eos, True), (inside + eos, False), (inside, False), (whole + eos, True)]
    answers = [StoredAnswer(one, None, opening, ended) for one, ended in ids]
    found = split_reasoning(answers, reasoning, tokenizer)
    assert {one.reasoning for one in found} == {"hm"}
    assert [one.tokens for one in found] == [2, 2 + len(eos), 2, 2]


def test_a_result_does_not_count_the_token_that_ended_an_answer() -> None:
    """A stop string ends an answer within its text, and `length` after any token."""
    tokenizer, reasoning = family("qwen3")
    ids = ids_of("qwen3", "<think>hm<|im_end|>")
    ends = [("stop", None), ("stop", 9), ("length", None)]
    rows = pa.table({OPENING.name: [NO_MARKER] * 3, "error_code": pa.nulls(3, pa.string())})
    matched = pa.table(
        {
            "row_id": [0, 1, 2],
            "token_ids": pa.array([ids] * 3, pa.list_(pa.int32())),
            "text_length": pa.array([limit for _, limit in ends], pa.int32()),
            "finish_reason": [reason for reason, _ in ends],
            "error_code": pa.nulls(3, pa.string()),
        }
    )
    told = np.ones(3, np.bool_)
    found = AnswerReader(reasoning, None, tokenizer).texts(rows, matched, Frame(rows, matched), told)
    assert found.reasoning[1].to_pylist() == [2, 3, 3]


texts = st.text(st.sampled_from("ab é\n漢<🙂"), max_size=12)


@given(
    st.lists(
        st.tuples(texts, texts, st.sampled_from(["qwen3", "gpt-oss", "magistral", "granite"])), min_size=1
    )
)
def test_reasoning_and_text_are_separated_in_any_texts(pairs: list[tuple[str, str, str]]) -> None:
    """In any batch, markers separate the two texts, and the tokens between them are counted."""
    for name in {name for *_, name in pairs}:
        tokenizer, reasoning = family(name)
        ours = [(inside, behind) for inside, behind, other in pairs if other == name]
        answers = [
            StoredAnswer(
                ids_of(name, reasoning.begin + a + reasoning.end + reasoning.gap + b), None, NO_MARKER
            )
            for a, b in ours
        ]
        told = split_reasoning(answers, reasoning, tokenizer)
        for (inside, behind), one in zip(ours, told, strict=True):
            assert one.reasoning == (inside.strip() or None)
            assert one.text == (behind if reasoning.tokens else behind.lstrip())
            assert one.tokens == len(ids_of(name, inside))


@given(texts, texts, st.data())
def test_a_stop_string_truncates_either_part(inside: str, behind: str, data: st.DataObject) -> None:
    """The store counts characters of the whole answer, including markers that are text."""
    whole = f"<think>{inside}</think>{behind}"
    limit = data.draw(st.integers(len("<think>"), len(whole)))
    found = split("qwen3", whole, limit=limit)
    end, answer = len("<think>") + len(inside), len(whole) - len(behind)
    assert found.reasoning == (whole[len("<think>") : min(limit, end)].strip() or None)
    shown = whole[answer : max(limit, answer)]
    assert found.text == (None if limit < end else shown[2:] if shown.startswith("\n\n") else shown.lstrip())


def test_a_special_marker_has_no_characters(tmp_path: Path) -> None:
    assert split("magistral", "[THINK]hm[/THINK]Two", limit=1) == (None, "h", 2)
    assert split("magistral", "[THINK]hm[/THINK]Two", limit=4) == ("Tw", "hm", 2)
