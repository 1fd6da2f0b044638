"""In bfloat16 on the CPU, rows that share to the token get the logits of rows that share whole blocks or nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.batchinfer.engine.small_engine import Place
from tests.batchinfer.engine.teacher_forced import Forced, Row, Way, load
from tests.checkpoints import kept_folder, make_checkpoint

ANSWER = 5
# Of the largest logit. K and V are stored in eight bits of mantissa; those that are copied may have been computed in
# another step than those that are not, with sums in another order.
TOLERANCE = 8 * torch.finfo(torch.bfloat16).eps


@cache
def model() -> Path:
    folder = kept_folder()
    make_checkpoint(folder, "llama", seed=5)
    return folder


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(250) for _ in range(count)]


@cache
def rows() -> tuple[Row, ...]:
    """A tree whose levels end inside blocks of any size; two prompts are equal, one is the beginning of others."""
    rng = random.Random(11)
    trunk = tokens(rng, 37)
    documents = [trunk + tokens(rng, count) for count in (3, 29, 41)]
    prompts = [text + tokens(rng, rng.randint(1, 13)) for text in documents for _ in range(3)]
    prompts += [prompts[0], documents[1]]
    return tuple(Row(prompt, tokens(rng, ANSWER)) for prompt in prompts)


def logits(block_size: int, least: int | None) -> dict[Place, Tensor]:
    loaded = load(model(), "bfloat16", deterministic=False, block_size=block_size, blocks=200)
    forced = Forced(replace(loaded, limits=replace(loaded.limits, least_copied=least)), rows(), Way(64))
    found = forced.run()
    copied = sum(step.copied_tokens for step in forced.steps)
    assert (copied > 0) == (least is not None)
    return found


@pytest.mark.parametrize("block_size", [5, 16, 32])
def test_each_token_is_within_tolerance_of_the_likeliest(block_size: int) -> None:
    wanted, found = (logits(block_size, least) for least in (None, 1))
    assert wanted.keys() == found.keys()
    for place, row in wanted.items():
        likeliest = found[place][row.argmax()]
        assert found[place].max() - likeliest <= TOLERANCE * row.abs().max()
