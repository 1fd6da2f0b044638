"""Fields of OpenAI's requests that change nothing here."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.data.input.rows import RowProblem
from batchinfer.data.prompts.sampling_fields import override_openai

NOTHING: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "x",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "functions": [], "function_call": "none", "modalities": ["text"],
    "verbosity": "medium",
}  # fmt: skip
SOMETHING: dict[str, Any] = {
    "tool_choice": "required", "function_call": {"name": "f"}, "modalities": ["text", "audio"], "verbosity": "low",
    "prediction": {}, "web_search_options": {},
}  # fmt: skip


def test_what_changes_nothing_is_accepted() -> None:
    params = SamplingParams()
    assert override_openai(params, {"messages": [], **NOTHING}, "messages") == params


@pytest.mark.parametrize("field", SOMETHING)
def test_what_would_change_the_answer_is_refused(field: str) -> None:
    with pytest.raises(RowProblem, match=f"body.{field}: this field, or its value, is not supported"):
        override_openai(SamplingParams(), {"messages": [], field: SOMETHING[field]}, "messages")
