"""Splits the device time of each step among the requests that ran in it.

It uses the tables `steps` and `requests` after the run, so engines need not count tokens per row and step. The prompt
tokens of a request are spread over the steps until its first token, in proportion to the prompt tokens of each step.
Its output tokens are spread evenly over the steps after that. Attention's share of a step's time is split by (query,
key) pairs, and the rest by tokens.
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
_LITTLE = 1e-9  # tokens added to each step, so a prompt is spread evenly over steps that ran no prompt tokens


class Share(NamedTuple):
    """The part of a total, such as the device time of all steps, that belongs to each request.

    Attributes:
        prompt: [requests], the part for its prompt tokens.
        answer: [requests], the part for its output tokens.
    """

    prompt: Floats
    answer: Floats


class _RanIn(NamedTuple):
    # The steps in which requests ran, shape [requests]: prompts in steps [first, read], answers in (read,
    # last]. For each prompt token of a step in [first, read], a request runs `tokens` tokens and `pairs`
    # (query, key) pairs. In step k of (read, last], it runs `rate` tokens, and `start` + `growth` × k pairs
    first: Ints
    read: Ints
    last: Ints
    tokens: Floats
    pairs: Floats
    rate: Floats
    start: Floats
    growth: Floats


class _Prices(NamedTuple):
    # Cumulative sums over steps of a column's amount: per prompt token and pair of a prompt (`read_*`), per
    # token and pair of an answer, and per pair of an answer times the number of the step (`growing`)
    read_token: Floats
    read_pair: Floats
    token: Floats
    pair: Floats
    growing: Floats


@dataclass(slots=True)
class Apportionment:
    """Splits the device time of one engine's steps among the requests that ran in them.

    Call `add` for all requests before `shares`.

    Attributes:
        steps: Columns of the report table `steps`. There must be at least one step.
        attention: [steps], the share of attention in the device time of each step, from 0 to 1.
    """

    steps: Columns
    attention: Floats
    _read: Floats = field(init=False)  # prompt tokens of each step
    _changes: dict[str, Floats] = field(init=False)  # differences between steps of the sums over requests
    _ran: float = 0.0  # tokens of all added requests
    _known: dict[str, _Prices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._read = np.maximum(self.steps["prompt_tokens"], 0) + _LITTLE
        names = ("tokens", "pairs", "rate", "start", "growth")
        self._changes = {name: np.zeros(len(self._read) + 1) for name in names}

    def add(self, requests: Columns) -> None:
        """Add requests that this engine ran.

        Args:
            requests: Columns of the report table `requests`.
        """
        place = self._place(requests)
        for name in ("tokens", "pairs"):
            self._note(name, place.first, place.read, getattr(place, name))
        for name in ("rate", "start", "growth"):
            self._note(name, place.read + 1, place.last, getattr(place, name))
        self._ran += float((ran_tokens(requests) + answered_tokens(requests)).sum())
        self._known.clear()

    def shares(self, requests: Columns) -> dict[str, Share]:
        """Return how much of the steps' device time, bytes and roofline belongs to each request.

        The keys are the columns of the report table `steps`: model_s, bytes and roofline_s. The shares of all
        requests add up to the column's total, less the part of requests that did not finish.

        Args:
            requests: Columns of the report table `requests`, of requests that were added.
        """
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
        # _LITTLE may vanish in a sum of millions of tokens, so a span may be 0
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
        # The values of steps in which no finished request ran are spread over the other steps
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
    """Return the number of prompt tokens that were computed for each request, with shape [requests].

    Tokens found in the KV cache are not computed. It is 0 for a request that ended before any step.

    Args:
        requests: Columns of the report table `requests`.
    """
    ran = requests["prompt_tokens"] - requests["cached_tokens"]
    return np.where(requests["finished_s"] > requests["scheduled_s"], ran, 0.0)


def answered_tokens(requests: Columns) -> Floats:
    """Return how many output tokens of each request the model read to generate the next one: [requests].

    It never reads the last token of an answer, nor tokens that a constraint forced directly before it.

    Args:
        requests: Columns of the report table `requests`.
    """
    answered = requests["completion_tokens"] - requests["unrun_tokens"]
    return np.where(ran_tokens(requests) > 0, np.maximum(answered, 0), 0.0)


def _before(values: Floats) -> Floats:
    # The sums of all values before each position, including the end
    return np.concatenate([[0.0], np.cumsum(values)])


def _over(values: Floats, parts: Floats) -> Floats:
    return np.divide(values, parts, out=np.zeros_like(values), where=parts > _LITTLE)
