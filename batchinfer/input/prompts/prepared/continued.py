"""Appends the tokens of continuations to the tokens of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchinfer.core.request import common_prefix
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.builder import Draft
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.masks import masks_for
from batchinfer.input.tokenizer.tokenizer import SegmentEncoder, Tokenizer

_TAIL = 64  # characters at the end of a prompt that determine the tokens of a label after it
_MOST_TAILS = 4096  # maximum number of cached ends of prompts
Ids = Sequence[int]


class ContinuedPrompts:
    """Finds the tokens of continuations after a prompt, and appends them to the tokens of the prompt.

    Prompt and continuation are encoded as one text, since the tokenizer may merge the end of the prompt with the start
    of the continuation.

    Args:
        tokenizer: The tokenizer of the checkpoint.
        segments: Encodes texts that have placeholders for special tokens.
        labels: The job's labels, which are the continuations of all prompts; () if each draft has its own
            continuations.
    """

    def __init__(self, tokenizer: Tokenizer, segments: SegmentEncoder, labels: Sequence[str]) -> None:
        self._pattern = tokenizer.special_pattern if tokenizer.specials else None
        self._segments = segments
        self._labels = tuple(labels)
        self._of_tails: dict[tuple[str, bool], _Tail | None] = {}  # None while the tail is being encoded
        self._params: dict[tuple[int, ...], SamplingParams] = {}

    def to_encode(self, draft: Draft) -> list[Draft]:
        """Return the texts, as drafts, that the caller must tokenise before it calls `join` for this draft.

        Empty if their tokens are cached, or if the prompt has no text but only tokens.
        """
        if draft.text is None or not draft.continuations:
            return []
        if self._labels and not draft.masks:
            tail = self._tail(draft)
            if tail in self._of_tails:
                return []
            if len(self._of_tails) >= _MOST_TAILS:
                self._of_tails.clear()
            self._of_tails[tail] = None
            short = Draft(draft.params, tail[0], add_special=tail[1])
            return [short, *(short._replace(text=tail[0] + label) for label in self._labels)]
        return [self._whole(draft, str(one)) for one in draft.continuations]

    def join(
        self, draft: Draft, ids: Ids, encoded: Sequence[Ids], encode: Callable[[Draft], Ids]
    ) -> tuple[Ids, SamplingParams]:
        """Append the tokens of its continuations to a prompt, and return the tokens and the parameters of the request.

        Args:
            draft: The prompt, with its continuations.
            ids: The tokens of the prompt.
            encoded: The tokens of the drafts from `to_encode(draft)`.
            encode: Tokenises a further draft. Called if `encoded` is not sufficient.

        Raises:
            RowProblem: The prompt or a continuation has no tokens.
        """
        context = self._without_end(ids, draft)
        if not draft.continuations:
            return context, self._scores(
                (len(context) - 1,), "the prompt has one token, so there is nothing to score"
            )
        if draft.text is None:
            each = [one for one in draft.continuations if not isinstance(one, str)]
        elif self._labels and not draft.masks:
            context, each = self._after_tail(draft, context, encoded, encode)
        else:
            context, each = _split_off(context, [self._without_end(one, draft) for one in encoded])
        empty = "the continuation has no tokens"
        return [*context, *(token for one in each for token in one)], self._scores(
            tuple(map(len, each)), empty
        )

    def _after_tail(
        self, draft: Draft, context: Ids, encoded: Sequence[Ids], encode: Callable[[Draft], Ids]
    ) -> tuple[Ids, list[Ids]]:
        key = self._tail(draft)
        if encoded:
            short = Draft(draft.params, key[0], add_special=key[1])
            alone, *whole = (self._without_end(one, short) for one in encoded)
            self._of_tails[key] = _Tail(alone, *_split_off(alone, whole))
        tail = self._of_tails.get(key)
        if tail is None or not tail.ends(context):
            whole = [self._without_end(encode(self._whole(draft, one)), draft) for one in self._labels]
            return _split_off(context, whole)
        return context[: len(context) - len(tail.alone) + len(tail.context)], tail.each

    def _tail(self, draft: Draft) -> tuple[str, bool]:
        text = draft.text or ""
        return (text, draft.add_special) if len(text) <= _TAIL else (text[-_TAIL:], False)

    def _whole(self, draft: Draft, continuation: str) -> Draft:
        masks = draft.masks
        if not self._labels and self._pattern is not None and self._pattern.search(continuation):
            own = masks_for(continuation, self._pattern)
            by_literal = {literal: mask for mask, literal in own.items()}
            continuation = self._pattern.sub(lambda match: by_literal[match.group(0)], continuation)
            masks = {**(masks or {}), **own}
        return draft._replace(text=f"{draft.text}{continuation}", masks=masks, continuations=None)

    def _without_end(self, ids: Ids, draft: Draft) -> Ids:
        behind = self._segments.surrounding_ids[1] if draft.add_special else []
        size = len(behind)
        return ids[:-size] if size and [*ids[-size:]] == behind else ids

    def _scores(self, lengths: tuple[int, ...], empty: str) -> SamplingParams:
        if min(lengths) < 1:
            raise RowProblem("empty_continuation", empty)
        if lengths not in self._params:
            if len(self._params) >= _MOST_TAILS:
                self._params.clear()
            self._params[lengths] = SamplingParams.scores(lengths)
        return self._params[lengths]


class _Tail:
    # The tokens at the end of prompts that have the same last characters: without a label, and before each label
    def __init__(self, alone: Ids, context: Ids, each: list[Ids]) -> None:
        self.alone, self.context, self.each = alone, context, each
        # The text was split at an arbitrary character, so its first tokens may differ from the prompt's
        self._sure = len(alone) // 2

    def ends(self, prompt: Ids) -> bool:
        # Only the second half is compared: the text begins in the middle of a prompt, so its first tokens may differ
        end = self.alone[self._sure :]
        return len(self.context) >= self._sure and [*prompt[len(prompt) - len(end) :]] == [*end]


def _split_off(context: Ids, whole: Sequence[Ids]) -> tuple[Ids, list[Ids]]:
    alone = np.asarray(context, np.int32)
    shared = min(common_prefix(alone, np.asarray(one, np.int32)) for one in whole)
    if not shared:
        raise RowProblem("empty_prompt", "no token of the prompt stays the same before its continuations")
    return context[:shared], [one[shared:] for one in whole]
