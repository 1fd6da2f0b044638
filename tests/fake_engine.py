"""An engine without a model, whose answers are a function of the prompt.

It does not import torch, which takes ten times the rest of its process: hundreds of tests start it.
"""

from __future__ import annotations

import builtins
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from batchinfer.core import errors
from batchinfer.core.request import (
    Completion,
    FinishReason,
    Request,
    RowError,
    Scores,
    TokenIds,
    TokenLogprobs,
    Tokens,
    Vector,
)
from batchinfer.core.samples import ExpertTokens, RequestSample, StepSample
from batchinfer.engine.config import Agreed, EngineConfig, EngineInfo, LoadConfig, Untimed, choose_alone
from batchinfer.engine.schedule.constraints import ConstraintsFor
from batchinfer.engine.schedule.sequence import StopStreams
from tests.batchinfer.child_tasks import break_the_next_message

T = TypeVar("T", int, float, str)
BATCH = 512
NEVER, MANY = -1, 1_000_000
EXITS = 3  # the exit status of a process that dies of itself
End = Callable[
    [int], object
]  # ends the engine's process; a code as `batchinfer.machine.spawning.Ended` has it


@dataclass
class FakeOutput:
    """A fake batchinfer.engine.loop.engine.StepOutput."""

    completions: list[Completion]
    requests: list[RequestSample]
    samples: list[StepSample]


@dataclass(frozen=True)
class BuiltFake:
    """A fake batchinfer.engine.load.build.BuiltEngine."""

    engine: FakeEngine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens] = dict
    account: None = None


def answer(request: Request) -> np.ndarray:
    """Return the prompt's last tokens in reverse order, at most max_tokens."""
    return request.prompt[::-1][: min(request.params.max_tokens, 8)].copy()


def hardness(prompt: Sequence[int], levels: int) -> int:
    """Return the temperature in tenths at which a prompt gets a complete answer, from 0 to levels - 1."""
    return int(np.sum(np.asarray(prompt, np.int64))) % levels


def is_truncated(request: Request) -> bool:
    """Return True if the answer is truncated: with FAKE_ENGINE_LEVELS, if its temperature is too low."""
    levels = _asked("LEVELS", 1)
    return levels > 1 and round(10 * request.params.temperature) < hardness(request.prompt, levels)


def logprobs(request: Request) -> TokenLogprobs | None:
    """Return log-probabilities: token t has -t / 64, and the top tokens of each position are t, t + 1, …"""
    if request.params.logprobs is None:
        return None
    tokens = answer(request)
    top_ids = (tokens[:, None] + np.arange(request.params.logprobs, dtype=np.int32)[None]) % 256
    return TokenLogprobs((-tokens / 64).astype(np.float32), (-top_ids / 64).astype(np.float32), top_ids)


def vector(request: Request) -> Vector:
    """Return the counts of the prompt's tokens modulo 48; for a classified prompt only the count of remainder
    0."""
    found = np.bincount(request.prompt % 48, minlength=48).astype(np.float32)
    return Vector(found[:1] if request.params.classified else found)


def scores(request: Request) -> Scores:
    """Return scores: token t has -t / 64, and is greedy if it is even."""
    tokens = request.prompt[-sum(request.params.scored) :]
    return Scores((-tokens / 64).astype(np.float32), tokens % 2 == 0, request.params.scored)


def _asked(name: str, default: T) -> T:
    """Return the environment variable FAKE_ENGINE_`name`, or the default."""
    return type(default)(os.environ.get(f"FAKE_ENGINE_{name}", default))


def _may_die() -> bool:
    """Return True if faults that end the process are enabled.

    They are in the first FAKE_ENGINE_DEATHS starts, counted in the file FAKE_ENGINE_STARTS, or in all starts
    without that file.
    """
    path = _asked("STARTS", "")
    if not path:
        return True
    with open(path, "a+b") as file:
        file.seek(0)
        before = len(file.read())
        file.write(b".")
    return before < _asked("DEATHS", 0)


def _wait_for_others() -> None:
    """Wait until FAKE_ENGINE_TOGETHER engines have started, counted in the file FAKE_ENGINE_STARTS.

    Otherwise the first engine could do all the work.
    """
    wanted = _asked("TOGETHER", 0)
    while wanted and len(Path(_asked("STARTS", "")).read_bytes()) < wanted:
        time.sleep(0.01)


def end_process(code: int) -> None:
    """End this process with an exit status, or by signal -code."""
    if code < 0:
        os.kill(os.getpid(), -code)
        time.sleep(60)
    os._exit(code)


def _die(end: End) -> None:
    """End by the signal FAKE_ENGINE_DIES_BY, or with an exit status."""
    signum = _asked("DIES_BY", 0)
    end(-signum if signum else EXITS)


class FakeEngine:
    """An engine without a model that runs `BATCH` requests per step. Environment variables request faults."""

    def __init__(
        self, untimed: Untimed = nullcontext, end: End = end_process, mortal: bool | None = None
    ) -> None:
        """Wait for other engines if the environment asks for it.

        Args:
            mortal: whether faults may end the process; None to read the environment.
        """
        self._untimed, self._end = untimed, end
        mortal = _may_die() if mortal is None else mortal
        _wait_for_others()
        if not mortal:  # the start that takes the place of one that died
            time.sleep(_asked("RELOAD_S", 0.0))
        self._waiting: deque[tuple[Request, float]] = deque()  # and when it came
        self._started, self._counted_s = time.perf_counter(), 0.0
        self._steps = 0
        self._delay_s = _asked("DELAY_S", 0.0)
        self._delay_file = Path(_asked("DELAY_FILE", os.devnull))  # its seconds are added in each step
        self._counts = bool(_asked("COUNTS_TIME", 0))  # a step takes its delay to the bit, and no time
        self._die_at = _asked("DIES_AT_STEP", NEVER) if mortal else NEVER
        # hangs at this step of a start that may die, or in every start at a prompt of more tokens
        self._hang_at = _asked("HANGS_AT_STEP", NEVER) if mortal else NEVER
        self._hangs_of = _asked("HANGS_OF_MORE_TOKENS", MANY)
        self._dies_after = _asked("DIES_AFTER_ROWS", MANY)  # that were computed in all starts, by the log
        self._dies_of = _asked("DIES_OF_MORE_TOKENS", MANY)  # of any prompt, in every start
        self._raises = _asked("RAISES", "")  # the name of an exception: raised instead of dying
        self._log = Path(_asked("LOG", os.devnull))  # gets the key of every request that is computed
        self._fail_every = _asked("FAILS_EVERY", 0)
        self._batch = _asked("BATCH", BATCH)

    @property
    def unfinished(self) -> int:
        return len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        self._waiting.extend((request, self._now()) for request in requests)

    def learn(self, answers: Sequence[TokenIds]) -> None:
        """Ignore other engines' answers."""

    def forget_waiting(self) -> None:
        """Die here if a fault was requested: the driver tells a worker to stop."""
        if _asked("DIES_LEAVING", 0):
            _die(self._end)
        self._waiting.clear()

    def step(self) -> FakeOutput:
        if self._log.exists() and len(self._log.read_text().split()) >= self._dies_after:
            _die(self._end)
        if self._steps == self._hang_at or any(len(r.prompt) > self._hangs_of for r, _ in self._waiting):
            self._hang()
        if self._steps == self._die_at:
            self._break_down()
        began = self._now()
        self._delay()
        taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
        if any(len(request.prompt) > self._dies_of for request, _ in taken):
            _die(self._end)
        with open(self._log, "a") as log:
            log.writelines(f"{request.key.hex()}\n" for request, _ in taken)
        completions = [self._complete(r) for r, _ in taken]
        tokens = sum(len(r.prompt) for r, _ in taken)
        sampled = sum(len(c.tokens.token_ids) for c in completions)
        ended = self._now()
        requests = [_request(r, queued, began, ended) for r, queued in taken]
        decodes = sum(max(0, len(c.tokens.token_ids) - 1) for c in completions)
        sample = _step(self._steps, (began, ended), (tokens, decodes, sampled), len(self._waiting))
        self._steps += 1
        return FakeOutput(completions, requests, [sample])

    def _break_down(self) -> None:
        """Raise the requested exception, die in the next message, or die now."""
        if self._raises:
            raise getattr(builtins, self._raises)("the fake engine was asked to raise it")
        if _asked("DIES_SENDING", 0):
            break_the_next_message()
        else:
            _die(self._end)

    def _hang(self) -> None:
        """Hang, by default forever. With FAKE_ENGINE_HANG_UNTIMED, first disable the watchdog."""
        with self._untimed() if _asked("HANG_UNTIMED", 0) else nullcontext():
            time.sleep(_asked("HANG_S", 3600.0))

    def _delay(self) -> None:
        self._counted_s += self._delay_s
        if not self._counts:
            time.sleep(self._delay_s + float(self._delay_file.read_text() or 0))

    def _now(self) -> float:
        return self._counted_s if self._counts else time.perf_counter() - self._started

    def _complete(self, request: Request) -> Completion:
        if self._fail_every and int.from_bytes(request.key[:4], "big") % self._fail_every == 0:
            problem = RowError("fake_failure", "engine", "the fake engine was asked to fail", retryable=True)
            return Completion(request.key, None, "error", problem)
        if request.params.pooling is not None:
            return Completion(request.key, vector(request), "stop")
        if request.params.scored:
            return Completion(request.key, scores(request), "stop")
        output = Tokens(answer(request), logprobs=logprobs(request))
        if is_truncated(request) and request.params.constraint is not None:
            problem = RowError("incomplete_output", "policy", "the fake engine has truncated the answer")
            return Completion(request.key, output, "error", problem)
        reason: FinishReason = "length" if is_truncated(request) else "stop"
        return Completion(request.key, output, reason)


def _request(request: Request, queued: float, began: float, ended: float) -> RequestSample:
    tokens = len(request.prompt), len(answer(request))
    truncated = is_truncated(request)
    return RequestSample(request.key, *tokens, 0, 0, queued, began, ended, ended, cut=truncated)


def _step(step: int, times: tuple[float, float], tokens: tuple[int, int, int], waiting: int) -> StepSample:
    (began, ended), (read, decodes, sampled) = times, tokens
    return StepSample(
        step=step,
        started_s=began,
        duration_s=ended - began,
        model_s=ended - began,
        prefill_tokens=read,
        decode_tokens=decodes,
        recomputed_tokens=0,
        cached_tokens=0,
        sampled_tokens=sampled,
        padded_tokens=0,
        running=0,
        waiting=waiting,
        preemptions=0,
        blocks_used=0,
        blocks_total=1,
        flops=1000,
        bytes=1000,
        roofline_s=None,
        scheduled_s=began,
    )


@dataclass(frozen=True)
class FakeWeights:
    """A fake batchinfer.engine.load.build.LoadedWeights."""

    load: LoadConfig
    untimed: Untimed
    end: End
    mortal: bool

    def engine(
        self, config: EngineConfig, stop_streams: StopStreams | None = None, agreed: Agreed = choose_alone
    ) -> BuiltFake:
        if meddled := _asked(
            "MEDDLES_WITH", ""
        ):  # a file of the input: somebody appends to it while the engine starts
            with open(meddled, "ab") as file:
                file.write(b'{"id": "late", "text": "late"}\n')
        info = EngineInfo("fake", "cpu", self.load.dtype, 1, 512, 512, 16, 1, 0, 0)
        return BuiltFake(FakeEngine(self.untimed, self.end, self.mortal), info)


def build(
    load: LoadConfig,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    end: End = end_process,
) -> FakeWeights:
    """Return fake weights, instead of `batchinfer.engine.load.build.load_weights`."""
    mortal = _may_die()
    if refusal := _asked("REFUSES", ""):  # the name of an exception of the tree
        raise getattr(errors, refusal)("the fake engine was asked to refuse the checkpoint")
    if mortal and _asked("DIES_LOADING", 0):
        _die(end)
    return FakeWeights(load, untimed, end, mortal)
