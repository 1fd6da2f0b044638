"""Creates a tokenizer for model shapes, which have none."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = 256  # the token after the 256 bytes
_LETTERS = "etaoinshrdlucmfwypvbgk"  # the most common letters in English


def made_up_tokenizer(vocab: int) -> str:
    """Return the JSON definition of an artificial byte-level BPE tokenizer, the same on every machine.

    The tokens are the 256 bytes, one special token, and random words of 2 … 9 letters, half of them after a space.

    Args:
        vocab: The number of tokens.
    """
    r, tokens = random.Random(7), {letter: at for at, letter in enumerate(_bytes())}
    tokens["<|end|>"] = END
    while len(tokens) < vocab:
        word = "".join(r.choice(_LETTERS) for _ in range(r.randint(2, 9)))
        tokens.setdefault(f"Ġ{word}" if r.random() < 0.5 else word, len(tokens))
    made = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return str(made.to_str())


def _bytes() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
