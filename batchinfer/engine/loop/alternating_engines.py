"""Engines that alternate on a model with pipeline stages: each stage computes a step of another engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from batchinfer.core.request import Request, TokenIds
from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.engine import Engine, StepOutput

_PIECES = 4  # pieces per engine into which added requests are split, to balance the load


class AlternatingEngines:
    """Several engines of one model with pipeline stages, used like a single `Engine`.

    Each engine has a part of the requests and of the KV cache. The steps of the engines alternate, so all stages are
    busy: while one stage computes a step of one engine, the other stages compute steps of other engines.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._begun: deque[Engine] = deque()  # engines with a step in flight, oldest first
        self._steps = 0
        self._ended = 0.0  # end time of the last retired step

    @property
    def unfinished(self) -> int:
        """The total number of unfinished sequences of all engines."""
        return sum(engine.unfinished for engine in self._engines)

    def add(self, requests: Sequence[Request]) -> None:
        """Divide requests among the engines and queue them.

        Requests are kept in groups of neighbours, which often share prefixes. Each engine admits its requests in the
        given order.

        Raises:
            ValueError: If an engine rejects a request.
        """
        for piece in _pieces(requests, max(1, len(requests) // (_PIECES * len(self._engines)))):
            min(self._engines, key=lambda engine: engine.unfinished).add(piece)

    def learn(self, answers: Iterable[TokenIds]) -> None:
        """Pass answers that other workers of the job generated to the engines' draft sources, which search them."""
        all_answers = list(answers)
        for engine in self._engines:
            engine.learn(all_answers)

    def forget_waiting(self) -> None:
        """Drop the waiting requests of all engines. Requests in the running batch continue."""
        for engine in self._engines:
            engine.forget_waiting()

    def step(self) -> StepOutput:
        """Finish the oldest step in flight, and begin the next step of the engine whose step was finished.

        Returns:
            The output of the finished step. It is empty if there is nothing to do.
        """
        for engine in self._engines:
            self._begin(engine)
        if not self._begun:
            return self._early()
        engine = self._begun.popleft()
        output = engine.step()
        self._begin(engine)
        output.samples = [*map(self._merged_sample, output.samples)]
        return output

    def _begin(self, engine: Engine) -> None:
        if engine not in self._begun and engine.begin():
            self._begun.append(engine)

    def _early(self) -> StepOutput:
        found = StepOutput()
        for engine in self._engines:
            output = engine.step()
            found.completions += output.completions
            found.requests += output.requests
        return found

    def _merged_sample(self, sample: StepSample) -> StepSample:
        ended = sample.started_s + sample.duration_s
        began = min(ended, max(sample.started_s, self._ended))
        self._ended, number = ended, self._steps
        self._steps += 1
        loads = [engine.load for engine in self._engines]
        return replace(
            sample,
            step=number,
            started_s=began,
            duration_s=ended - began,
            model_s=min(sample.model_s, ended - began),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            blocks_used=sum(load.blocks for load in loads),
            blocks_total=sample.blocks_total * len(self._engines),
        )


def _pieces(requests: Sequence[Request], rows: int) -> Iterator[list[Request]]:
    first = 0
    while first < len(requests):
        ends = range(first + rows, min(first + 2 * rows, len(requests)))
        end = min(ends, key=lambda number: requests[number - 1].shares_next, default=len(requests))
        yield [*requests[first : end - 1], replace(requests[end - 1], shares_next=0)]
        first = end
