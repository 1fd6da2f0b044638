"""The content root of a request: what besides its token ids the K and V of its tokens depend on.

Two requests share K and V where they begin with the same tokens and have the same root. The plan's order, the engine's
prefix cache and the report's tree start from the root and do not look into it: a new reason for which K and V differ
(the images of a prompt) is named here alone. Requests to encoders share nothing, whatever their roots: K
and V depend on what comes later, and the types of tokens (`SamplingParams.second_segment`) need no root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchinfer.core.request import Request, TokenIds, common_prefixes
from batchinfer.core.sampling import SamplingParams

USUAL = b""  # the root of requests of which nothing but the token ids counts
_ROTATED_LATER = b"rotated from a later row"


@dataclass(frozen=True, slots=True)
class ContentRoots:
    """The content roots of requests to one model."""

    max_model_len: int  # tokens of prompt and answer, for which there are positions
    # A request that may become longer is rotated from position max_model_len on (LongRoPE's long factors)
    long_rope_beyond: int | None = None
    adapted: bool = False  # whether there are requests with an adapter

    def of(self, prompt_tokens: int, params: SamplingParams) -> bytes:
        """Return the root of a request."""
        rotated = _ROTATED_LATER if self.rope_offset(prompt_tokens, params) else USUAL
        return rotated if not params.adapter else rotated + f" adapter {params.adapter}".encode()

    def of_all(self, prompt_tokens: Sequence[int], params: Sequence[SamplingParams]) -> list[bytes]:
        """Return the root of each request."""
        return [USUAL] * len(params) if self.is_single else [*map(self.of, prompt_tokens, params)]

    @property
    def is_single(self) -> bool:
        """Whether all requests have the usual root."""
        near = self.long_rope_beyond is None or self.max_model_len <= self.long_rope_beyond
        return near and not self.adapted

    def longest(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens prompt and answer may have together."""
        return min(self.max_model_len, prompt_tokens + params.max_tokens)

    def rope_offset(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return the row of the rotary tables at which a request's positions begin. It depends on how long the request
        may become, not on how long it is: so its answer does not depend on others."""
        beyond = self.long_rope_beyond
        return 0 if beyond is None or self.longest(prompt_tokens, params) <= beyond else self.max_model_len


def shared_tokens(prompts: Sequence[TokenIds], roots: Sequence[bytes]) -> list[int]:
    """Return for each prompt but the last how many tokens it shares with the next one: none across roots."""
    pairs = zip(common_prefixes(prompts), pairwise(roots), strict=True)
    return [common if root == other else 0 for common, (root, other) in pairs]


def shared_by(requests: Sequence[Request], roots: ContentRoots) -> list[int]:
    """Return for each request but the last how many prompt tokens it shares with the next one."""
    prompts = [request.prompt for request in requests]
    return shared_tokens(
        prompts, roots.of_all([*map(len, prompts)], [request.params for request in requests])
    )
