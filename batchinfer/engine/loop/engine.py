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
    answer_of,
    completion,
    constrained_end,
    ends_request,
    go_together,
    prompt_end,
    request_sample,
    without_token,
)
from batchinfer.engine.loop.in_flight import AcceptedTokens, End, InFlight
from batchinfer.engine.loop.repeated_steps import RepeatedSteps, divided_samples
from batchinfer.engine.runner.runner import Launched, Runner
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
    """The limits that end a sequence besides its own parameters."""

    roots: ContentRoots  # with the positions that there are for prompt and answer
    eos_token_ids: frozenset[int]


@dataclass(slots=True)
class StepOutput:
    """The completions of one step, or of several that were launched at once, and the cost of each of these. There are
    no samples for work that ended before any step."""

    completions: list[Completion] = field(default_factory=list)
    requests: list[RequestSample] = field(default_factory=list)
    samples: list[StepSample] = field(default_factory=list)

    @property
    def sample(self) -> StepSample | None:
        """Return the cost of the step, or of the first of those that were launched at once."""
        return self.samples[0] if self.samples else None


class EngineLoad(NamedTuple):
    """The rows and blocks that an engine has in work."""

    running: int
    waiting: int
    blocks: int


class Engine:
    """Knows no files and no tokenizer: token ids in, token ids out.

    `stop_streams` makes, for parameters with stop strings, the function that watches a sequence's text for them.

    With a runner that looks ahead, the next step is scheduled and launched while one runs, before its tokens are known,
    unless the drafter says that it pays to wait for them.
    A sequence that turns out to have ended has then run one token too many, which is dropped. A sequence with a barrier
    is left out of the next step until its tokens are known.

    A step gives a sequence any number of tokens. `drafter` proposes tokens that may follow a sequence; the next step
    runs them, too, and samples behind each of them, as it would if it came by itself: the sequence gets the drafts that
    are what was sampled there, and one token more. What was computed for the others is taken back.

    `repeated` says for how many steps rows that only decode are launched at once (multi-step decoding): each runs on
    with its sampled tokens inside the device. What runs behind the token that ends it is dropped.
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
        repeated: RepeatedSteps | None = None,
    ) -> None:
        self._runner, self._scheduler, self._limits = runner, scheduler, limits
        self._peaks, self._stop_streams, self._clock = peaks, stop_streams, clock
        self._masks, self._repeated = masks, repeated
        self._drafting = None if drafter is None else Drafting(drafter, masks)
        self._plans = PlanWriter(limits.eos_token_ids, runner.wants)
        self._jump_forward_tokens = 0  # since the last sample
        self._reported = _work_of(masks)  # another engine may have used them before
        self._answers = frozenset({TOKENS})  # what unfinished requests ask for
        self._started = clock()
        self._steps = 0
        self._early = StepOutput()  # what ended before any step
        self._in_flight: deque[InFlight] = deque()  # oldest first; two at most
        self._ended = 0.0  # when the last retired step ended
        self._metering_ns = 0  # spent on the next sample so far

    @property
    def unfinished(self) -> int:
        """Requests that are not finished, and finished ones whose blocks an in-flight step still reads."""
        scheduler = self._scheduler
        return (
            len(scheduler.waiting)
            + len(scheduler.running)
            + len(scheduler.finishing)
            + len(self._early.completions)
        )

    def add(self, requests: Seq[Request]) -> None:
        """Queue requests; they are admitted in this order. Raises ValueError for stop strings without a watcher, a
        prompt that leaves no position for an answer, logits of prompts that may run in parts, and requests for logits
        or scores beside others.
        """
        roots = self._limits.roots
        for request in requests:
            if self._scheduler.config.whole_prompts and (request.params.max_tokens or request.params.scored):
                raise ValueError("an encoder makes vectors, and nothing else")
            if request.params.classified and not self._scheduler.config.whole_prompts:
                raise ValueError("a classification head reads prompts that run as a whole")
            if answer_of(request.params) not in self._answers:
                self._ask_for(answer_of(request.params))
            length = longest_sequence(len(request.prompt), request.params.scored)
            if length + min(1, request.params.max_tokens) > (most := roots.max_model_len):
                raise ValueError(f"a prompt of {length} tokens, and positions for {most}")
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
        """Take answers that other engines of the job gave, from which drafts may come."""
        if self._drafting is not None:
            for tokens in answers:
                self._drafting.drafter.learn(tokens)

    def _ask_for(self, answers: str) -> None:
        """Take requests for such answers, too, from now on."""
        others = self._answers if self.unfinished else frozenset[str]()
        if not go_together({*others, answers}):
            raise ValueError(
                f"an engine that runs requests for {', '.join(sorted(others))} cannot run some for {answers}"
            )
        self._answers = others | {answers}

    def _sequences_of(self, request: Request, watch: StopStream | None) -> list[Sequence]:
        """Make the sequences that a request becomes: one of each branch of its continuations, or a single one."""
        branches = scored_branches(request) if request.params.scored else [(request, None)]
        limits, now = self._limits, self._now()
        return [
            Sequence.of(own, limits.roots, watch, now, limits.eos_token_ids, branch)
            for own, branch in branches
        ]

    def _queue(self, sequence: Sequence) -> End | None:
        """Hand a sequence to the scheduler; how it ends, if it does so before any step."""
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
        """schedule → run → post-process. Returns an empty output when there is nothing to do."""
        output, self._early = self._early, StepOutput()
        if self.begin():
            if self._runner.looks_ahead and self._scheduler.has_room() and not self._holds():
                self._launch()
            self._retire(self._in_flight.popleft(), output)
        return output

    def begin(self) -> bool:
        """Launch a step that `step` then finishes, unless one is in flight; whether one is."""
        if not self._in_flight:
            self._launch()
        return bool(self._in_flight)

    @property
    def load(self) -> EngineLoad:
        """Count what it has in work now."""
        scheduler = self._scheduler
        return EngineLoad(len(scheduler.running), len(scheduler.waiting), scheduler.pool.used)

    def drain(self) -> Iterator[StepOutput]:
        """Step until every request is finished."""
        while self.unfinished:
            yield self.step()

    def forget_waiting(self) -> None:
        """Drop the requests that have not been admitted; running ones go on."""
        for sequence in self._scheduler.waiting:
            self._drop_mask(sequence)
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
            raise ValueError("this engine was built without a tokenizer, so it cannot look for stop strings")
        return self._stop_streams(request.params)

    def _constrain(self, sequence: Sequence) -> End | None:
        """Give a sequence its constraint, and the tokens that every such answer begins with; how they end it, if they
        do. Raises ConstraintFailed."""
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
        """Append the tokens that have to come next (jump-forward decoding): the next step runs them as one chunk. Rows
        with log-probabilities sample them, to know how likely they are, and rows that may not get every token, which a
        token that has to come may be. Rows that ask about their prompts must not end before these have run."""
        asks = sequence.logprobs is not None or sequence.prompt_scores is not None
        samples = asks or sequence.request.params.narrowed
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
        """Schedule and launch the next step, if there is one."""
        began = self._now()
        drafting = self._drafting
        waiting = self._repeated is None or self._repeated.may_wait
        drafted = drafting is not None and drafting.before_step(self._scheduler.running, waiting)
        scheduled = self._scheduler.schedule(drafted)
        if not scheduled.chunks:
            return
        step = InFlight.of(scheduled, began)
        runs = self._runs(step)
        if not self._in_flight and runs is None:
            self._account(step)
        step.launched_s = self._now()
        shares = self._runner.wants.shared_blocks
        shared = self._scheduler.shared_blocks(scheduled.chunks) if shares else 0
        plan = self._plans.of(scheduled, step.sampling, shared, step.read, step.asked)
        if runs is not None:
            plan = replace(plan, repeats=np.array(runs, np.int32))
            step.run_on(runs)
        step.result = self._runner.launch(plan)
        self._scheduler.launched(scheduled)
        if self._repeated is not None:
            self._repeated.launched(step.repeats)
        self._scheduler.limit_tokens(self._runner.most_tokens)
        self._move_on(step)
        self._in_flight.append(step)

    def _runs(self, step: InFlight) -> list[int] | None:
        """Return how many tokens each sequence of the step is to run before the host sees any of them; None: one. All
        that run have to be in it, and only to decode; none has drafts, or waits for its tokens so as to get some."""
        repeated, scheduler = self._repeated, self._scheduler
        rows = len(step.scheduled.chunks)
        if repeated is None or self._runner.most_tokens is not None:
            return None
        assert self._runner.looks_ahead, "the host does not wait for what it launches at once"
        if not step.only_decodes or rows != len(scheduler.running):
            return None
        if any(sequence.drafting or not sequence.steady for sequence in step.sampling):
            return None
        most = repeated.most(rows, scheduler.cached_tokens)
        return scheduler.run_on(step.scheduled, most) if most > 1 else None

    def _holds(self) -> bool:
        """Whether the next step has to wait for the tokens of the one in flight, for the sake of rows with drafts."""
        return self._drafting is not None and self._drafting.holds(self._scheduler.running)

    def _move_on(self, step: InFlight) -> None:
        for sequence in step.scheduled.admitted:
            if sequence.scheduled_s is None:
                sequence.scheduled_s = step.began_s
        if step.repeats > 1:
            self._run_ahead(step)
        elif self._runner.looks_ahead:
            self._look_ahead(step)

    def _look_ahead(self, step: InFlight) -> None:
        """Prepare the sequences for a step that is scheduled before this one's tokens are known: with placeholders for
        these, behind which it can run on."""
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

    def _run_ahead(self, step: InFlight) -> None:
        """Prepare the sequences of steps that are launched at once for one behind them."""
        zeros = [array("i", [0] * count) for count in range(step.repeats + 1)]
        for sequence, _, length in step.scheduled.chunks:
            tokens = sequence.tokens
            tokens.extend(zeros[length])
            sequence.placeholders += length
            if len(tokens) >= sequence.max_length:
                self._scheduler.stop(sequence)

    def _retire(self, step: InFlight, output: StepOutput) -> None:
        """Wait for a step's tokens and append them to their sequences."""
        assert step.result is not None
        tokens, sampling = step.result.tokens(), step.sampling
        if step.asked or step.read:
            self._take_asked(step, step.result)
            tokens = tokens if sampling else []
        logprobs = {sampling[place]: found for place, found in step.result.logprobs().items()}
        ready = self._now()
        take = self._take_all if step.repeats == 1 else self._take_runs
        ends = take(step, tokens, logprobs, ready)
        counts = {taken.sequence: taken.count for taken in step.irregular}
        for place, barred in step.result.barred().items():  # of the tokens that it took
            sampling[place].masking.note(any(barred[: counts.get(sampling[place], len(barred))]))
        if step.irregular or step.repeats > 1:
            self._account(step)
        for taken in step.irregular:
            self._take_back(taken)
        for sequence, end in ends:
            self._finish(sequence, end, ready, output)
        for sequence in step.completed:
            self._finish(sequence, prompt_end(sequence), ready, output)
        for sequence in step.dropped:
            self._scheduler.release(sequence)
        output.samples = self._samples(step, ready)
        if self._drafting is not None:
            output.samples = [*map(self._drafting.drafter.stepped, output.samples)]
        self._ended = output.samples[-1].started_s + output.samples[-1].duration_s
        self._steps += len(output.samples)
        if self._repeated is not None:
            given = sum(sample.sampled_tokens for sample in output.samples)
            self._repeated.note(given, len(output.completions))
        if self._in_flight and self._in_flight[0].repeats == 1:
            self._account(self._in_flight[0])

    def _take_asked(self, step: InFlight, result: Launched) -> None:
        """Give each chunk the hidden states or the scores that it asked for."""
        for place, own in result.states().items():
            step.asked[place].sequence.pool(step.asked[place].start, own)
        scores, begun = result.scores(), 0
        for sequence, start, length in step.asked:
            if sequence.scored is not None:
                begun += sequence.scored.take(start, start + length, scores, begun)
        for sequence, start, length in step.read:
            if sequence.prompt_scores is not None:
                begun += sequence.prompt_scores.take(start, start + length, scores, begun)

    def _take_all(
        self,
        step: InFlight,
        tokens: list[list[int]],
        logprobs: Mapping[Sequence, TokenLogprobs],
        now: float,
    ) -> list[tuple[Sequence, End]]:
        """Append a step's tokens to their sequences; those that end with them."""
        ends, dropped = [], step.dropped
        for sequence, given in zip(step.sampling, tokens, strict=True):
            if dropped and sequence in dropped:
                continue
            if len(given) == 1 and not (sequence.watched or sequence.drafts or given[0] == NO_TOKEN):
                reason = sequence.take_unwatched(given[0], now)  # nearly always
                if reason is not None:
                    ends.append((sequence, End(reason)))
                continue
            found = logprobs[sequence] if sequence.logprobs is not None else None
            if len(given) == 1 and not sequence.drafts:
                sequence.tokens_known()
                end = self._append(sequence, given[0], now, found) or self._jump_forward(sequence, now)
            else:
                taken = self._take(sequence, given, now, found)
                step.irregular.append(taken)
                end = taken.end
            if end is not None:
                ends.append((sequence, end))
        return ends

    def _take_runs(
        self,
        step: InFlight,
        tokens: list[list[int]],
        logprobs: Mapping[Sequence, TokenLogprobs],
        now: float,
    ) -> list[tuple[Sequence, End]]:
        """Append the tokens of several steps that were launched at once; the sequences that end with them."""
        assert not logprobs, "rows that ask for log-probabilities run one token at a time"
        ends = []
        for sequence, given in zip(step.sampling, tokens, strict=True):
            if sequence in step.dropped:
                continue
            if not sequence.watched and sequence.take_run(given, now):
                if len(sequence.tokens) - sequence.placeholders >= sequence.max_length:
                    ends.append((sequence, End("length")))
                continue
            for count, token in enumerate(given, 1):
                if (end := self._append(sequence, token, now, None)) is not None:
                    sequence.drop_placeholders(len(given) - count)
                    step.cut[sequence] = count
                    ends.append((sequence, end))
                    break
        return ends

    def _take(
        self, sequence: Sequence, tokens: list[int], now: float, logprobs: TokenLogprobs | None
    ) -> AcceptedTokens:
        """Append any number of tokens to a sequence, up to the one that ends it. Later tokens are dropped."""
        if sequence.placeholders:
            raise ValueError(
                f"a step gave {len(tokens)} tokens to a sequence that the next step runs already"
            )
        sequence.tokens_known()
        drafts = sequence.tokens[len(sequence) - sequence.drafts :]
        taken = AcceptedTokens(sequence, sequence.known_length, drafts, sequence.draft_parents)
        sequence.drop_drafts()
        for at, token in enumerate(tokens):
            taken.add(token)
            taken.end = self._append(sequence, token, now, logprobs, at)
            if taken.end is None and sequence.constraint is not None:
                before = len(sequence)
                taken.end = self._jump_forward(sequence, now)
                if len(sequence) > before:  # the step sampled what has to come
                    break
            if taken.end is not None:
                break
        if self._drafting is not None:
            self._drafting.verified(taken)
        return taken

    def _append(
        self, sequence: Sequence, token: int, now: float, logprobs: TokenLogprobs | None, at: int = 0
    ) -> End | None:
        """Append a token and its own of the `logprobs` to its sequence; how the sequence ends, if the token ends it."""
        if token == NO_TOKEN:
            sequence.take_none()
            return without_token(sequence, self._limits.eos_token_ids, self._masks)
        sequence.take(token)
        if sequence.logprobs is not None and logprobs is not None:
            sequence.logprobs.append(logprobs, at)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        kept = sequence.stop_stream(token) if sequence.stop_stream else None
        reason = sequence.ends_with(token) if kept is None else "stop"
        if sequence.constraint is not None:
            end = constrained_end(sequence.constraint, token, reason, kept)
            if end is None and sequence.constraint.over:
                self._release(sequence)
            return end
        return End(reason, kept) if reason else None

    def _release(self, sequence: Sequence) -> None:
        """Let a sequence go on without its constraint, which bars nothing any more: steps may look ahead of it."""
        self._drop_mask(sequence)
        sequence.constraint = sequence.mask = None
        sequence.watched = sequence.stop_stream is not None or sequence.logprobs is not None
        sequence.needs_sync = _needs_sync(sequence)

    def _take_back(self, taken: AcceptedTokens) -> None:
        """Give up the positions that were computed for rejected tokens."""
        if taken.end is None:
            self._scheduler.take_back(taken.sequence, taken.useful_end)

    def _finish(self, sequence: Sequence, end: End, now: float, output: StepOutput) -> None:
        self._let_go(sequence)
        self._drop_mask(sequence)
        if self._drafting is not None:
            self._drafting.drafter.ended(sequence)
        if ends_request(sequence, end):
            output.completions.append(completion(sequence, end))
            output.requests.append(request_sample(sequence, end, now))

    def _let_go(self, sequence: Sequence) -> None:
        """Remove a finished sequence. If the in-flight step runs it, its blocks are freed when that step has ended."""
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
            self._drafting.forget(sequence)
        if sequence.mask is not None and self._masks is not None:
            self._masks.drop(sequence.mask)

    def _account(self, step: InFlight) -> None:
        """Compute the shape of the step's useful work, while its sequences still hold the blocks that it reads."""
        began = time.perf_counter_ns()
        if step.repeats > 1:
            step.shapes = self._shapes(step.useful_runs, step.repeats)
            self._metering_ns += time.perf_counter_ns() - began
            return
        chunks, sampled = step.useful, len(step.sampling) - len(step.dropped) + step.scored_positions
        if step.dropped:
            dropped = step.dropped
            chunks = [c for c in chunks if c[0] not in dropped]  # half of what c.sequence takes
        if step.irregular:
            rejected = {taken.sequence: taken.rejected for taken in step.irregular}
            cut = (Chunk(s, start, length - rejected.get(s, 0)) for s, start, length in chunks)
            chunks = [c for c in cut if c.length]
            sampled += sum(taken.count - 1 for taken in step.irregular)
        # A step that is counted again, with what its drafts came to, may have sequences that were preempted meanwhile:
        # what they shared is not known any more
        holding = [c for c in chunks if c[0].tables] if step.irregular else chunks
        shared, copied = self._scheduler.shared_blocks(holding), step.scheduled.copied_tokens
        cost = self._runner.cost
        names = [c[0].request.params.adapter for c in chunks] if cost.adapted else []
        shape = step_shape(chunks, sampled, shared, self._runner.layout, copied, cost.causal, names)
        step.shapes = [shape]
        self._metering_ns += time.perf_counter_ns() - began

    def _shapes(self, runs: list[Chunk], repeats: int) -> list[StepShape]:
        """Return the shapes of steps that were launched at once, in which sequences ran so many tokens."""
        cost, shared_blocks = self._runner.cost, self._scheduler.shared_blocks
        names = [s.request.params.adapter for s, _, _ in runs] if cost.adapted else []
        alive, shared, found = -1, 0, list[StepShape]()
        for at in range(repeats):
            own = [n > at for _, _, n in runs]
            if (count := sum(own)) != alive:  # what rows share does not change as long as all of them run
                chunks, alive = list(compress(runs, own)), count
                shared = shared_blocks(chunks)
                starts = np.array([start for _, start, _ in chunks], np.int64)
            adapters = list(compress(names, own))
            found.append(decode_shape(starts + at, shared, self._runner.layout, adapters))
        return found

    def _new_work(self) -> ConstraintWork:
        """Count what constraints took since this was last asked."""
        if self._masks is None:
            return _NO_WORK
        now, before = _work_of(self._masks), self._reported
        self._reported = now
        return ConstraintWork(now.compile_s - before.compile_s, now.mask_s - before.mask_s)

    def _samples(self, step: InFlight, ready: float) -> list[StepSample]:
        """Measure a retired step, or each of those that were launched at once, which are taken to be equally long."""
        sample = self._sample(step, ready)
        if step.repeats == 1:
            return [sample]
        assert step.result is not None
        rows = len(step.sampling) * step.repeats + step.result.padded_tokens
        return divided_samples(sample, step.shapes, rows, self._runner.cost, self._peaks)

    def _sample(self, step: InFlight, ready: float) -> StepSample:
        """Measure a retired step, with the time of all that were launched at once. The time of overlapping steps is
        split where the earlier one ended."""
        metering, self._metering_ns = time.perf_counter_ns() - self._metering_ns, 0
        assert step.result is not None
        shape, pool, began = step.shapes[0], self._scheduler.pool, max(step.began_s, self._ended)
        unused = len(step.dropped) + sum(taken.rejected for taken in step.irregular)
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


def _work_of(masks: ConstraintMasks | None) -> ConstraintWork:
    """Copy the counts of what constraints took so far: they count on."""
    return _NO_WORK if masks is None else replace(masks.constraints.work)


def _needs_sync(sequence: Sequence) -> bool:
    return sequence.mask is not None or sequence.looks_back


def _is_guided(request: Request) -> bool:
    """Whether the request's answer follows a constraint, or has reasoning with an end that may be forced."""
    return request.params.constraint is not None or request.params.reasoning is not None
