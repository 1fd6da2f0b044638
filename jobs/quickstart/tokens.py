"""The tokenizer: a small byte-level BPE in which copying is easy.

A word must always become the same tokens, or copying would also mean re-spelling. So spaces are separate tokens, every
digit and every mark is one token, and the fixed parts of the answer are split off before the words are.
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
    """Train a tokenizer on texts. All 256 bytes are in the vocabulary, so it can encode every text.

    Args:
        texts: The texts.
        size: The number of tokens.
    """
    tokenizer = Tokenizer(BPE())
    splitters = [
        Split(_CUTS, "isolated"),
        Digits(individual_digits=True),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = Sequence(splitters)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which contains the chat template, into a folder."""
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
    """Return the id of a token. Raises ValueError if the tokenizer does not have the token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


def letter_pieces(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens that consist of lower-case letters.

    Names are also built from these tokens, so that each token is often copied.
    """
    return sorted(
        piece for piece in tokenizer.get_vocab() if piece.isascii() and piece.isalpha() and piece.islower()
    )
