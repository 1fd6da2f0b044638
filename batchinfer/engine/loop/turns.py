"""Engines that share a model whose stages work at the same time: as many steps are in flight as there are stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from batchinfer.core.request import Request, TokenIds
from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.engine import Engine, StepOutput

# What is given to the engines at once is cut into so many pieces for each, to fit their loads
_PIECES = 4


class EngineTurns:
    """Several engines as one. Each has a part of the rows and of the cache; their steps run one behind the other, in
    turn: while a stage computes one engine's step, the others compute those of other engines."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self._begun: deque[Engine] = deque()  # those with a step in flight, the oldest first
        self._steps = 0
        self._ended = 0.0  # when the last retired step ended

    @property
    def unfinished(self) -> int:
        """Count the requests that are not finished."""
        return sum(engine.unfinished for engine in self._engines)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: neighbours, which share prefixes, in the same engine, that with the least to do. Raises
        ValueError as an engine does."""
        for piece in _pieces(requests, max(1, len(requests) // (_PIECES * len(self._engines)))):
            min(self._engines, key=lambda engine: engine.unfinished).add(piece)

    def learn(self, answers: Iterable[TokenIds]) -> None:
        """Take answers that other engines of the job gave."""
        known = list(answers)
        for engine in self._engines:
            engine.learn(known)

    def forget_waiting(self) -> None:
        """Drop the requests that have not been admitted; running ones go on."""
        for engine in self._engines:
            engine.forget_waiting()

    def step(self) -> StepOutput:
        """Finish the oldest step, and begin the next one of its engine. Returns an empty output when there is nothing
        to do."""
        for engine in self._engines:
            self._begin(engine)
        if not self._begun:
            return self._early()
        engine = self._begun.popleft()
        output = engine.step()
        self._begin(engine)
        output.samples = [*map(self._in_line, output.samples)]
        return output

    def _begin(self, engine: Engine) -> None:
        if engine not in self._begun and engine.begin():
            self._begun.append(engine)

    def _early(self) -> StepOutput:
        """Return what ended before any step."""
        found = StepOutput()
        for engine in self._engines:
            output = engine.step()
            found.completions += output.completions
            found.requests += output.requests
        return found

    def _in_line(self, sample: StepSample) -> StepSample:
        """Return the sample as of one engine: numbered with the others', and begun when the last one ended. Rows and
        blocks are those of all."""
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
    """Cut requests into pieces of `rows` and less than twice as many, each where the least is shared."""
    first = 0
    while first < len(requests):
        ends = range(first + rows, min(first + 2 * rows, len(requests)))
        end = min(ends, key=lambda number: requests[number - 1].shares_next, default=len(requests))
        yield [*requests[first : end - 1], replace(requests[end - 1], shares_next=0)]
        first = end
