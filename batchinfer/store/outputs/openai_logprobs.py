"""Log-probabilities in the formats of OpenAI's API, which differ for chat and text completions."""

from __future__ import annotations

from typing import Any

from batchinfer.store.outputs.kind import TokenBytes

UNLIKELY = -9999.0  # the API's value for a probability of 0; JSON has no infinity
# A value of the result's column: token_id, token, logprob and, for a chosen token, top
Token = dict[str, Any]


def chat_logprobs(tokens: list[Token] | None, texts: TokenBytes) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a chat completion, or None without log-probabilities.

    Args:
        tokens: The values of the result column `logprobs`: token_id, token, logprob and top. Special tokens
            are left out.
        texts: Converts token ids to bytes.
    """
    if tokens is None:
        return None
    content = [
        _of_chat(token, texts) | {"top_logprobs": [_of_chat(likely, texts) for likely in token["top"]]}
        for token in tokens
        if token["token_id"] not in texts.specials
    ]
    return {"content": content, "refusal": None}


def _of_chat(token: Token, texts: TokenBytes) -> dict[str, Any]:
    return {
        "token": token["token"],
        "logprob": _finite(token["logprob"]),
        "bytes": list(texts.bytes_of(token["token_id"])),
    }


def text_logprobs(tokens: list[Token] | None, texts: TokenBytes) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a text completion, or None without log-probabilities.

    The chosen token is always among the top ones. The first token of a prompt has no log-probability.

    Args:
        tokens: The values of the result column `logprobs`: token_id, token, logprob and top. Special tokens
            are left out.
        texts: Converts token ids to bytes.
    """
    if tokens is None:
        return None
    shown = [token for token in tokens if token["token_id"] not in texts.specials]
    offsets = [0]
    for token in shown:
        offsets.append(offsets[-1] + len(token["token"]))
    return {
        "text_offset": offsets[:-1],
        "token_logprobs": [None if (own := token["logprob"]) is None else _finite(own) for token in shown],
        "tokens": [token["token"] for token in shown],
        "top_logprobs": [None if token["logprob"] is None else _likeliest(token) for token in shown],
    }


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return a result row whose column `logprobs` begins with the log-probabilities of the prompt.

    If the prompt or the answer has no log-probabilities, the row is returned unchanged.
    """
    if row.get("logprobs") is None or row.get("prompt_logprobs") is None:
        return row
    return row | {"logprobs": [*row["prompt_logprobs"], *row["logprobs"]], "prompt_logprobs": None}


def prompt_logprobs(tokens: list[Token]) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` of a response, in the format of vLLM's server.

    It has an element per prompt token: a dict from token ids to log-probabilities, of the token itself and
    then of the top tokens at its position. It is None for the first token of the prompt.

    Args:
        tokens: The values of the result column `prompt_logprobs`.
    """
    found: list[dict[str, Any] | None] = [None]
    for token in tokens[1:]:
        ranks = {likely["token_id"]: rank for rank, likely in enumerate(token["top"], 1)}
        each = {one["token_id"]: one for one in (token, *token["top"])}
        found.append({str(number): _of_vllm(one, ranks.get(number)) for number, one in each.items()})
    return found


def _of_vllm(token: Token, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(token["logprob"]), "rank": rank, "decoded_token": token["token"]}


def _likeliest(token: Token) -> dict[str, float]:
    # If two tokens have the same text, the more likely one is used
    found: dict[str, float] = {}
    for likely in [*token["top"], token]:
        found.setdefault(likely["token"], _finite(likely["logprob"]))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, UNLIKELY)
