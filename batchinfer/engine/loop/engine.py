"""The engine: requests in, completions out, one step at a time."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

import numpy as np

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.continuations import longest_sequence
from batchinfer.core.request import Completion, ConstraintFailed, Request, RowError, TokenIds, TokenLogprobs
from batchinfer.core.samples import ConstraintWork, RequestSample, StepSample
from batchinfer.engine.loop.drafting import Drafter, Drafting
from batchinfer.engine.loop.endings import (
    TOKENS,
    can_run_together,
    completion,
    constrained_end,
    end_without_token,
    ends_request,
    output_kind,
    prompt_end,
    request_sample,
)
from batchinfer.engine.loop.in_flight import AcceptedTokens, End, InFlight
from batchinfer.engine.loop.multi_step import MultiStepDecoding, split_sample
from batchinfer.engine.runner.runner import LaunchedStep, Runner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Scheduler
from batchinfer.engine.schedule.scored_branches import scored_branches
from batchinfer.engine.schedule.sequence import Sequence, SequenceStatus, StopStream, StopStreams
from batchinfer.engine.schedule.step_shape import decode_shape, step_shape
from batchinfer_kernels.arithmetic import NO_TOKEN
from batchinfer_kernels.cost import Peaks, StepShape, roofline_seconds, step_total


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The properties of the model that limit each sequence.

    Attributes:
        roots: The maximum length of a sequence, and the start values of content hashes of blocks.
        eos_token_ids: The end-of-sequence tokens of the model.
    """

    roots: ContentRoots
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class StepOutput:
    """The results of one launch, which may be several decode steps (multi-step decoding).

    Attributes:
        completions: The outputs of the requests that finished.
        requests: The measurements of the requests that finished.
        samples: The measurements of each step. Empty if no step ran, because requests ended before any step.
    """

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    samples: list[StepSample] = field(default_factory=list)

    @property
    def sample(self) -> StepSample | None:
        """The measurements of the first step of the launch, or None if no step ran."""
        return self.samples[0] if self.samples else None


class EngineLoad(NamedTuple):
    """The current load of an engine.

    Attributes:
        running: The number of running sequences.
        waiting: The number of waiting sequences.
        blocks: The number of used KV cache blocks.
    """

    running: int
    waiting: int
    blocks: int


class Engine:
    """Runs requests step by step with continuous batching. Prompts and outputs are token ids.

    Args:
        runner: Runs the model. It decides whether a step is launched before the tokens of the previous step are known.
        scheduler: Chooses the sequences of each step.
        limits: The maximum length of sequences, and the end-of-sequence tokens.
        peaks: The peak FLOP/s and bandwidth of the device, from which the roofline time of steps is computed. None:
            unknown.
        stop_streams: Creates the function that searches an answer for its stop strings. None: requests with stop
            strings are rejected.
        clock: Returns the time in seconds.
        drafter: Proposes draft tokens, which the next step verifies. None: drafts are not used.
        masks: The token masks of constraints. None: requests with constraints are rejected.
        repeated: Chooses the number of decode steps per launch (multi-step decoding). None: one step per launch.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: EngineLimits,
        peaks: Peaks | None = None,
        stop_streams: StopStreams | None = None,
        clock: Callable[[], float] = time.perf_counter,
        drafter: Drafter | None = None,
        masks: ConstraintMasks | None = None,
        repeated: MultiStepDecoding | None = None,
    ) -> None:
        self._runner, self._scheduler, self._limits = runner, scheduler, limits
        self._peaks, self._stop_streams, self._clock = peaks, stop_streams, clock
        self._masks, self._repeated = masks, repeated
        self._drafting = None if drafter is None else Drafting(drafter, masks)
        self._plans = PlanWriter(limits.eos_token_ids, runner.wants)
        self._jump_forward_tokens = 0  # since the last sample
        # Work that is reported already, or was done for another engine
        self._reported = _constraint_work(masks)
        self._answers = frozenset({TOKENS})  # kinds of output of the unfinished requests
        self._started = clock()
        self._steps = 0
        self._early = StepOutput()  # requests that ended before any step
        self._in_flight: deque[InFlight] = deque()  # oldest first; at most two
        self._ended = 0.0  # end time of the last retired step
        self._metering_ns = 0  # time spent on the next sample so far

    @property
    def unfinished(self) -> int:
        """The number of unfinished sequences, plus finished requests whose output `step` has not returned yet."""
        scheduler = self._scheduler
        return (
            len(scheduler.waiting)
            + len(scheduler.running)
            + len(scheduler.finishing)
            + len(self._early.completions)
        )

    def add(self, requests: Seq[Request]) -> None:
        """Add requests to the queue of waiting requests, to be admitted in the given order.

        Raises:
            ValueError: If the engine cannot run a request: it is too long, asks for an unsupported kind of output, or
                needs a tokenizer (stop strings, constraints) that the engine does not have.
        """
        roots = self._limits.roots
        for request in requests:
            if self._scheduler.config.whole_prompts and (request.params.max_tokens or request.params.scored):
                raise ValueError("an encoder only computes vectors: it cannot generate or score tokens")
            if request.params.classified and not self._scheduler.config.whole_prompts:
                raise ValueError("a classification head needs prompts that run in a single step")
            if output_kind(request.params) not in self._answers:
                self._accept_kind(output_kind(request.params))
            length = longest_sequence(len(request.prompt), request.params.scored)
            if length + min(1, request.params.max_tokens) > (most := roots.max_model_len):
                raise ValueError(
                    f"a prompt of {length} tokens leaves no room for an answer: there are {most} positions"
                )
            watch = self._watch(request)
            if _is_guided(request) and self._masks is None:
                raise ValueError(
                    "this engine was built without a tokenizer, so it cannot follow a constraint"
                )
            for sequence in self._sequences_of(request, watch):
                end = self._queue(sequence)
                if end is not None and ends_request(sequence, end):
                    self._early.completions.append(completion(sequence, end))

    def learn(self, answers: Iterable[TokenIds]) -> None:
        """Pass answers that other engines of the job generated to the draft sources, which search them for drafts."""
        if self._drafting is not None:
            for tokens in answers:
                self._drafting.drafter.learn(tokens)

    def _accept_kind(self, answers: str) -> None:
        others = self._answers if self.unfinished else frozenset[str]()
        if not can_run_together({*others, answers}):
            raise ValueError(
                f"requests for {answers} cannot run together with unfinished requests for {', '.join(sorted(others))}"
            )
        self._answers = others | {answers}

    def _sequences_of(self, request: Request, watch: StopStream | None) -> list[Sequence]:
        branches = scored_branches(request) if request.params.scored else [(request, None)]
        limits, now = self._limits, self._now()
        return [
            Sequence.of(own, limits.roots, watch, now, limits.eos_token_ids, branch)
            for own, branch in branches
        ]

    def _queue(self, sequence: Sequence) -> End | None:
        try:
            end = self._constrain(sequence)
        except ConstraintFailed as failed:
            return End("error", error=failed.error)
        sequence.needs_sync = _needs_sync(sequence)
        if end is not None:
            self._drop_mask(sequence)
            self._early.requests.append(request_sample(sequence, end, self._now()))
            return end
        try:
            self._scheduler.add(sequence)
        except ValueError as error:
            problem = RowError("kv_cache_too_small", "resource", str(error), retryable=True)
            return End("error", error=problem)
        return None

    def step(self) -> StepOutput:
        """Run a step, append its tokens to the sequences, and return the outputs of requests that finished.

        The result is empty if there is nothing to do.
        """
        output, self._early = self._early, StepOutput()
        if self.begin():
            if self._runner.looks_ahead and self._scheduler.has_room() and not self._should_hold_step():
                self._launch()
            self._retire(self._in_flight.popleft(), output)
        return output

    def begin(self) -> bool:
        """Launch a step if no step is in flight. The next call of `step` waits for its results.

        Returns:
            True if a step is in flight afterwards.
        """
        if not self._in_flight:
            self._launch()
        return bool(self._in_flight)

    @property
    def load(self) -> EngineLoad:
        """The numbers of running sequences, waiting sequences and used KV cache blocks at present."""
        scheduler = self._scheduler
        return EngineLoad(len(scheduler.running), len(scheduler.waiting), scheduler.pool.used)

    def drain(self) -> Iterator[StepOutput]:
        """Run steps until all requests are finished, and yield the output of each step."""
        while self.unfinished:
            yield self.step()

    def forget_waiting(self) -> None:
        """Drop the waiting requests. Requests in the running batch continue."""
        for sequence in self._scheduler.waiting:
            self._drop_mask(sequence)
        self._scheduler.forget_waiting()

    def check_integrity(self) -> None:
        """Check, in tests, that blocks, reservations and states of sequences are consistent.

        Raises:
            AssertionError: If blocks, reservations or states are inconsistent.
        """
        self._scheduler.check_integrity()

    def _now(self) -> float:
        return self._clock() - self._started

    def _watch(self, request: Request) -> StopStream | None:
        if not request.params.stop:
            return None
        if self._stop_streams is None:
            raise ValueError("this engine was built without a tokenizer, so it cannot look for stop strings")
        return self._stop_streams(request.params)

    def _constrain(self, sequence: Sequence) -> End | None:
        """Set the constraint of a new sequence, if it has one, and append the tokens that the constraint forces.

        Returns:
            How the sequence ends if the forced tokens end it, else None.

        Raises:
            ConstraintFailed: If the constraint cannot be compiled or followed.
        """
        if self._masks is None or not _is_guided(sequence.request):
            return None
        constraint = self._masks.constraints.start(sequence.request.params)
        sequence.constraint, sequence.watched = constraint, True
        sequence.mask = self._masks.put(constraint)
        if len(sequence) >= sequence.max_length:
            return None
        end = self._jump_forward(sequence, self._now())
        sequence.first_token_s = None  # nothing was computed yet
        return end

    def _jump_forward(self, sequence: Sequence, now: float) -> End | None:
        """Append the tokens that the constraint of a sequence forces next (jump-forward decoding).

        Nothing is appended if forced tokens must be computed like other tokens, for example because the sequence needs
        their log-probabilities.

        Returns:
            How the sequence ends if the forced tokens end it, else None.
        """
        asks = sequence.logprobs is not None or sequence.prompt_scores is not None
        samples = asks or sequence.request.params.forbids_tokens
        if sequence.constraint is None or samples:
            return None
        for token in sequence.constraint.jump_forward():
            sequence.jump_forward_tokens += 1
            self._jump_forward_tokens += 1
            end = self._append(sequence, token, now, None)
            if end is not None:
                return end
        return None

    def _launch(self) -> None:
        began = self._now()
        drafting = self._drafting
        waiting = self._repeated is None or self._repeated.can_hold_rows
        drafted = drafting is not None and drafting.before_step(self._scheduler.running, waiting)
        scheduled = self._scheduler.schedule(drafted)
        if not scheduled.chunks:
            return
        step = InFlight.of(scheduled, began)
        runs = self._runs(step)
        if not self._in_flight and runs is None:
            self._set_shapes(step)
        step.launched_s = self._now()
        shares = self._runner.wants.shared_blocks
        shared = self._scheduler.shared_blocks(scheduled.chunks) if shares else 0
        plan = self._plans.of(scheduled, step.sampling, shared, step.prompt_chunks, step.output_chunks)
        if runs is not None:
            plan = replace(plan, repeats=np.array(runs, np.int32))
            step.extend_runs(runs)
        step.result = self._runner.launch(plan)
        self._scheduler.record_launch(scheduled)
        if self._repeated is not None:
            self._repeated.record_launch(step.repeats)
        self._scheduler.limit_tokens(self._runner.most_tokens)
        self._advance(step)
        self._in_flight.append(step)

    def _runs(self, step: InFlight) -> list[int] | None:
        repeated, scheduler = self._repeated, self._scheduler
        rows = len(step.scheduled.chunks)
        if repeated is None or self._runner.most_tokens is not None:
            return None
        assert self._runner.looks_ahead, "multi-step decoding needs a runner that looks ahead"
        if not step.only_decodes or rows != len(scheduler.running):
            return None
        if any(sequence.drafting or not sequence.steady for sequence in step.sampling):
            return None
        most = repeated.choose_steps(rows, scheduler.cached_tokens)
        return scheduler.reserve_steps(step.scheduled, most) if most > 1 else None

    def _should_hold_step(self) -> bool:
        return self._drafting is not None and self._drafting.should_hold_step(self._scheduler.running)

    def _advance(self, step: InFlight) -> None:
        for sequence in step.scheduled.admitted:
            if sequence.scheduled_s is None:
                sequence.scheduled_s = step.began_s
        if step.repeats > 1:
            self._add_run_placeholders(step)
        elif self._runner.looks_ahead:
            self._add_placeholders(step)

    def _add_placeholders(self, step: InFlight) -> None:
        for sequence in step.sampling:
            if sequence.needs_sync or sequence.drafting:
                sequence.status = SequenceStatus.AWAITING_TOKENS
                continue
            tokens = sequence.tokens
            tokens.append(0)
            sequence.placeholders += 1
            if len(tokens) >= sequence.max_length:
                self._scheduler.stop(sequence)
        for sequence in step.completed:
            self._scheduler.stop(sequence)

    def _add_run_placeholders(self, step: InFlight) -> None:
        zeros = [array("i", [0] * count) for count in range(step.repeats + 1)]
        for sequence, _, length in step.scheduled.chunks:
            tokens = sequence.tokens
            tokens.extend(zeros[length])
            sequence.placeholders += length
            if len(tokens) >= sequence.max_length:
                self._scheduler.stop(sequence)

    def _retire(self, step: InFlight, output: StepOutput) -> None:
        assert step.result is not None
        tokens, sampling = step.result.tokens(), step.sampling
        if step.output_chunks or step.prompt_chunks:
            self._store_outputs(step, step.result)
            tokens = tokens if sampling else []
        logprobs = {sampling[place]: found for place, found in step.result.logprobs().items()}
        ready = self._now()
        take = self._append_all if step.repeats == 1 else self._append_runs
        ends = take(step, tokens, logprobs, ready)
        counts = {outcome.sequence: outcome.count for outcome in step.irregular}
        for place, barred in step.result.barred().items():
            # Only of the tokens that the sequence got
            sampling[place].masking.note(any(barred[: counts.get(sampling[place], len(barred))]))
        if step.irregular or step.repeats > 1:
            self._set_shapes(step)
        for outcome in step.irregular:
            self._roll_back(outcome)
        for sequence, end in ends:
            self._finish(sequence, end, ready, output)
        for sequence in step.completed:
            self._finish(sequence, prompt_end(sequence), ready, output)
        for sequence in step.dropped:
            self._scheduler.release(sequence)
        output.samples = self._samples(step, ready)
        if self._drafting is not None:
            output.samples = [*map(self._drafting.drafter.record_step, output.samples)]
        self._ended = output.samples[-1].started_s + output.samples[-1].duration_s
        self._steps += len(output.samples)
        if self._repeated is not None:
            given = sum(sample.sampled_tokens for sample in output.samples)
            self._repeated.record_tokens(given, len(output.completions))
        if self._in_flight and self._in_flight[0].repeats == 1:
            self._set_shapes(self._in_flight[0])

    def _store_outputs(self, step: InFlight, result: LaunchedStep) -> None:
        for place, own in result.states().items():
            step.output_chunks[place].sequence.pool(step.output_chunks[place].start, own)
        scores, offset = result.scores(), 0
        for sequence, start, length in step.output_chunks:
            if sequence.scored is not None:
                offset += sequence.scored.store(start, start + length, scores, offset)
        for sequence, start, length in step.prompt_chunks:
            if sequence.prompt_scores is not None:
                offset += sequence.prompt_scores.store(start, start + length, scores, offset)

    def _append_all(
        self,
        step: InFlight,
        tokens: list[list[int]],
        logprobs: Mapping[Sequence, TokenLogprobs],
        now: float,
    ) -> list[tuple[Sequence, End]]:
        ends, dropped = [], step.dropped
        for sequence, given in zip(step.sampling, tokens, strict=True):
            if dropped and sequence in dropped:
                continue
            if len(given) == 1 and not (sequence.watched or sequence.drafts or given[0] == NO_TOKEN):
                reason = sequence.append_unwatched(given[0], now)  # the most frequent case
                if reason is not None:
                    ends.append((sequence, End(reason)))
                continue
            found = logprobs[sequence] if sequence.logprobs is not None else None
            if len(given) == 1 and not sequence.drafts:
                sequence.mark_tokens_known()
                end = self._append(sequence, given[0], now, found) or self._jump_forward(sequence, now)
            else:
                outcome = self._append_verified(sequence, given, now, found)
                step.irregular.append(outcome)
                end = outcome.end
            if end is not None:
                ends.append((sequence, end))
        return ends

    def _append_runs(
        self,
        step: InFlight,
        tokens: list[list[int]],
        logprobs: Mapping[Sequence, TokenLogprobs],
        now: float,
    ) -> list[tuple[Sequence, End]]:
        assert not logprobs, "rows that ask for log-probabilities run one token at a time"
        ends = []
        for sequence, given in zip(step.sampling, tokens, strict=True):
            if sequence in step.dropped:
                continue
            if not sequence.watched and sequence.append_run(given, now):
                if len(sequence.tokens) - sequence.placeholders >= sequence.max_length:
                    ends.append((sequence, End("length")))
                continue
            for count, token in enumerate(given, 1):
                if (end := self._append(sequence, token, now, None)) is not None:
                    sequence.drop_placeholders(len(given) - count)
                    step.used_lengths[sequence] = count
                    ends.append((sequence, end))
                    break
        return ends

    def _append_verified(
        self, sequence: Sequence, tokens: list[int], now: float, logprobs: TokenLogprobs | None
    ) -> AcceptedTokens:
        if sequence.placeholders:
            raise ValueError(f"a step returned {len(tokens)} tokens for a sequence that is in flight again")
        sequence.mark_tokens_known()
        drafts = sequence.tokens[len(sequence) - sequence.drafts :]
        outcome = AcceptedTokens(sequence, sequence.known_length, drafts, sequence.draft_parents)
        sequence.drop_drafts()
        for at, token in enumerate(tokens):
            outcome.add(token)
            outcome.end = self._append(sequence, token, now, logprobs, at)
            if outcome.end is None and sequence.constraint is not None:
                before = len(sequence)
                outcome.end = self._jump_forward(sequence, now)
                if len(sequence) > before:  # forced tokens replace the rest of the step's tokens
                    break
            if outcome.end is not None:
                break
        if self._drafting is not None:
            self._drafting.record_verified(outcome)
        return outcome

    def _append(
        self, sequence: Sequence, token: int, now: float, logprobs: TokenLogprobs | None, at: int = 0
    ) -> End | None:
        """Append a token to a sequence, and return how the token ends the answer, or None if the answer continues.

        Args:
            sequence: The sequence.
            token: The token. NO_TOKEN if the step sampled no token, which ends the sequence with an error.
            now: The current time in seconds since the engine's start.
            logprobs: The log-probabilities of several tokens of the sequence. None: they were not requested.
            at: The index of the token in `logprobs`.
        """
        if token == NO_TOKEN:
            sequence.drop_first_placeholder()
            return end_without_token(sequence, self._limits.eos_token_ids, self._masks)
        sequence.append_token(token)
        if sequence.logprobs is not None and logprobs is not None:
            sequence.logprobs.append(logprobs, at)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        kept = sequence.stop_stream(token) if sequence.stop_stream else None
        reason = sequence.ends_with(token) if kept is None else "stop"
        if sequence.constraint is not None:
            end = constrained_end(sequence.constraint, token, reason, kept)
            if end is None and sequence.constraint.over:
                self._release_constraint(sequence)
            return end
        return End(reason, kept) if reason else None

    def _release_constraint(self, sequence: Sequence) -> None:
        self._drop_mask(sequence)
        sequence.constraint = sequence.mask = None
        sequence.watched = sequence.stop_stream is not None or sequence.logprobs is not None
        sequence.needs_sync = _needs_sync(sequence)

    def _roll_back(self, outcome: AcceptedTokens) -> None:
        if outcome.end is None:
            self._scheduler.roll_back(outcome.sequence, outcome.useful_end)

    def _finish(self, sequence: Sequence, end: End, now: float, output: StepOutput) -> None:
        self._remove(sequence)
        self._drop_mask(sequence)
        if self._drafting is not None:
            self._drafting.drafter.finish(sequence)
        if ends_request(sequence, end):
            output.completions.append(completion(sequence, end))
            output.requests.append(request_sample(sequence, end, now))

    def _remove(self, sequence: Sequence) -> None:
        runs_on = sequence.placeholders > 0 or sequence.status is SequenceStatus.AWAITING_TOKENS
        sequence.drop_placeholders()
        if runs_on:
            self._in_flight[0].dropped.add(sequence)
            if sequence.status is not SequenceStatus.FINISHING:
                self._scheduler.stop(sequence)
        elif sequence.status is SequenceStatus.FINISHING:
            self._scheduler.release(sequence)
        else:
            self._scheduler.finish(sequence)

    def _drop_mask(self, sequence: Sequence) -> None:
        if self._drafting is not None:
            self._drafting.drop_masks(sequence)
        if sequence.mask is not None and self._masks is not None:
            self._masks.drop(sequence.mask)

    def _set_shapes(self, step: InFlight) -> None:
        # Must run while the sequences of the step still hold their blocks
        began = time.perf_counter_ns()
        if step.repeats > 1:
            step.shapes = self._shapes(step.useful_runs, step.repeats)
            self._metering_ns += time.perf_counter_ns() - began
            return
        chunks, sampled = step.useful, len(step.sampling) - len(step.dropped) + step.scored_positions
        if step.dropped:
            dropped = step.dropped
            chunks = [c for c in chunks if c[0] not in dropped]  # takes half the time of c.sequence
        if step.irregular:
            rejected = {outcome.sequence: outcome.rejected for outcome in step.irregular}
            accepted = (Chunk(s, start, length - rejected.get(s, 0)) for s, start, length in chunks)
            chunks = [c for c in accepted if c.length]
            sampled += sum(outcome.count - 1 for outcome in step.irregular)
        # A step with drafts is counted again after its results. Sequences preempted since then have no blocks
        with_blocks = [c for c in chunks if c[0].tables] if step.irregular else chunks
        shared, copied = self._scheduler.shared_blocks(with_blocks), step.scheduled.copied_tokens
        cost = self._runner.cost
        names = [c[0].request.params.adapter for c in chunks] if cost.adapted else []
        shape = step_shape(chunks, sampled, shared, self._runner.layout, copied, cost.causal, names)
        step.shapes = [shape]
        self._metering_ns += time.perf_counter_ns() - began

    def _shapes(self, runs: list[Chunk], repeats: int) -> list[StepShape]:
        cost, shared_blocks = self._runner.cost, self._scheduler.shared_blocks
        names = [s.request.params.adapter for s, _, _ in runs] if cost.adapted else []
        alive, shared, found = -1, 0, list[StepShape]()
        for at in range(repeats):
            own = [n > at for _, _, n in runs]
            if (count := sum(own)) != alive:  # shared blocks only change when a row ends
                chunks, alive = list(compress(runs, own)), count
                shared = shared_blocks(chunks)
                starts = np.array([start for _, start, _ in chunks], np.int64)
            adapters = list(compress(names, own))
            found.append(decode_shape(starts + at, shared, self._runner.layout, adapters))
        return found

    def _new_work(self) -> ConstraintWork:
        if self._masks is None:
            return _NO_WORK
        now, before = _constraint_work(self._masks), self._reported
        self._reported = now
        return ConstraintWork(now.compile_s - before.compile_s, now.mask_s - before.mask_s)

    def _samples(self, step: InFlight, ready: float) -> list[StepSample]:
        sample = self._sample(step, ready)
        if step.repeats == 1:
            return [sample]
        assert step.result is not None
        rows = len(step.sampling) * step.repeats + step.result.padded_tokens
        return split_sample(sample, step.shapes, rows, self._runner.cost, self._peaks)

    def _sample(self, step: InFlight, ready: float) -> StepSample:
        # If the launch overlaps with the previous one, its duration begins when the previous one ended
        metering, self._metering_ns = time.perf_counter_ns() - self._metering_ns, 0
        assert step.result is not None
        shape, pool, began = step.shapes[0], self._scheduler.pool, max(step.began_s, self._ended)
        unused = len(step.dropped) + sum(outcome.rejected for outcome in step.irregular)
        decodes, recomputed = step.decodes - unused, step.recomputed
        costs = self._runner.cost.step(shape)
        forced, self._jump_forward_tokens = self._jump_forward_tokens, 0
        work, launch = self._new_work(), step.result.launch
        return StepSample(
            step=self._steps,
            started_s=began,
            duration_s=self._now() - began,
            model_s=ready - max(step.launched_s, began),
            prefill_tokens=shape.tokens - decodes + recomputed,
            decode_tokens=decodes,
            recomputed_tokens=recomputed,
            cached_tokens=step.scheduled.cached_tokens,
            sampled_tokens=shape.sampled,
            scored_positions=step.scored_positions,
            padded_tokens=step.result.padded_tokens + unused,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            preemptions=step.scheduled.preemptions,
            blocks_used=pool.used,
            blocks_total=pool.total,
            flops=self._runner.cost.model_flops(shape),
            bytes=step_total(costs).bytes,
            roofline_s=roofline_seconds(costs, self._peaks) if self._peaks else None,
            forced_tokens=forced,
            mask_s=work.mask_s,
            compile_s=work.compile_s,
            scheduled_s=step.began_s,
            pairs=shape.pairs,
            kv_tokens=shape.kv_tokens,
            copied_tokens=shape.copied,
            launch=launch.mode if launch else None,
            capture_s=launch.capture_s if launch else None,
            graph_bytes=launch.graph_bytes if launch else None,
            collective_s=step.result.collective_s,
            metering_s=(time.perf_counter_ns() - metering) / 1e9,
        )


_NO_WORK = ConstraintWork()


def _constraint_work(masks: ConstraintMasks | None) -> ConstraintWork:
    return _NO_WORK if masks is None else replace(masks.constraints.work)


def _needs_sync(sequence: Sequence) -> bool:
    return sequence.mask is not None or sequence.looks_back


def _is_guided(request: Request) -> bool:
    return request.params.constraint is not None or request.params.reasoning is not None
