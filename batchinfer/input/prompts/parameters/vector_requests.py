"""Embedding requests: their inputs and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchinfer.core.wording import counted
from batchinfer.input.openai import MAX_INPUTS
from batchinfer.input.prompts.parameters.request_fields import HARMLESS, unsupported
from batchinfer.input.rows import RowProblem, kind_of

ENCODINGS = ("float", "base64")  # formats of vectors in responses
_NO_PROMPT = "none"
# Unsupported fields of vLLM that are accepted with values that have no effect
_NOTHING: Mapping[str, tuple[object, ...]] = {"embed_dtype": ("float32",), "endianness": ("native", "little")}


@dataclass(frozen=True, slots=True)
class VectorRequests:
    """The options that the embedding requests of a job may choose from.

    Args:
        before: The text that is put before inputs if a request names no prompt.
        widest: The maximum number of dimensions.
        normalize: True if vectors are normalised. A request cannot change it.
        prompts: The checkpoint's prompts (texts to put before inputs) by name.
    """

    before: str
    widest: int
    normalize: bool
    prompts: Mapping[str, str] = field(default_factory=dict)


class EmbeddingRequest(NamedTuple):
    """The inputs and options of an embedding request. Each input gets a vector.

    Args:
        inputs: Texts, or lists of token ids.
        before: The text that is put before texts.
        add_special: True if the tokenizer adds its special tokens around texts.
        dimensions: The size of the vectors; 0 for the job's size.
    """

    inputs: Sequence[str | list[Any]]
    before: str
    add_special: bool
    dimensions: int


def parse_embedding_request(body: Mapping[str, Any], requests: VectorRequests) -> EmbeddingRequest:
    """Parse the body of an embedding request.

    Args:
        body: The body of the request.
        requests: The options that the request may choose from.

    Raises:
        RowProblem: A field is unsupported or has an invalid value.
    """
    for name, value in body.items():
        if value is not None and name not in HARMLESS and not _is_known(name, value, requests):
            raise unsupported(name)
    inputs = _inputs(body.get("input"))
    return EmbeddingRequest(
        inputs,
        _before(body, requests),
        body.get("add_special_tokens", True) is not False,
        _dimensions(body, requests),
    )


def _is_known(name: str, value: object, requests: VectorRequests) -> bool:
    check = _CHECKS.get(name)
    if check is not None:
        check(name, value)
    elif name in ("normalize", "use_activation"):
        return value is requests.normalize
    return (
        check is not None or name in ("input", "dimensions", "input_type") or value in _NOTHING.get(name, ())
    )


def _encoding(name: str, value: object) -> None:
    if value not in ENCODINGS:
        raise RowProblem("bad_parameter", f"{name} must be {' or '.join(ENCODINGS)}")


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RowProblem("bad_parameter", f"{name} must be true or false, not {kind_of(value)}")


_CHECKS: Mapping[str, Callable[[str, object], None]] = {
    "encoding_format": _encoding,
    "add_special_tokens": _boolean,
}


def _dimensions(body: Mapping[str, Any], requests: VectorRequests) -> int:
    asked = body.get("dimensions")
    if asked is None:
        return 0
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= requests.widest:
        text = (
            f"dimensions must be a whole number from 1 to {requests.widest}, the size of the model's vectors"
        )
        raise RowProblem("bad_parameter", text)
    return asked


def _before(body: Mapping[str, Any], requests: VectorRequests) -> str:
    name = body.get("input_type")
    if name is None:
        return requests.before
    if name == _NO_PROMPT:
        return ""
    if not isinstance(name, str) or name not in requests.prompts:
        known = ", ".join((*requests.prompts, _NO_PROMPT))
        raise RowProblem("bad_parameter", f"input_type must name one of the checkpoint's prompts: {known}")
    return requests.prompts[name]


def _inputs(value: object) -> Sequence[str | list[Any]]:
    if value is None:
        raise RowProblem("prompt_missing", "input is null or missing")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RowProblem(
            "prompt_type", f"input must be text or token ids, or a list of these, not {kind_of(value)}"
        )
    if not any(isinstance(one, str | list) for one in value):
        return [value]
    if len(value) > MAX_INPUTS:
        text = f"input holds {counted(len(value), 'text')}; a request may have {MAX_INPUTS:,}"
        raise RowProblem("n_over_limit", text)
    kind = type(value[0])
    for at, one in enumerate(value):
        if not isinstance(one, kind):
            text = f"input[{at}] is {kind_of(one)}: all must be texts, or all lists of token ids"
            raise RowProblem("prompt_type", text)
    return value
