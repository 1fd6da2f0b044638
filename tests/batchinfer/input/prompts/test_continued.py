"""A continuation has the same tokens as within the whole text, by each way to compute them."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.builder import Draft
from batchinfer.input.prompts.prepared.continued import ContinuedPrompts
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import make_model_folder
from tests.examples import examples

WORDS = ["the ", "then", " ", "a", "an", " answer", "Answer:", "s", "\n", "ing", " in", "é"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map("".join)
CORPUS = [
    "the answer, then an answering",
    "Answer: the thing in the inn\n",
    " answers and things",
    "an ant in a tin",
] * 9


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with merges that appends its EOS to a text, in two variants as in checkpoints."""
    folder: Path = tmp_path_factory.mktemp("continued") / "model"
    make_model_folder(folder, "llama")
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    if request.param == "byte_level":
        rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        rust.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        rust.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
        rust.decoder = tokenizers.decoders.Metaspace()
        alphabet = [*"\nthe aniswrA:gdé,</>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return Tokenizer.load(folder)


def encode(tokenizer: Tokenizer, draft: Draft) -> list[int]:
    if draft.masks:
        return tokenizer.segments().encode(draft.text or "", draft.masks, draft.add_special)
    ids: list[int] = tokenizer.rust.encode(draft.text, add_special_tokens=draft.add_special).ids
    return ids


def brute(tokenizer: Tokenizer, draft: Draft, each: list[str]) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens and lengths by encoding the whole texts."""

    def whole(text: str) -> list[int]:
        ids = encode(tokenizer, draft._replace(text=text))
        return ids[:-1] if draft.add_special else ids

    alone, found = whole(draft.text or ""), [whole(f"{draft.text}{one}") for one in each]
    alike = takewhile(lambda at: len(set(at)) == 1, zip(alone, *found, strict=False))
    shared = sum(1 for _ in alike)
    rest = [one[shared:] for one in found]
    return [*alone[:shared], *(token for one in rest for token in one)], tuple(map(len, rest))


@settings(max_examples=examples(60, 1000), deadline=None, print_blob=True)
@given(
    prompts=st.lists(TEXTS, min_size=1, max_size=4),
    labels=st.lists(TEXTS, min_size=1, max_size=4),
    special=st.booleans(),
    of_job=st.booleans(),
)
def test_tokens_equal_those_of_whole_texts(
    tokenizer: Tokenizer, prompts: list[str], labels: list[str], special: bool, of_job: bool
) -> None:
    """Only the end of a prompt is encoded with each label, once per distinct end."""
    continued = ContinuedPrompts(tokenizer, tokenizer.segments(), labels if of_job else ())
    encoded = partial(encode, tokenizer)
    for text in prompts:
        each = labels if of_job else labels[:1]
        draft = Draft(SamplingParams.scores(), text, add_special=special, continuations=tuple(each))
        beside = [*map(encoded, continued.to_encode(draft))]
        assert sum(len(one) for one in beside) < 500
        try:
            ids, params = continued.join(draft, encoded(draft), beside, encoded)
        except RowProblem:
            wanted, lengths = brute(tokenizer, draft, each)
            assert min(lengths) == 0 or sum(lengths) == len(wanted), "nothing is scored, or behind nothing"
            continue
        assert ([*ids], params.scored) == brute(tokenizer, draft, each)


def test_special_tokens_of_a_row_are_text(tokenizer: Tokenizer) -> None:
    continued = ContinuedPrompts(tokenizer, tokenizer.segments(), ())
    draft = Draft(SamplingParams.scores(), "an answer", continuations=("</s> in",))
    (beside,) = continued.to_encode(draft)
    ids, params = continued.join(draft, encode(tokenizer, draft), [encode(tokenizer, beside)], lambda _: [])
    assert 1 not in ids[-params.scored[0] :]
    assert "</s> in" in tokenizer.rust.decode([*ids], skip_special_tokens=False)
