"""OpenAI batch files: one request a line, with custom_id, method, url and body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.rows import RowProblem, Values, kind_of

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"
VECTOR_URL = "/v1/embeddings"
MAX_INPUTS = 2048  # of a request for vectors, in OpenAI's API reference
DOCUMENTS, EFFORT, KWARGS = "documents", "reasoning_effort", "chat_template_kwargs"
TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
ECHO = "echo"  # whether the text of a text completion begins with its prompt
# Of a chat's body: what its chat template is told
TEMPLATE_FIELDS = frozenset({DOCUMENTS, EFFORT, KWARGS, TOOLS})
CALL_FIELDS = frozenset({CHOICE, PARALLEL})  # which calls its answer may make
_KEYS = {"custom_id", "method", "url", "body"}
TEXT_MAX_TOKENS = 16  # of /v1/completions, in OpenAI's API reference


def looks_like_openai(row: Values) -> bool:
    """Whether a row has the four keys of a batch request."""
    return set(row) >= _KEYS and isinstance(row["body"], dict)


def openai_defaults(url: str, given: Mapping[str, Any], max_model_len: int) -> SamplingParams:
    """Parameters of a request that says nothing: what the job file says (`given`), the rest as OpenAI's API does.

    Its reference gives temperature 1, top_p 1, penalties 0 and no stop. A chat's answer has no limit but the model's
    context, a text completion's has 16 tokens.
    """
    most = max_model_len if url == CHAT_URL else TEXT_MAX_TOKENS
    return SamplingParams(**{"temperature": 1.0, "max_tokens": most, **given})


def openai_request(row: Values, urls: Collection[str], no_vectors: str = "") -> tuple[str, Values]:
    """(url, body) of a batch request for one of these. `no_vectors`: why the model makes none, where it makes texts
    alone. Raises RowProblem naming the field that is wrong."""
    missing = sorted(_KEYS - set(row))
    if missing:
        raise RowProblem("bad_request", f"the request lacks {', '.join(missing)}")
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
