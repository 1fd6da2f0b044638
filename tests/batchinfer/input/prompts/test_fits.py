"""The cache of answer bounds of rows' constraints."""

from __future__ import annotations

import tracemalloc

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.fits import ConstraintMaxTokens
from batchinfer.input.prompts.prepare import CheckedConstraints
from tests.batchinfer.input.tokenizer.made_tokenizers import byte_level


def test_constraints_themselves_are_not_remembered() -> None:
    """A constraint may take a megabyte, and the cache has a thousand entries."""
    fits, checked = ConstraintMaxTokens(), CheckedConstraints(SamplingParams(), byte_level().to_str())
    checked.check(SamplingParams(regex="a"))
    tracemalloc.start()
    for number in range(12):
        params = SamplingParams(regex=f"{number}" + "x" * 20_000)
        assert fits.with_max_tokens(params).max_tokens == len(params.regex or "") + 1
        checked.check(params)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 100_000
