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
    """Computes the content roots of requests to one model.

    A content root identifies the request's rotary angles and adapter: all that determines K and V, besides tokens.
    Requests with equal roots have equal K and V for a common prefix of their tokens, and may share cached blocks.

    Args:
        max_model_len: The maximum number of tokens of prompt and answer.
        long_rope_beyond: The number of tokens beyond which a request uses LongRoPE's angles for long sequences. None:
            the model has no LongRoPE.
        adapted: True if some requests have an adapter.
    """

    max_model_len: int
    long_rope_beyond: int | None = None
    adapted: bool = False

    def of(self, prompt_tokens: int, params: SamplingParams) -> bytes:
        """Return the content root of a request.

        Args:
            prompt_tokens: The number of tokens of the request's prompt.
            params: The request's sampling parameters.
        """
        rotated = _ROTATED_LATER if self.rope_offset(prompt_tokens, params) else USUAL
        return rotated if not params.adapter else rotated + f" adapter {params.adapter}".encode()

    def of_all(self, prompt_tokens: Sequence[int], params: Sequence[SamplingParams]) -> list[bytes]:
        """Return the content root of each request.

        Args:
            prompt_tokens: The number of tokens of each prompt.
            params: The sampling parameters of each request.
        """
        return [USUAL] * len(params) if self.is_single else [*map(self.of, prompt_tokens, params)]

    @property
    def is_single(self) -> bool:
        """Return True if all requests to the model have the same content root."""
        near = self.long_rope_beyond is None or self.max_model_len <= self.long_rope_beyond
        return near and not self.adapted

    def longest(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return the maximum number of tokens of a request, prompt and answer together.

        Args:
            prompt_tokens: The number of tokens of the request's prompt.
            params: The request's sampling parameters.
        """
        return min(self.max_model_len, prompt_tokens + params.max_tokens)

    def rope_offset(self, prompt_tokens: int, params: SamplingParams) -> int:
        """Return the row of the model's rotary tables that position 0 of a request uses.

        It is 0, or max_model_len if the request uses LongRoPE's angles for long sequences.

        Args:
            prompt_tokens: The number of tokens of the request's prompt.
            params: The request's sampling parameters.
        """
        # The maximum length decides, as the cached K and V would be wrong if the angles changed with the current length
        beyond = self.long_rope_beyond
        return 0 if beyond is None or self.longest(prompt_tokens, params) <= beyond else self.max_model_len


def shared_tokens(prompts: Sequence[TokenIds], roots: Sequence[bytes]) -> list[int]:
    """Return for each prompt except the last the number of leading tokens that it shares with the next prompt.

    Args:
        prompts: The tokens of each prompt.
        roots: The content root of each prompt. The result is 0 for prompts with different roots, which cannot share
            blocks.
    """
    pairs = zip(common_prefixes(prompts), pairwise(roots), strict=True)
    return [common if root == other else 0 for common, (root, other) in pairs]


def shared_by(requests: Sequence[Request], roots: ContentRoots) -> list[int]:
    """Return for each request except the last the number of leading prompt tokens that it shares with the next.

    Args:
        requests: The requests.
        roots: Computes content roots. The result is 0 for requests with different roots, which cannot share blocks.
    """
    prompts = [request.prompt for request in requests]
    return shared_tokens(
        prompts, roots.of_all([*map(len, prompts)], [request.params for request in requests])
    )
