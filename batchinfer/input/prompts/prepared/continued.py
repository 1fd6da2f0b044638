"""The tokens of continuations, behind those of the prompts that they continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchinfer.core.request import common_prefix
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.builder import Draft
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.masks import masks_for
from batchinfer.input.tokenizer.tokenizer import SegmentEncoder, Tokenizer

_TAIL = 64  # characters at a prompt's end that decide which tokens a label has behind it
_MOST_TAILS = 4096  # that are remembered
Ids = Sequence[int]


class ContinuedPrompts:
    """Finds which tokens continuations have behind a prompt, and puts them there.

    A continuation has the tokens that the tokenizer gives both texts as one, from the first on that the prompt by
    itself does not have, or that another label changes: the end of a prompt may melt into what follows.
    """

    def __init__(self, tokenizer: Tokenizer, segments: SegmentEncoder, labels: Sequence[str]) -> None:
        """labels: those of the job; (): each draft has its own continuation."""
        self._pattern = tokenizer.special_pattern if tokenizer.specials else None
        self._segments = segments
        self._labels = tuple(labels)
        self._of_tails: dict[tuple[str, bool], _Tail | None] = {}  # None: is about to be found
        self._params: dict[tuple[int, ...], SamplingParams] = {}

    def to_encode(self, draft: Draft) -> list[Draft]:
        """Return what is to be encoded beside a draft, before `joined` is asked for."""
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

    def joined(
        self, draft: Draft, ids: Ids, encoded: Sequence[Ids], encode: Callable[[Draft], Ids]
    ) -> tuple[Ids, SamplingParams]:
        """Return the tokens of a prompt and its continuations, and the parameters of such a request. Raises RowProblem.

        ids: of the prompt. encoded: what `to_encode` asked for. encode: encodes a draft, where that was not enough.
        """
        context = self._without_end(ids, draft)
        if not draft.continuations:
            return context, self._scores(
                (len(context) - 1,), "the prompt has one token, behind which nothing stands"
            )
        if draft.text is None:
            each = [one for one in draft.continuations if not isinstance(one, str)]
        elif self._labels and not draft.masks:
            context, each = self._behind_tail(draft, context, encoded, encode)
        else:
            context, each = _behind(context, [self._without_end(one, draft) for one in encoded])
        empty = "the continuation has no tokens"
        return [*context, *(token for one in each for token in one)], self._scores(
            tuple(map(len, each)), empty
        )

    def _behind_tail(
        self, draft: Draft, context: Ids, encoded: Sequence[Ids], encode: Callable[[Draft], Ids]
    ) -> tuple[Ids, list[Ids]]:
        """Return the prompt and the labels behind it, as they are behind its last characters."""
        key = self._tail(draft)
        if encoded:
            short = Draft(draft.params, key[0], add_special=key[1])
            alone, *whole = (self._without_end(one, short) for one in encoded)
            self._of_tails[key] = _Tail(alone, *_behind(alone, whole))
        tail = self._of_tails.get(key)
        if tail is None or not tail.ends(context):
            whole = [self._without_end(encode(self._whole(draft, one)), draft) for one in self._labels]
            return _behind(context, whole)
        return context[: len(context) - len(tail.alone) + len(tail.context)], tail.each

    def _tail(self, draft: Draft) -> tuple[str, bool]:
        """Return the end of a prompt, and whether it is all of it, which the tokenizer puts something around."""
        text = draft.text or ""
        return (text, draft.add_special) if len(text) <= _TAIL else (text[-_TAIL:], False)

    def _whole(self, draft: Draft, continuation: str) -> Draft:
        """Return the draft of a prompt with a continuation. Special tokens in one that a row gives are plain text."""
        masks = draft.masks
        if not self._labels and self._pattern is not None and self._pattern.search(continuation):
            own = masks_for(continuation, self._pattern)
            by_literal = {literal: mask for mask, literal in own.items()}
            continuation = self._pattern.sub(lambda match: by_literal[match.group(0)], continuation)
            masks = {**(masks or {}), **own}
        return draft._replace(text=f"{draft.text}{continuation}", masks=masks, continuations=None)

    def _without_end(self, ids: Ids, draft: Draft) -> Ids:
        """Return token ids without what the tokenizer puts behind a text: something follows."""
        behind = self._segments.around[1] if draft.add_special else []
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
    """The tokens of the last characters of prompts, and those of the labels behind them."""

    def __init__(self, alone: Ids, context: Ids, each: list[Ids]) -> None:
        self.alone, self.context, self.each = alone, context, each
        # where the text was cut, its first tokens are others than the prompt's
        self._sure = len(alone) // 2

    def ends(self, prompt: Ids) -> bool:
        """Whether the prompt with these tokens ends so."""
        known = self.alone[self._sure :]
        return len(self.context) >= self._sure and [*prompt[len(prompt) - len(known) :]] == [*known]


def _behind(context: Ids, whole: Sequence[Ids]) -> tuple[Ids, list[Ids]]:
    """Return what all of `whole` begin with of the context, and what of each follows."""
    alone = np.asarray(context, np.int32)
    shared = min(common_prefix(alone, np.asarray(one, np.int32)) for one in whole)
    if not shared:
        raise RowProblem("empty_prompt", "no token of the prompt stays one before what continues it")
    return context[:shared], [one[shared:] for one in whole]
