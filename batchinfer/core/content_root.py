"""The content root of a request: everything except its token ids that determines the K and V of its tokens.

Two requests share the K and V of a prefix if they have the same root and begin with the same tokens. The planner, the
engine's prefix cache and the report treat roots as opaque bytes. Requests to encoders share nothing: their K and V also
depend on later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchinfer.core.request import Request, TokenIds, common_prefixes
from batchinfer.core.sampling import SamplingParams

USUAL = b""  # the root of requests whose K and V depend only on token ids
_ROTATED_LATER = b"rotated from a later row"


@dataclass(frozen=True, slots=True)
class ContentRoots:
    """The content roots of requests to one model."""

    max_model_len: int  # maximum tokens of prompt and answer
    # LongRoPE: requests that may exceed this length use rotary tables from row max_model_len on (long factors)
    long_rope_beyond: int | None = None
    adapted: bool = False  # True if some requests have an adapter

    def of(self, prompt_tokens: int, params: SamplingParams) -> bytes:
        """Return the root of a request."""
        rotated = _ROTATED_LATER if self.rope_offset(prompt_tokens, params) else USUAL
        return rotated if not params.adapter else rotated + f" adapter {params.adapter}".encode()

    def of_all(self, prompt_tokens: Sequence[int], params: Sequence[SamplingParams]) -> list[bytes]:
        """Return the root of each request."""
        return [USUAL] * len(params) if self.is_single else [*map(self.of, prompt_tokens, params)]

    @property
    def is_single(self) -> bool:
        """Return True if all requests have the root USUAL."""
        near = self.long_rope_beyond is None or self.max_model_len <= self.long_rope_beyond
        return near and not self.adapted

    def longest(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return the maximum tokens of prompt and answer together."""
        return min(self.max_model_len, prompt_tokens + params.max_tokens)

    def rope_offset(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return the row of the rotary tables for position 0 of a request.

        It depends on the maximum length of the request, not on its current length, and so never changes.
        """
        beyond = self.long_rope_beyond
        return 0 if beyond is None or self.longest(prompt_tokens, params) <= beyond else self.max_model_len


def shared_tokens(prompts: Sequence[TokenIds], roots: Sequence[bytes]) -> list[int]:
    """Return for each prompt except the last how many tokens it shares with the next one; 0 if their roots differ."""
    pairs = zip(common_prefixes(prompts), pairwise(roots), strict=True)
    return [common if root == other else 0 for common, (root, other) in pairs]


def shared_by(requests: Sequence[Request], roots: ContentRoots) -> list[int]:
    """Return for each request except the last how many prompt tokens it shares with the next one."""
    prompts = [request.prompt for request in requests]
    return shared_tokens(
        prompts, roots.of_all([*map(len, prompts)], [request.params for request in requests])
    )
