"""Splits the device's time among requests: each step's among those that it ran.

Found afterwards, from the tables `steps` and `requests`, so that the engine counts nothing for each row of each step. A
request's prompt runs in the steps from its first to the one that sampled its first token, more of it where more was
read; from then on it runs as many tokens a step as its answer has for the steps that it took. A step's time is split in
two: attention's share of its roofline by the (query, key) pairs of each request, the rest by its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Columns = Mapping[str, Floats]
SPLIT = ("model_s", "bytes", "roofline_s")  # columns of `steps` that are split
_LITTLE = 1e-9  # tokens: among steps of which none read a prompt, one is split evenly


class Share(NamedTuple):
    """The requests' shares of a column: for their prompts, and for their answers."""

    prompt: Floats
    answer: Floats


class _RanIn(NamedTuple):
    """The steps in which requests ran: prompts in [first, read], answers in (read, last].

    For each token that those steps read, `tokens` of the prompt and `pairs` of query and key. In step k of its answer
    a request runs `rate` tokens, and `start` + `growth` × k pairs.
    """

    first: Ints
    read: Ints
    last: Ints
    tokens: Floats
    pairs: Floats
    rate: Floats
    start: Floats
    growth: Floats


class _Prices(NamedTuple):
    """Sums over the steps before each of a column's price of a token and of a pair: for what is read, and for what is
    answered; `growing` is that of a pair × the step's number."""

    read_token: Floats
    read_pair: Floats
    token: Floats
    pair: Floats
    growing: Floats


@dataclass(slots=True)
class Apportionment:
    """Splits one engine's steps, at least one: `add` all requests first; `shares` says what each got."""

    steps: Columns
    attention: Floats  # 0…1, attention's share of each step
    _read: Floats = field(init=False)  # tokens of prompts in each step
    _changes: dict[str, Floats] = field(init=False)  # of the sums over requests, from the step before to each
    _ran: float = 0.0  # tokens of all requests that were added
    _known: dict[str, _Prices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read = np.maximum(self.steps["prompt_tokens"], 0) + _LITTLE
        names = ("tokens", "pairs", "rate", "start", "growth")
        self._changes = {name: np.zeros(len(self._read) + 1) for name in names}

    def add(self, requests: Columns) -> None:
        """Count requests of this engine; columns of the table `requests`."""
        place = self._place(requests)
        for name in ("tokens", "pairs"):
            self._note(name, place.first, place.read, getattr(place, name))
        for name in ("rate", "start", "growth"):
            self._note(name, place.read + 1, place.last, getattr(place, name))
        self._ran += float((ran_tokens(requests) + answered_tokens(requests)).sum())
        self._known.clear()

    def shares(self, requests: Columns) -> dict[str, Share]:
        """By column of SPLIT; they add up to the column's sum, less what requests that did not finish took."""
        place = self._place(requests)
        return {name: self._share(place, self._prices(name)) for name in SPLIT}

    def _note(self, name: str, first: Ints, last: Ints, values: Floats) -> None:
        changes, some = self._changes[name], last >= first
        np.add.at(changes, first[some], values[some])
        np.add.at(changes, last[some] + 1, -values[some])

    def _place(self, requests: Columns) -> _RanIn:
        first = self._step("scheduled_s", requests["scheduled_s"])
        read = np.maximum(first, self._step("ended_s", requests["first_token_s"]))
        last = np.maximum(read, self._step("ended_s", requests["finished_s"]))
        ran, prompt, cached = ran_tokens(requests), requests["prompt_tokens"], requests["cached_tokens"]
        whole = _before(self._read)
        # where millions of tokens came before, the little that each step has is lost in their sum
        span = whole[read + 1] - whole[first]
        share = np.divide(1.0, span, out=np.zeros(len(ran)), where=span > 0)
        rate = np.divide(answered_tokens(requests), last - read, out=np.zeros(len(ran)), where=last > read)
        return _RanIn(
            first, read, last,
            tokens=ran * share,
            pairs=ran * (cached + prompt + 1) / 2 * share,
            rate=rate,
            start=rate * (prompt - rate * read),
            growth=rate**2,
        )  # fmt: skip

    def _step(self, column: str, seconds: Floats) -> Ints:
        """The step that had begun to be scheduled, or had ended, by then."""
        found = np.searchsorted(self.steps[column], seconds)
        return np.minimum(found, len(self._read) - 1)

    def _prices(self, column: str) -> _Prices:
        if column not in self._known:
            self._known[column] = self._priced(self.steps[column])
        return self._known[column]

    def _priced(self, values: Floats) -> _Prices:
        sums = {name: np.cumsum(changes[:-1]) for name, changes in self._changes.items()}
        number = np.arange(len(values), dtype=np.float64)
        tokens = self._read * sums["tokens"] + sums["rate"]
        pairs = self._read * sums["pairs"] + sums["start"] + sums["growth"] * number
        values = self._of_the_finished(values, tokens)
        by_pair = np.where(pairs > _LITTLE, values * self.attention, 0.0)
        token = _over(values - by_pair, tokens)
        pair = _over(by_pair, pairs)
        each = (self._read * token, self._read * pair, token, pair, pair * number)
        return _Prices(*map(_before, each))

    def _of_the_finished(self, values: Floats, tokens: Floats) -> Floats:
        """Leave out what requests took that never finished. What steps took of which no request is found, such as those
        whose rows had all ended, is spread over the others."""
        kept = np.where(tokens > _LITTLE, values, 0.0)
        useful = self.steps["prompt_tokens"] + self.steps["decode_tokens"]
        finished = min(1.0, self._ran / max(1.0, float(useful.sum())))
        whole = float(kept.sum())
        return kept * (float(values.sum()) * finished / whole) if whole else kept

    def _share(self, place: _RanIn, prices: _Prices) -> Share:
        def spent(sums: Floats, first: Ints, last: Ints) -> Floats:
            return np.where(last >= first, sums[last + 1] - sums[first], 0.0)

        reading, answering = (place.first, place.read), (place.read + 1, place.last)
        prompt = place.tokens * spent(prices.read_token, *reading)
        prompt += place.pairs * spent(prices.read_pair, *reading)
        answer = place.rate * spent(prices.token, *answering) + place.start * spent(prices.pair, *answering)
        return Share(prompt, answer + place.growth * spent(prices.growing, *answering))


def ran_tokens(requests: Columns) -> Floats:
    """Prompt tokens that each request ran; 0 for those that ended before any step."""
    ran = requests["prompt_tokens"] - requests["cached_tokens"]
    return np.where(requests["finished_s"] > requests["scheduled_s"], ran, 0.0)


def answered_tokens(requests: Columns) -> Floats:
    """Output tokens that each request ran: all but its end. The last one is never run, nor are those before it that a
    constraint forced together with it."""
    answered = requests["completion_tokens"] - requests["unrun_tokens"]
    return np.where(ran_tokens(requests) > 0, np.maximum(answered, 0), 0.0)


def _before(values: Floats) -> Floats:
    """The sum of all values before each, and that of all."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _over(values: Floats, parts: Floats) -> Floats:
    return np.divide(values, parts, out=np.zeros_like(values), where=parts > _LITTLE)
