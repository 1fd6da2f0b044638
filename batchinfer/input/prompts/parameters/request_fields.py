"""Translates the fields of OpenAI's and vLLM's requests to sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchinfer.core.sampling import OTHER_NAMES
from batchinfer.input.openai import ECHO
from batchinfer.input.rows import RowProblem, kind_of

# Fields that do not affect answers
HARMLESS = frozenset(
    (
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
        # vLLM's settings for logs, scheduling, caching and the library for constraints
        *("request_id", "priority", "cache_salt", "guided_decoding_backend"),
    )
)
# Unsupported fields that are accepted with values that have no effect
_NOTHING: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "best_of": (1,),
    # vLLM's fields
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # special tokens are skipped
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
_NOTHING_IN_CHATS = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    ECHO: (False,),
}
_NOTHING_IN_TEXTS = {"add_special_tokens": (True,)}
# vLLM's numbers for "no limit", with the value that has the same meaning here
_NO_LIMIT = {"top_k": (-1, 0), "thinking_token_budget": (-1, None)}
STRUCTURED = "structured_outputs"
_STRUCTURES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_NO_STRUCTURE = {"disable_any_whitespace": (False,), "disable_additional_properties": (False,)}


@dataclass(slots=True)
class RequestParameters:
    """The sampling parameters that the fields of an OpenAI request set, collected field by field.

    Attributes:
        values: The values by name of the parameter.
        fields: The name of the field that set each parameter, for messages.
    """

    values: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: Any, called: str) -> None:
        """Set a sampling parameter. Raises RowProblem if another field of the request has set it to a different value.

        Args:
            name: The name of the parameter.
            value: The value of the field; not None.
            called: The name of the field.
        """
        number, meant = _NO_LIMIT.get(called, (None, None))
        value = meant if number is not None and value == number else value
        if self.values.setdefault(name, value) != value:
            raise RowProblem(
                "bad_parameter",
                f"{called}: is given together with {self.fields[name]}, which has another value; remove one",
            )
        self.fields.setdefault(name, called)

    def put_structure(self, given: object) -> None:
        """Set the constraint that vLLM's field `structured_outputs` of a request asks for.

        Args:
            given: The value of the field.

        Raises:
            RowProblem: The value is invalid or not supported.
        """
        if not isinstance(given, Mapping):
            raise RowProblem("bad_parameter", f"{STRUCTURED}: must be an object, not {kind_of(given)}")
        for key, value in given.items():
            called = f"{STRUCTURED}.{key[:100]}"
            if key in _STRUCTURES and value is not None:
                self.put(_STRUCTURES[key], value, called)
            elif value is not None and value not in _NO_STRUCTURE.get(key, ()):
                raise unsupported(called)


def parameter_of(called: str) -> str:
    """Return the name of the sampling parameter that a field of a request sets.

    Args:
        called: The name of the field. For example, "max_completion_tokens" sets max_tokens.
    """
    return OTHER_NAMES.get(called, called)


def has_no_effect(called: str, value: object, chat: bool) -> bool:
    """Return True if an unsupported field of a request can be ignored, because its value has no effect.

    Args:
        called: The name of the field.
        value: Its value.
        chat: True for a chat request, False for a text completion.
    """
    own = (_NOTHING_IN_CHATS if chat else _NOTHING_IN_TEXTS).get(called, ())
    return value in (*own, *_NOTHING.get(called, ()))


def unsupported(called: str) -> RowProblem:
    """Return the RowProblem to raise for an unsupported field of a request. `called` is the name of the field."""
    if called == "best_of":
        text = "must be 1, as a line has one response; sampling.best_of is for jobs with a prompt section"
    elif called == "extra_body":
        text = (
            "is an argument of OpenAI's Python client, which sends what is in it as fields of the body: write "
            "them there"
        )
    else:
        text = "this field, or its value, is not supported"
    return RowProblem("unknown_field", f"body.{called[:100]}: {text}")
