"""Pairs of texts are joined and truncated as the tokenizer itself does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from batchinfer.core.sampling import SamplingParams, Truncate
from batchinfer.core.scoring import PairScoring
from batchinfer.input.prompts.builder import Draft
from batchinfer.input.prompts.prepared.paired import PairedTexts
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.pair_template import NoPairs, PairTemplate
from tests.examples import examples

ENDS = [("[CLS]", 256), ("[SEP]", 257)]
PROCESSORS: dict[str, Any] = {
    "bert": processors.BertProcessing(("[SEP]", 257), ("[CLS]", 256)),
    "roberta": processors.RobertaProcessing(("[SEP]", 257), ("[CLS]", 256)),
    "template": processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP]:1 $B:1 [SEP]:1", special_tokens=ENDS
    ),
    "between": processors.TemplateProcessing("$A", "$A [SEP] $B", special_tokens=ENDS),
    "nothing": None,
}
WRONG = {
    "$B:0 [SEP] $A:0": "does not encode a pair as the first text followed by the second",
    "$A [SEP] $B [SEP] $B": "does not encode a pair as the first text followed by the second",
    "$A:1 [SEP]:1 $B:0": "token types [1, 1, 0]",
    "$A [SEP] $B:2": "token types [0, 0, 2]",
}


@cache
def rust_of(name: str) -> Any:
    return made(PROCESSORS[name])


def made(processor: Any) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.add_special_tokens(["[CLS]", "[SEP]"])
    if processor is not None:
        rust.post_processor = processor
    return rust


def paired(rust: Any, query: str, document: str, longest: int, truncate: Truncate) -> tuple[list[int], int]:
    texts = PairedTexts(PairTemplate.of(rust), PairScoring("cls", "sigmoid", True), longest, truncate)
    draft = Draft(SamplingParams.logits("cls"), query, continuations=(document,))
    each = [
        rust.encode(str(one.text), add_special_tokens=False).ids for one in (draft, *texts.to_encode(draft))
    ]
    ids, params = texts.join(draft, each[0], each[1:], lambda one: [])
    assert params == SamplingParams.logits("cls", params.second_segment)
    return [*ids], params.second_segment


@given(
    name=st.sampled_from([*PROCESSORS]),
    lengths=st.tuples(st.integers(0, 14), st.integers(0, 14)),
    longest=st.integers(6, 30),
    truncate=st.sampled_from(["left", "right", "error"]),
)
@settings(max_examples=examples(200, 5000), deadline=None)
def test_pairs_are_those_of_the_tokenizer(
    name: str, lengths: tuple[int, int], longest: int, truncate: Truncate
) -> None:
    rust, query, document = rust_of(name), "abcdefghijklmn"[: lengths[0]], "opqrstuvwxyzAB"[: lengths[1]]
    rust.no_truncation()
    found = paired(rust, query, document, longest, truncate)
    if truncate != "error":
        rust.enable_truncation(longest, strategy="longest_first", direction=truncate)
    wanted = rust.encode(query, document)
    second = wanted.type_ids.index(1) if 1 in wanted.type_ids else 0
    assert found == (wanted.ids, second)


@pytest.mark.parametrize(("template", "message"), WRONG.items())
def test_other_templates_are_refused(template: str, message: str) -> None:
    processor = processors.TemplateProcessing("$A", template, special_tokens=ENDS)
    with pytest.raises(NoPairs) as caught:
        PairTemplate.of(made(processor))
    assert message in str(caught.value)


def test_a_pair_that_cannot_fit_the_limit_is_refused() -> None:
    with pytest.raises(RowProblem) as caught:
        paired(rust_of("bert"), "ab", "cd", 4, "right")
    assert caught.value.error.code == "prompt_too_long"
