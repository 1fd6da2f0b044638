"""Answers as the store has them become two texts, and a count of tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.reasoning import CLOSED, OPEN, UNSAID, Reasoning
from batchinfer.data.outputs.reasoning_columns import SplitAnswer, StoredAnswer, told_apart
from batchinfer.data.tokenizer.reasoning_styles import find_reasoning
from batchinfer.data.tokenizer.tokenizer import Tokenizer
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


def split(name: str, text: str, opening: int = UNSAID, limit: int | None = None) -> SplitAnswer:
    tokenizer, reasoning = family(name)
    (found,) = told_apart([StoredAnswer(ids_of(name, text), limit, opening)], reasoning, tokenizer)
    return found


THINK = "<think>\nA\nhm\n</think>\n\n"
TWO_MESSAGES = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>so"
    "<|end|><|start|>assistant<|channel|>final<|message|>Two<|return|>"
)
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "text", "opening", "told"),
    [
        ("qwen3", THINK + " Two<|im_end|>", UNSAID, (" Two", "A\nhm", 6)),
        ("qwen3", "Two <think>x</think>", UNSAID, ("Two <think>x</think>", None, 0)),
        ("qwen3", "<think>x</think> \nTwo", UNSAID, ("Two", "x", 1)),
        ("qwen3", "<think>hm, <|im_end|>", UNSAID, (None, "hm,", 5)),
        ("qwen3", "Two</think>", CLOSED, ("Two</think>", None, 0)),
        ("deepseek-r1", "hm\n</think>\n\nTwo", OPEN, ("Two", "hm", 3)),
        ("deepseek-r1", "</think>", OPEN, ("", "", 0)),
        ("deepseek-r1", "hm", OPEN, (None, "hm", 2)),
        ("gpt-oss", HARMONY + "Two<|return|>", UNSAID, ("Two", "hm", 2)),
        ("gpt-oss", TWO_MESSAGES, UNSAID, ("Two", "hm\nso", 4 + len("assistantcommentary") + 4)),
        ("gpt-oss", "<|channel|>final<|message|>Two", UNSAID, ("Two", None, 0)),
        ("gpt-oss", HARMONY[: -len("<|message|>")], UNSAID, (None, "hm", 2)),
        ("magistral", "[THINK]hm[/THINK]Two", UNSAID, ("Two", "hm", 2)),
        ("granite", "Here is my thought process: hm\n\nHere is my response: Two", UNSAID, ("Two", "hm", 5)),
        ("granite", "Here is my thought process: hm", UNSAID, (None, "hm", 3)),
        ("granite", "Two", UNSAID, ("Two", None, 0)),
        ("nemotron", "hm</think>Two", OPEN, ("Two", "hm", 2)),
    ],
)
def test_each_family_is_read(
    name: str, text: str, opening: int, told: tuple[str | None, str | None, int]
) -> None:
    assert split(name, text, opening) == told


texts = st.text(st.sampled_from("ab é\n漢<🙂"), max_size=12)


@given(
    st.lists(
        st.tuples(texts, texts, st.sampled_from(["qwen3", "gpt-oss", "magistral", "granite"])), min_size=1
    )
)
def test_any_texts_are_told_apart(pairs: list[tuple[str, str, str]]) -> None:
    """Whatever stands in a batch, the markers are where the two texts meet, and tokens are counted between them."""
    for name in {name for *_, name in pairs}:
        tokenizer, reasoning = family(name)
        ours = [(inside, behind) for inside, behind, other in pairs if other == name]
        answers = [
            StoredAnswer(ids_of(name, reasoning.begin + a + reasoning.end + reasoning.gap + b), None, UNSAID)
            for a, b in ours
        ]
        told = told_apart(answers, reasoning, tokenizer)
        for (inside, behind), one in zip(ours, told, strict=True):
            assert one.reasoning == inside.strip()
            assert one.text == (behind if reasoning.tokens else behind.lstrip())
            assert one.tokens == len(ids_of(name, inside))


@given(texts, texts, st.data())
def test_a_stop_string_cuts_either_part(inside: str, behind: str, data: st.DataObject) -> None:
    """The store counts characters of the whole answer, with the markers that its tokenizer calls text."""
    whole = f"<think>{inside}</think>{behind}"
    limit = data.draw(st.integers(len("<think>"), len(whole)))
    found = split("qwen3", whole, limit=limit)
    end, answer = len("<think>") + len(inside), len(whole) - len(behind)
    assert found.reasoning == whole[len("<think>") : min(limit, end)].strip()
    cut = whole[answer : max(limit, answer)]
    assert found.text == (None if limit < end else cut[2:] if cut.startswith("\n\n") else cut.lstrip())


def test_a_special_marker_has_no_characters(tmp_path: Path) -> None:
    assert split("magistral", "[THINK]hm[/THINK]Two", limit=1) == (None, "h", 2)
    assert split("magistral", "[THINK]hm[/THINK]Two", limit=4) == ("Tw", "hm", 2)
