"""Constraints by llguidance, with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from batchinfer.data.prompts.constrained import grammar_constraints
from batchinfer.data.prompts.tokenizer import Tokenizer
from batchinfer.request import SamplingParams
from tests.checkpoints import make_tokenizer

EOS = 257


@pytest.mark.parametrize("beyond", [[], [260], [10**9]])
def test_what_ends_an_answer_may_lie_beyond_the_vocabulary(tmp_path: Path, beyond: list[int]) -> None:
    """As in checkpoints whose generation_config.json names tokens that the tokenizer lacks."""
    make_tokenizer(tmp_path)
    constraints = grammar_constraints(Tokenizer.load(tmp_path))([EOS, *beyond])
    bits = np.full((1, 10), -1, np.int32)
    constraints.fill([constraints.start(SamplingParams(regex="x*"))], bits)
    allowed = [token for token in range(320) if bits[0, token // 32] >> (token % 32) & 1]
    assert len(allowed) == 2
    assert EOS in allowed
