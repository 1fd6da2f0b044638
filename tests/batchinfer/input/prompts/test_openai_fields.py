"""Tests fields of OpenAI's and vLLM's requests that have no effect or another name here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.sampling_fields import override_openai
from batchinfer.input.rows import RowProblem

NOTHING: dict[str, Any] = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "safety_identifier": "x",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "tools": [], "tool_choice": "auto",
    "parallel_tool_calls": True, "functions": [], "function_call": "none", "modalities": ["text"],
    "verbosity": "medium", "skip_special_tokens": True, "spaces_between_special_tokens": False,
    "use_beam_search": False, "add_generation_prompt": True, "continue_final_message": False, "echo": False,
    "add_special_tokens": False, "include_reasoning": True, "request_id": "r", "priority": 3, "cache_salt": "s",
    "return_token_ids": False, "best_of": 1, "top_k": -1, "thinking_token_budget": -1, "guided_decoding_backend": "x",
}  # fmt: skip
SOMETHING: dict[str, Any] = {
    "tool_choice": "required", "function_call": {"name": "f"}, "modalities": ["text", "audio"], "verbosity": "low",
    "prediction": {}, "web_search_options": {}, "skip_special_tokens": False, "use_beam_search": True,
    "add_special_tokens": True, "continue_final_message": True, "truncate_prompt_tokens": 5,
    "echo": True, "guided_whitespace_pattern": " ", "repetition_detection": {"max_pattern_size": 5},
}  # fmt: skip


def test_fields_without_effect_are_accepted() -> None:
    params = SamplingParams()
    assert override_openai(params, {"messages": [], **NOTHING}, "messages") == params


@pytest.mark.parametrize("field", SOMETHING)
def test_what_would_change_the_answer_is_refused(field: str) -> None:
    with pytest.raises(RowProblem, match=f"body.{field}: this field, or its value, is not supported"):
        override_openai(SamplingParams(), {"messages": [], field: SOMETHING[field]}, "messages")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@pytest.mark.parametrize(("body", "params"), [
    ({"max_new_tokens": 9}, {"max_tokens": 9}),
    ({"max_completion_tokens": 9, "max_tokens": 9}, {"max_tokens": 9}),
    ({"include_stop_str_in_output": True, "stop": "x"}, {"include_stop": True, "stop": ("x",)}),
    ({"logit_bias": {"5": -100, "6": None, "7": 0.5}}, {"logit_bias": ((5, -100.0), (7, 0.5))}),
    ({"logit_bias": {}}, {}),
    ({"bad_words": ["x", "y z"]}, {"bad_words": ("x", "y z")}),
    ({"allowed_token_ids": [7, 5]}, {"allowed_token_ids": (7, 5)}),
    ({"thinking_token_budget": 7}, {"thinking_budget": 7}),
    ({"echo": True, "logprobs": False}, {}),
    ({"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
    ({"echo": True, "logprobs": 2, "prompt_logprobs": 0}, {"logprobs": 2, "prompt_logprobs": 0}),
    ({"guided_json": SCHEMA}, {"json_schema": TEXT}),
    ({"guided_json": TEXT}, {"json_schema": TEXT}),
    ({"guided_json_object": True}, {"json_object": True}),
    ({"guided_regex": "a+", "guided_choice": None}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": TEXT}),
    ({"structured_outputs": {"regex": "a+", "json": None, "whitespace_pattern": None}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a"], "disable_any_whitespace": False}}, {"choice": ("a",)}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
])  # fmt: skip
def test_fields_of_other_names_have_the_same_effect(body: dict[str, Any], params: dict[str, Any]) -> None:
    job = SamplingParams(regex="x")
    constrained = {"json_schema", "json_object", "regex", "choice", "grammar"} & params.keys()
    wanted = replace(job, **(({"regex": None} if constrained else {}) | params))
    assert override_openai(job, {"prompt": "", **body}, "prompt") == wanted


@pytest.mark.parametrize(("body", "code", "message"), [
    ({"max_tokens": 8, "max_new_tokens": 9}, "bad_parameter", "max_new_tokens: is given together with max_tokens"),
    ({"max_new_tokens": 0}, "bad_parameter", "max_new_tokens: must be a whole number from 1"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "bad_parameter", "guided_choice: .* with guided_regex"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "bad_parameter",
        "guided_regex: is given together with response_format",
    ),
    ({"structured_outputs": {"choice": []}}, "bad_parameter", "structured_outputs.choice: is an empty list"),
    ({"structured_outputs": "json"}, "bad_parameter", "structured_outputs: must be an object, not text"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "unknown_field", "body.structured_outputs.structural_tag"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "unknown_field", "disable_any_whitespace"),
    ({"extra_body": {"top_k": 5}}, "unknown_field", "body.extra_body: .* Python client"),
    ({"logit_bias": [5]}, "bad_parameter", "logit_bias: must be a mapping from token ids to numbers"),
    ({"logit_bias": {"x": 1}}, "bad_parameter", "logit_bias: has 'x' for a token id"),
    ({"logit_bias": {"-1": 1}}, "bad_parameter", "logit_bias: has '-1' for a token id"),
    ({"logit_bias": {"5": 101}}, "bad_parameter", "bias of token 5 must be a number from -100 to 100, not 101"),
    ({"logit_bias": {"5": True}}, "bad_parameter", "bias of token 5 must be a number .* not bool"),
    ({"logit_bias": {"5": 1, "05": 1}}, "bad_parameter", "logit_bias: names token 5 twice"),
    ({"logit_bias": {str(n): 1 for n in range(1025)}}, "bad_parameter", "has 1,025 tokens; the limit is 1,024"),
    ({"allowed_token_ids": []}, "bad_parameter", "allowed_token_ids: is an empty list"),
    ({"allowed_token_ids": [-1]}, "bad_parameter", "allowed_token_ids: must be a whole number from 0"),
    ({"allowed_token_ids": {}}, "bad_parameter", "allowed_token_ids: must be a list of token ids, not an object"),
    ({"allowed_token_ids": [5] * 4097}, "bad_parameter", "has 4,097 ids; give 1 to 4,096"),
    ({"bad_words": [""]}, "bad_parameter", "bad_words: each text has 1 to 512 characters"),
    ({"bad_words": [5]}, "bad_parameter", "bad_words: must be text or a list of texts"),
    ({"bad_words": ["x"] * 257}, "bad_parameter", "bad_words: has 257 texts; the limit is 256"),
    ({"best_of": 4}, "unknown_field", "body.best_of: must be 1"),
    ({"echo": 1}, "bad_parameter", "echo: must be true or false, not"),
    ({"top_k": -2}, "bad_parameter", "top_k: must be a whole number from 0"),
])  # fmt: skip
def test_problems_name_the_field_as_the_request_does(body: dict[str, Any], code: str, message: str) -> None:
    field = "prompt" if "echo" in body else "messages"
    with pytest.raises(RowProblem, match=message) as raised:
        override_openai(SamplingParams(), {field: [], **body}, field)
    assert raised.value.error.code == code
