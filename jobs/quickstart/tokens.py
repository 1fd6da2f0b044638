"""The tokenizer: a small byte-level BPE, shaped so that copying is easy.

A word must become the same tokens wherever it stands, or copying would also mean re-spelling. So
spaces are tokens of their own, every digit is one token, every mark is one token, and the fixed
parts of the answer are cut out whole before the words are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from tokenizers.trainers import BpeTrainer

PAD, BOS, END, SYSTEM, USER, ASSISTANT = "<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BOS, END, SYSTEM, USER, ASSISTANT]
CONTEXT = 512
_CUTS = Regex(r'\{"customer": "|", "quantity": |, "item": "|", "due": "|"\}|\s|\p{L}+|[^\s\p{L}]')
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Learn the merges; all 256 bytes are in the vocabulary, so no text is out of reach."""
    tokenizer = Tokenizer(BPE())
    cuts = [
        Split(_CUTS, "isolated"),
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = Sequence(cuts)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (which carries the chat template)."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


def letter_pieces(tokenizer: Tokenizer) -> list[str]:
    """Vocabulary entries made of lower-case letters: names are also built from these, so each is copied often."""
    return sorted(
        piece for piece in tokenizer.get_vocab() if piece.isascii() and piece.isalpha() and piece.islower()
    )
