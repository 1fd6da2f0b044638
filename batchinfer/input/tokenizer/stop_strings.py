"""Finds stop strings in a growing answer, also across token boundaries, as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from batchinfer.core.sampling import SamplingParams

_INCOMPLETE = "\ufffd"  # the decoded text of an incomplete character


class StopStrings:
    """Searches the answer of one sequence for stop strings, token by token.

    Args:
        rust: The `tokenizers.Tokenizer`.
        stops: The non-empty stop strings.
        min_tokens: The minimum length of the answer in tokens. Stop strings in the text before that token are ignored.
        include: True if the stop string stays in the answer.
    """

    def __init__(self, rust: Any, stops: Sequence[str], min_tokens: int = 0, include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._rust = rust
        self._stops = tuple(stops)
        self._min_tokens, self._include = min_tokens, include
        self._tail_chars = max(map(len, self._stops), default=1) - 1
        self._ids: list[int] = []
        self._held: list[int] = []  # the last tokens, whose text the stream has not returned yet
        self._tail = ""  # the last characters, in which a stop string may begin
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> int | None:
        """Add a token to the answer, and check if the answer has a stop string now.

        Returns:
            The number of characters of the answer to keep, or None without a stop string.
        """
        self._ids.append(token_id)
        if not self._stops:
            return None
        text = self._new_text(token_id)
        self._held = [] if text else [*self._held, token_id]
        if len(self._ids) < self._min_tokens:
            return None
        # Decoding all ids for every token would take quadratic time, so that only confirms a stop string
        if not text:  # the stream waits for the rest of a character, and may also withhold complete ones
            return self._find_stop() if self._decoded(self._held).strip(_INCOMPLETE) else None
        seen = self._tail + text
        self._tail = seen[len(seen) - min(self._tail_chars, len(seen)) :]
        return self._find_stop() if any(stop in seen for stop in self._stops) else None

    def _new_text(self, token_id: int) -> str:
        try:
            return self._stream.step(self._rust, token_id) or ""
        except Exception:  # noqa: BLE001 - the library raises plain Exception if a token changes earlier text
            self._stream = DecodeStream(skip_special_tokens=True, ids=list(self._ids))
            self._tail = ""
            return self._decoded(self._ids)

    def _find_stop(self) -> int | None:
        before = self._decoded(self._ids[: max(0, self._min_tokens - 1)])
        start = len(before.rstrip(_INCOMPLETE))
        return find_text_end(self._decoded(self._ids), self._stops, start, self._include)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._rust.decode(ids, skip_special_tokens=True))


def stop_streams(rust: Any) -> Callable[[SamplingParams], Callable[[int], int | None]]:
    """Return a function that starts the search for stop strings in the answer of a sequence.

    It takes the sampling parameters of the sequence, and returns the method `push` of a new StopStrings.

    Args:
        rust: The `tokenizers.Tokenizer`.
    """
    return lambda params: StopStrings(rust, params.stop, params.min_tokens, params.include_stop).push


def find_text_end(text: str, stops: Sequence[str], start: int = 0, include: bool = False) -> int | None:
    """Return how many characters of a text to keep if it has a stop string, or None if it has none.

    The first stop string counts, and the shortest of several at the same position.

    Args:
        text: The text.
        stops: The stop strings.
        start: The position at which the search starts.
        include: True to keep the stop string, too.
    """
    places = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(places)[include] if places else None
