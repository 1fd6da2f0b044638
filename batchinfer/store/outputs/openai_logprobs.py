"""Log-probabilities in the shape of OpenAI's API: those of a chat and those of a text completion differ."""

from __future__ import annotations

from typing import Any

from batchinfer.store.outputs.kind import TokenBytes

UNLIKELY = -9999.0  # what the API writes for a token without any probability; JSON has no infinity
Token = dict[str, Any]  # as the result's column has it: token_id, token, logprob and, of a chosen one, top


def chat_logprobs(tokens: list[Token] | None, texts: TokenBytes) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat completion. Tokens that the text leaves out are left out here, too."""
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
    """`choices[].logprobs` of a text completion. The chosen token is always among the likeliest ones; nothing is known
    of the first token of a prompt."""
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
    """Return a row whose text begins with its prompt, and whose log-probabilities therefore do."""
    if row.get("logprobs") is None or row.get("prompt_logprobs") is None:
        return row
    return row | {"logprobs": [*row["prompt_logprobs"], *row["logprobs"]], "prompt_logprobs": None}


def prompt_logprobs(tokens: list[Token]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` of a response as vLLM's server writes it: of each token of the prompt a mapping from ids to
    what is known of them, of its own first; null for the first token. Only the likeliest have a rank."""
    found: list[dict[str, Any] | None] = [None]
    for token in tokens[1:]:
        ranks = {likely["token_id"]: rank for rank, likely in enumerate(token["top"], 1)}
        each = {one["token_id"]: one for one in (token, *token["top"])}
        found.append({str(number): _of_vllm(one, ranks.get(number)) for number, one in each.items()})
    return found


def _of_vllm(token: Token, rank: int | None) -> dict[str, Any]:
    return {"logprob": _finite(token["logprob"]), "rank": rank, "decoded_token": token["token"]}


def _likeliest(token: Token) -> dict[str, float]:
    """Return the probabilities by text; of two tokens with the same text the likelier one counts."""
    found: dict[str, float] = {}
    for likely in [*token["top"], token]:
        found.setdefault(likely["token"], _finite(likely["logprob"]))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, UNLIKELY)
