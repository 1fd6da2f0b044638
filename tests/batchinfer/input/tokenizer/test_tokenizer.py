"""Tokenizers of checkpoint folders, and special-token text that stays text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Rust

from batchinfer.core.errors import JobFileError, SecurityRefusal
from batchinfer.input.tokenizer import tokenizer as tokenizer_module
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.batchinfer.input.tokenizer.made_tokenizers import byte_level
from tests.batchinfer.store.index.ingest_kit import CHATML, byte_bpe, checkpoint
from tests.checkpoints import make_tokenizer

PIECES = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "a b", " ", "\n", "é漢🙂"]), max_size=8)


def test_loads_what_a_checkpoint_has(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    assert tokenizer.chat_template == CHATML
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.specials["<|im_end|>"] == 2
    ids = [1, *tokenizer.rust.encode("hello 🙂").ids, 2]
    assert tokenizer.decode(ids) == "hello 🙂"
    assert tokenizer.decode_batch([ids, np.array(ids, np.int32), []]) == ["hello 🙂", "hello 🙂", ""]
    assert max(ids) < tokenizer.vocab_size


@pytest.mark.parametrize(("file", "said"), [
    ("tokenizer_config.json", {"eos_token": "<end>"}),
    ("generation_config.json", {"eos_token_id": [7, 259]}),
    ("config.json", {"eos_token_id": 259}),
])  # fmt: skip
def test_an_end_token_that_is_not_special_is_removed_only_at_the_end(
    tmp_path: Path, file: str, said: dict[str, object]
) -> None:
    rust = byte_level(())
    rust.add_tokens([AddedToken("<end>", special=False, normalized=False)])
    end = rust.token_to_id("<end>")
    assert end == 259
    rust.save(str(tmp_path / "tokenizer.json"))
    no = rust.encode("no").ids
    assert Tokenizer.load(tmp_path).decode([*no, end]) == "no<end>"
    (tmp_path / file).write_text(json.dumps(said))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode_batch([[*no, end], [*no, end, *no], no, []]) == ["no", "no<end>no", "no", ""]


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    one = Tokenizer.load(checkpoint(tmp_path / "a")).fingerprint
    assert Tokenizer.load(checkpoint(tmp_path / "b")).fingerprint == one
    assert Tokenizer.load(checkpoint(tmp_path / "b", template="{{ 1 }}")).fingerprint != one


def test_the_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ 2 }}")
    assert Tokenizer.load(folder).chat_template == "{{ 2 }}"


@pytest.mark.parametrize("content", [None, "{}", "x"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(JobFileError, match=f"{tmp_path}.*\n.*tokenizer.json"):
        Tokenizer.load(tmp_path)


@given(PIECES)
def test_unmasked_segments_are_plain(tmp_path_factory: pytest.TempPathFactory, pieces: list[str]) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path_factory.getbasetemp() / "model"))
    text = "".join(pieces)
    assert tokenizer.segments().encode(text, {}) == tokenizer.rust.encode(text, add_special_tokens=False).ids


def test_a_masked_literal_is_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint(tmp_path))
    ids = tokenizer.segments().encode("<|im_start|>say \ue000 now<|im_end|>", {"\ue000": "<|im_end|>"})
    assert ids.count(2) == 1
    assert tokenizer.rust.decode(ids, skip_special_tokens=False) == "<|im_start|>say <|im_end|> now<|im_end|>"


def test_pieces_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    vocab = {token: n for n, token in enumerate(["<unk>", "</s>", "▁", "▁a", "a", "b", "<", "/", "s", ">"])}
    rust = Rust(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    rust.decoder = decoders.Metaspace()
    rust.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("a</s>a b", "</s>a", "a a</s> a</s>"):
        assert tokenizer.segments().encode(text, {}) == rust.encode(text).ids


def test_an_older_form_is_converted_without_torch_here(tmp_path: Path) -> None:
    rust = byte_bpe()
    model = json.loads(rust.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *(" ".join(m) for m in model["merges"])]) + "\n"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    own = {"AutoConfig": "own.X", "AutoTokenizer": ["own.X", None]}  # must not run
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "auto_map": own}))
    (tmp_path / "own.py").write_text("raise SystemExit('code of the checkpoint was run')")
    before = "torch" in sys.modules
    assert Tokenizer.load(tmp_path).rust.encode("hello 🙂").ids == rust.encode("hello 🙂").ids
    assert ("torch" in sys.modules) is before


def test_a_tokenizer_with_too_many_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The render process has three copies of a tokenizer and bounded memory."""
    monkeypatch.setattr(tokenizer_module, "MAX_TOKENS", 1_000)
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"] |= {f"!{number}": number for number in range(len(raw["model"]["vocab"]), 1001)}
    path.write_text(json.dumps(raw | {"added_tokens": []}))
    with pytest.raises(JobFileError, match=r"tokenizer.json has 1,001 tokens; at most 1,000"):
        Tokenizer.load(tmp_path)


def test_an_id_that_is_too_high_is_refused(tmp_path: Path) -> None:
    """Tables of tokens have an entry for each id up to the highest. This id would take gigabytes."""
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["far away"] = 2**32 - 1
    path.write_text(json.dumps(raw))
    with pytest.raises(JobFileError, match=r"token 'far away' the id 4,294,967,295; ids must be"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"]
)
def test_a_link_out_of_the_folder_is_refused_unread(tmp_path: Path, name: str) -> None:
    """The tokenizer is also read by a query of an unfinished run, which has no other check."""
    folder = tmp_path / "model"
    make_tokenizer(folder)
    path = folder / name
    path.unlink(missing_ok=True)
    (tmp_path / "elsewhere").write_text("{}")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecurityRefusal, match=rf"{name} leads to .*elsewhere, outside the checkpoint"):
        Tokenizer.load(folder)
