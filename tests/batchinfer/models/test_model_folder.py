"""The model folders that other tests run whole pipelines on."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from tests.checkpoints import BOS, EOS, FAMILIES, IM_START, VOCAB, make_model_folder


@pytest.mark.parametrize("family", FAMILIES)
def test_model_folder(tmp_path: Path, family: str) -> None:
    make_model_folder(tmp_path, family)
    spec = inspect_checkpoint(tmp_path).spec
    assert (spec.family, spec.vocab) == (family, VOCAB)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((EOS,), BOS)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_tokenizer_of_bytes(tmp_path: Path) -> None:
    make_model_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "héllo \n\t🙂 <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) - len("<|im_end|>") + 1
    assert ids[-1] == EOS
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat)["input_ids"][0] == IM_START
