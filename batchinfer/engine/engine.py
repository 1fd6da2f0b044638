"""The engine: requests in, completions out, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.scheduler import Scheduler, Step
from batchinfer.engine.sequence import Sequence, StopStream, StopStreams
from batchinfer.ops.interface import NO_TOKEN
from batchinfer.request import (
    Completion,
    FinishReason,
    Request,
    RequestSample,
    RowError,
    StepSample,
)
from batchinfer_kernels.cost import (
    Peaks,
    StepShape,
    decoder_step_costs,
    model_flops,
    roofline_seconds,
    step_total,
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What ends a sequence besides its own parameters."""

    max_model_len: int
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class StepOutput:
    """What one step finished, and what it cost. `sample` is None for work that ended before any step."""

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    sample: StepSample | None = None


class Engine:
    """Knows no files and no tokenizer: token ids in, token ids out.

    `stop_streams` makes, for parameters with stop strings, the function that watches a sequence's text for them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        limits: EngineLimits,
        peaks: Peaks | None = None,
        stop_streams: StopStreams | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._scheduler, self._limits = runner, scheduler, limits
        self._peaks, self._stop_streams, self._clock = peaks, stop_streams, clock
        self._started = clock()
        self._steps = 0
        self._refused: list[Completion] = []

    @property
    def unfinished(self) -> int:
        """Requests added and not yet given back."""
        return len(self._scheduler.waiting) + len(self._scheduler.running) + len(self._refused)

    def add(self, requests: Seq[Request]) -> None:
        """Queue requests; they are admitted in this order. Raises ValueError for stop strings without a watcher."""
        for request in requests:
            sequence = Sequence.of(request, self._limits.max_model_len, self._watch(request), self._now())
            try:
                self._scheduler.add(sequence)
            except ValueError as error:
                problem = RowError("kv_cache_too_small", "resource", str(error), retryable=True)
                self._refused.append(Completion(request.key, np.empty(0, np.int32), "error", error=problem))

    def step(self) -> StepOutput:
        """schedule → run → post-process. Returns an empty output when there is nothing to do."""
        output = StepOutput(completions=self._refused)
        self._refused = []
        began = self._now()
        step = self._scheduler.schedule()
        if step.chunks:
            work = self._account(step)
            ran = self._now()
            result = self._runner.run(step.chunks)
            model_s = self._now() - ran
            self._post_process(step, result.next_tokens, began, output)
            output.sample = self._sample(step, work, began, model_s, result.padded_tokens)
            self._steps += 1
        return output

    def drain(self) -> Iterator[StepOutput]:
        """Step until every request is finished."""
        while self.unfinished:
            yield self.step()

    def forget_waiting(self) -> None:
        """Drop what has not been admitted; what runs goes on."""
        self._scheduler.forget_waiting()

    def check_integrity(self) -> None:
        """Raises AssertionError when the KV cache's accounting is off."""
        self._scheduler.check_integrity()

    def _now(self) -> float:
        return self._clock() - self._started

    def _watch(self, request: Request) -> StopStream | None:
        if not request.params.stop:
            return None
        if self._stop_streams is None:
            raise ValueError("this engine has no tokenizer beside it, so it cannot look for stop strings")
        return self._stop_streams(request.params)

    def _post_process(self, step: Step, tokens: list[int], began: float, output: StepOutput) -> None:
        now, sampled = self._now(), iter(tokens)
        for chunk in step.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            sequence.computed = end
            if end > sequence.high_water:
                sequence.high_water = end
            if sequence.scheduled_s is None:
                sequence.scheduled_s = began
            if end == len(sequence.tokens):
                self._append(sequence, next(sampled), now, output)

    def _append(self, sequence: Sequence, token: int, now: float, output: StepOutput) -> None:
        if token == NO_TOKEN:
            problem = RowError(
                "nan_logits", "engine", "the model's logits are not finite numbers", retryable=True
            )
            self._finish(sequence, "error", now, output, error=problem)
            return
        sequence.tokens.append(token)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        kept = sequence.stop_stream(token) if sequence.stop_stream else None
        reason = self._finish_reason(sequence, token, kept)
        if reason:
            self._finish(sequence, reason, now, output, text_length=kept)

    def _finish_reason(self, sequence: Sequence, token: int, kept: int | None) -> FinishReason | None:
        params = sequence.request.params
        if kept is not None:
            return "stop"
        if sequence.output_length >= params.min_tokens:
            ends = token in self._limits.eos_token_ids and not params.ignore_eos
            if ends or token in params.stop_token_ids:
                return "stop"
        return "length" if len(sequence) >= sequence.max_length else None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        output: StepOutput,
        text_length: int | None = None,
        error: RowError | None = None,
    ) -> None:
        self._scheduler.finish(sequence)
        ids = np.array(sequence.tokens[sequence.prompt_length :], np.int32)
        output.completions.append(Completion(sequence.request.key, ids, reason, text_length, error))
        output.requests.append(_request_sample(sequence, now))

    def _account(self, step: Step) -> _Work:
        """What the step is going to run; asked before it runs, because running moves the sequences on."""
        chunks = step.chunks
        return _Work(
            shape=self._runner.step_shape(chunks),
            decodes=sum(c.is_decode for c in chunks),
            recomputed=sum(c.recomputed for c in chunks),
        )

    def _sample(self, step: Step, work: _Work, began: float, model_s: float, padded: int) -> StepSample:
        shape, pool = work.shape, self._scheduler.pool
        costs = decoder_step_costs(self._runner.shape, shape)
        useful = 1 - work.recomputed / shape.tokens
        return StepSample(
            step=self._steps,
            started_s=began,
            duration_s=self._now() - began,
            model_s=model_s,
            prefill_tokens=shape.tokens - work.decodes,
            decode_tokens=work.decodes,
            recomputed_tokens=work.recomputed,
            cached_tokens=step.cached_tokens,
            sampled_tokens=shape.sampled,
            padded_tokens=padded,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            preemptions=step.preemptions,
            blocks_used=pool.used,
            blocks_total=pool.total,
            flops=int(model_flops(self._runner.shape, shape) * useful),
            bytes=int(step_total(costs).bytes * useful),
            roofline_s=roofline_seconds(costs, self._peaks) * useful if self._peaks else None,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """One step's size."""

    shape: StepShape
    decodes: int
    recomputed: int


def _request_sample(sequence: Sequence, now: float) -> RequestSample:
    return RequestSample(
        key=sequence.request.key,
        prompt_tokens=sequence.prompt_length,
        completion_tokens=sequence.output_length,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
        queued_s=sequence.queued_s,
        scheduled_s=sequence.scheduled_s if sequence.scheduled_s is not None else now,
        first_token_s=sequence.first_token_s if sequence.first_token_s is not None else now,
        finished_s=now,
    )
