"""OpenAI batch files: a request per line, with custom_id, method, url and body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.rows import RowProblem, Values, kind_of

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
VECTOR_URL = "/v1/embeddings"
MAX_INPUTS = 2048  # inputs per embedding request, from OpenAI's API reference
DOCUMENTS, EFFORT, KWARGS = "documents", "reasoning_effort", "chat_template_kwargs"
TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
ECHO = "echo"  # if true, the text of a completion starts with its prompt
# Fields of a chat request that are passed to the chat template
TEMPLATE_FIELDS = frozenset({DOCUMENTS, EFFORT, KWARGS, TOOLS})
CALL_FIELDS = frozenset({CHOICE, PARALLEL})  # fields that limit the tool calls of the answer
_KEYS = {"custom_id", "method", "url", "body"}
TEXT_MAX_TOKENS = 16  # default of max_tokens for /v1/completions, from OpenAI's API reference


def looks_like_openai(row: Values) -> bool:
    """Return True if a row looks like a line of an OpenAI batch file: custom_id, method, url, and an object as body."""
    return set(row) >= _KEYS and isinstance(row["body"], dict)


def openai_defaults(url: str, given: Mapping[str, Any], max_model_len: int) -> SamplingParams:
    """Return the sampling parameters of an OpenAI batch request whose body sets none.

    Parameters that the job file does not set have the defaults of OpenAI's API, such as temperature 1. By default, a
    chat answer may fill the model's context, and a text completion has at most 16 tokens.

    Args:
        url: The endpoint of the request, such as "/v1/chat/completions".
        given: The sampling parameters that the job file sets.
        max_model_len: The model's maximum number of tokens per sequence.
    """
    most = max_model_len if url == CHAT_URL else TEXT_MAX_TOKENS
    return SamplingParams(**{"temperature": 1.0, "max_tokens": most, **given})


def openai_request(row: Values, urls: Collection[str], no_vectors: str = "") -> tuple[str, Values]:
    """Check that a row is a valid line of an OpenAI batch file, and return its url and its body.

    The body is not checked.

    Args:
        row: The row: an object with custom_id, method, url and body.
        urls: The supported endpoints.
        no_vectors: Why the model cannot return embeddings, for the error message; "" if it can.

    Raises:
        RowProblem: A field is missing, unknown or has a wrong value; the message names the field.
    """
    missing = sorted(_KEYS - set(row))
    if missing:
        raise RowProblem("bad_request", f"the request has no {', '.join(missing)}")
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise RowProblem("unknown_field", f"a batch request has no field {unknown[0][:100]!r}")
    if row["method"] != "POST":
        raise RowProblem("bad_request", "method must be POST")
    if row["url"] not in urls:
        why = f"; vectors are not made here: {no_vectors}" if row["url"] == VECTOR_URL and no_vectors else ""
        raise RowProblem("bad_request", f"url must be {' or '.join(urls)}{why}")
    if not isinstance(row["body"], dict):
        raise RowProblem("bad_request", f"body must be an object, not {kind_of(row['body'])}")
    return row["url"], row["body"]
