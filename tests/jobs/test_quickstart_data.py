"""Tests the quickstart's table and model: held-out words, names and sentences never occur in training.

It checks the filter of made-up words and a large sample of the training stream. Held-out rows get right
answers.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.examples import examples

QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart"
SAMPLE = 20_000
MIB = 1024 * 1024


def module(name: str) -> Any:
    """Import a module of jobs/quickstart, a folder of scripts that is no package."""
    if str(QUICKSTART) not in sys.path:
        sys.path.insert(0, str(QUICKSTART))
    return importlib.import_module(name)


def training_stream() -> Any:
    """Return the stream that `train.py` reads, with its seed, vocabulary pieces and filter."""
    train, tokens = module("train"), module("tokens")
    tokenizer = train.Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json"))
    return train.training_stream(tokens.letter_pieces(tokenizer))


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return (QUICKSTART / "data" / "orders.jsonl").read_bytes().splitlines()


@pytest.fixture(scope="module")
def clean() -> list[Any]:
    return list(module("accuracy").clean_rows())


def normal_form(sentence: str) -> str:
    """Return a sentence without case, punctuation and slot contents, to compare sentences."""
    slots_closed = re.sub(r"\{\w+\}", " SLOT ", sentence)
    return " ".join(word if word == "SLOT" else word.lower() for word in re.findall(r"\w+", slots_closed))


@pytest.mark.slow
def test_nothing_that_is_held_out_is_met_in_training(clean: list[Any]) -> None:
    words_of, held_out = module("sentences").words_of, module("held_out")
    forbidden, templates = held_out.forbidden_words(), {*map(normal_form, held_out.TEMPLATES)}
    assert len(forbidden) > 400
    assert len(templates) == len(held_out.TEMPLATES)
    orders, texts = [json.loads(row.expected) for row in clean], {row.text for row in clean}
    customers, items = ({order[name].casefold() for order in orders} for name in ("customer", "item"))
    for example in islice(training_stream(), SAMPLE):
        assert example.text not in texts
        assert forbidden.isdisjoint(words_of(example.text)), example.text
        assert example.order.customer.casefold() not in customers
        assert example.order.item.casefold() not in items
        assert normal_form(example.skeleton) not in templates, example.skeleton


def test_the_fixed_words_of_training_hold_no_held_out_word() -> None:
    """The grammar is finite: this is a proof, not a sample."""
    grammar, words_of = module("grammar"), module("sentences").words_of
    texts = [text for choices in grammar.GRAMMAR.values() for text in choices]
    texts += [text for choices in grammar.FORM_KEYS.values() for text in choices]
    texts += [*grammar.PARTICLES, *grammar.SUFFIXES]
    fixed = " ".join(re.sub(r"<\w+>|\{\w+\}", " ", text) for text in texts)
    assert module("held_out").forbidden_words().isdisjoint(words_of(fixed))


def test_every_made_up_word_passes_the_filter() -> None:
    """With nearly all short words forbidden, the generator still never produces one."""
    sentences = module("sentences")
    pieces = ["ab", "cd", "ef"]
    forbidden = frozenset(a + b for a in pieces for b in pieces) | {"large", "box"}
    words = sentences.Words(sentences.Random(1), forbidden, pieces)
    made = [draw() for draw in (words.word, words.name, words.item) for _ in range(3000)]
    assert all(forbidden.isdisjoint(sentences.words_of(text)) for text in made)


def test_the_table_equals_the_output_of_the_script(tmp_path: Path, lines: list[bytes]) -> None:
    written = tmp_path / "orders.jsonl"
    module("make_data").write(written)
    assert written.read_bytes().splitlines() == lines
    assert written.stat().st_size < MIB


def test_the_table_holds_clean_and_repeated_rows(clean: list[Any]) -> None:
    texts = {row.text for row in clean}
    assert len(texts) >= 2000
    assert 0.08 <= 1 - len(texts) / len(clean) <= 0.12
    for row in clean:
        order = json.loads(row.expected)
        assert list(order) == ["customer", "quantity", "item", "due"]
        assert order["customer"] in row.text
        assert order["item"] in row.text


def test_ids_are_unique_and_each_broken_row_has_its_own_fault(lines: list[bytes], clean: list[Any]) -> None:
    broken = [line for line in lines if b"order-" not in line]
    names = {match.group() for line in broken if (match := re.search(rb"bad-[\w-]+", line))}
    assert len(broken) == len(lines) - len(clean) == len(names) == 12
    ids = [match.group() for line in lines if (match := re.search(rb"order-\d{5}", line))]
    assert len(ids) == len(set(ids))


def test_the_model_folder_is_small_and_holds_no_pickle() -> None:
    files = [path for path in (QUICKSTART / "model").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4 * MIB
    assert {path.suffix for path in files} == {".json", ".safetensors"}


def test_the_template_renders_what_training_saw(clean: list[Any]) -> None:
    """The chat template and train.py give equal tokens, with one BOS."""
    train, tokens = module("train"), module("tokens")
    tokenizer = module("transformers").AutoTokenizer.from_pretrained(QUICKSTART / "model")
    system, text = train.instruction(), clean[0].text
    chat = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    raw = train.Tokenizer.from_file(str(QUICKSTART / "model" / "tokenizer.json"))
    assert rendered == raw.encode(f"{train.prefix_text(system)}{text}{tokens.END}{tokens.ASSISTANT}").ids
    assert rendered.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    "text", ["Ordnung muß sein", "日本語 😀", "tab\tand\nnewline", '{"a": [1, 2]}  two  spaces']
)
def test_no_text_is_out_of_the_tokenizers_reach(text: str) -> None:
    tokenizer = module("transformers").AutoTokenizer.from_pretrained(QUICKSTART / "model")
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_model_answers_held_out_rows(clean: list[Any], dtype: str) -> None:
    """Fewer rows in bfloat16, as many CPUs have no bfloat16 products."""
    rows = examples(20, 60) if dtype == "float32" else 20
    sample = clean[:: len(clean) // rows][:rows]
    found = module("accuracy").answers([row.text for row in sample], dtype=dtype)
    right = sum(answer == row.expected for answer, row in zip(found, sample, strict=True))
    assert right >= 0.95 * rows, f"{right} of {len(sample)} answers are exact"
