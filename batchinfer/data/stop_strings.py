"""Stop strings over a growing answer: found across token boundaries, as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from batchinfer.request import SamplingParams


class StopStrings:
    """Watches one sequence. `rust` is a `tokenizers.Tokenizer`; `stops` are non-empty.

    The answer's text is always `rust.decode(all ids, skip_special_tokens=True)`; decoding it anew for every token
    would cost the square of its length, so a stream finds the candidates and one full decoding confirms them.
    """

    def __init__(self, rust: Any, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._rust = rust
        self._stops = tuple(stops)
        self._tail_chars = max(map(len, self._stops), default=1) - 1
        self._ids: list[int] = []
        self._tail = ""  # the last characters so far: what a stop string may begin in
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> int | None:
        """Add one token. Once the text holds a stop string: how many of its characters to keep, else None."""
        self._ids.append(token_id)
        if not self._stops:
            return None
        text = self._new_text(token_id)
        if not text:
            return None
        seen = self._tail + text
        self._tail = seen[len(seen) - min(self._tail_chars, len(seen)) :]
        return self._cut() if any(stop in seen for stop in self._stops) else None

    def _new_text(self, token_id: int) -> str:
        """What the token added; empty while a character is incomplete."""
        try:
            return self._stream.step(self._rust, token_id) or ""
        except Exception:  # noqa: BLE001 - plain Exception is what the library raises for text that it cannot extend
            self._stream = DecodeStream(skip_special_tokens=True, ids=list(self._ids))
            self._tail = ""
            return str(self._rust.decode(self._ids, skip_special_tokens=True))

    def _cut(self) -> int | None:
        return cut_at_stop(self._rust.decode(self._ids, skip_special_tokens=True), self._stops)


def stop_streams(rust: Any) -> Callable[[SamplingParams], Callable[[int], int | None]]:
    """What the engine asks for each sequence with stop strings: a function from its next token to the cut."""
    return lambda params: StopStrings(rust, params.stop).push


def cut_at_stop(text: str, stops: Sequence[str]) -> int | None:
    """The number of characters before the first stop string in `text`; None when there is none."""
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(places, default=None)
