"""Stop strings over a growing answer: found across token boundaries, as soon as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from batchinfer.core.sampling import SamplingParams

_INCOMPLETE = "\ufffd"  # what a character is decoded to as long as tokens of it are missing


class StopStrings:
    """Watches one sequence. `rust` is a `tokenizers.Tokenizer`; `stops` are non-empty. Nothing ends an answer of fewer
    than `min_tokens`: stop strings are looked for in the text from that token on. `include`: the one that ends the
    answer stays in its text.

    The answer's text is always `rust.decode(all ids, skip_special_tokens=True)`; decoding it anew for every token
    would cost the square of its length, so a stream finds the candidates and one full decoding confirms them.
    """

    def __init__(self, rust: Any, stops: Sequence[str], min_tokens: int = 0, include: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._rust = rust
        self._stops = tuple(stops)
        self._min_tokens, self._include = min_tokens, include
        self._tail_chars = max(map(len, self._stops), default=1) - 1
        self._ids: list[int] = []
        self._held: list[int] = []  # the last ones, whose text the stream has not given out
        self._tail = ""  # the last characters so far: what a stop string may begin in
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> int | None:
        """Add one token. Once the text holds a stop string: how many of its characters to keep, else None."""
        self._ids.append(token_id)
        if not self._stops:
            return None
        text = self._new_text(token_id)
        self._held = [] if text else [*self._held, token_id]
        if len(self._ids) < self._min_tokens:
            return None
        if not text:  # the stream waits for the rest of a character, and may hold whole ones back with it
            return self._cut() if self._decoded(self._held).strip(_INCOMPLETE) else None
        seen = self._tail + text
        self._tail = seen[len(seen) - min(self._tail_chars, len(seen)) :]
        return self._cut() if any(stop in seen for stop in self._stops) else None

    def _new_text(self, token_id: int) -> str:
        """Return the text that the token added; empty while a character is incomplete."""
        try:
            return self._stream.step(self._rust, token_id) or ""
        except Exception:  # noqa: BLE001 - plain Exception is what the library raises for text that it cannot extend
            self._stream = DecodeStream(skip_special_tokens=True, ids=list(self._ids))
            self._tail = ""
            return self._decoded(self._ids)

    def _cut(self) -> int | None:
        before = self._decoded(self._ids[: max(0, self._min_tokens - 1)])
        start = len(before.rstrip(_INCOMPLETE))
        return cut_at_stop(self._decoded(self._ids), self._stops, start, self._include)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._rust.decode(ids, skip_special_tokens=True))


def stop_streams(rust: Any) -> Callable[[SamplingParams], Callable[[int], int | None]]:
    """Return the function that the engine calls for each sequence with stop strings, which maps its next token to the
    cut."""
    return lambda params: StopStrings(rust, params.stop, params.min_tokens, params.include_stop).push


def cut_at_stop(text: str, stops: Sequence[str], start: int = 0, include: bool = False) -> int | None:
    """The number of characters before the first stop string in `text` from `start` on, with `include` up to its end;
    None when there is none. Of stop strings that begin at the same character the shortest is the first."""
    places = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(places)[include] if places else None
