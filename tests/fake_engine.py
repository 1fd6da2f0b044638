"""An engine without a model: the answer is a function of the prompt. For tests of everything around an engine.

It imports no torch, which takes ten times as long as all else that its process does: hundreds of tests start it.
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

import numpy as np

from batchinfer.core.request import Completion, Request, RowError, TokenLogprobs
from batchinfer.core.samples import ExpertTokens, RequestSample, StepSample
from batchinfer.engine.config import Agreed, EngineConfig, EngineInfo, Untimed, alone
from batchinfer.engine.schedule.constraints import ConstraintsFor
from batchinfer.engine.schedule.sequence import StopStreams
from tests.batchinfer.child_tasks import break_the_next_message

BATCH = 512


@dataclass
class FakeOutput:
    """As batchinfer.engine.loop.engine.StepOutput."""

    completions: list[Completion]
    requests: list[RequestSample]
    sample: StepSample


@dataclass(frozen=True)
class BuiltFake:
    """As batchinfer.engine.load.build.BuiltEngine."""

    engine: FakeEngine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens] = dict


def answer(request: Request) -> np.ndarray:
    """The prompt's last tokens backwards, at most max_tokens of them."""
    return request.prompt[::-1][: min(request.params.max_tokens, 8)].copy()


def logprobs(request: Request) -> TokenLogprobs | None:
    """Of token t -t / 64; the likeliest tokens of each place are t, t + 1, …"""
    if request.params.logprobs is None:
        return None
    tokens = answer(request)
    top_ids = (tokens[:, None] + np.arange(request.params.logprobs, dtype=np.int32)[None]) % 256
    return TokenLogprobs((-tokens / 64).astype(np.float32), (-top_ids / 64).astype(np.float32), top_ids)


def _may_die() -> bool:
    """Whether the faults that end the process are on: in the first FAKE_ENGINE_DEATHS starts, counted in the file
    FAKE_ENGINE_STARTS; without that file in every start.
    """
    path = os.environ.get("FAKE_ENGINE_STARTS")
    if path is None:
        return True
    with open(path, "a+b") as file:
        file.seek(0)
        before = len(file.read())
        file.write(b".")
    return before < int(os.environ["FAKE_ENGINE_DEATHS"])


def _wait_for_others() -> None:
    """Until FAKE_ENGINE_TOGETHER engines have started, by the file FAKE_ENGINE_STARTS: none does the others' work."""
    wanted = int(os.environ.get("FAKE_ENGINE_TOGETHER", "0"))
    while wanted and len(Path(os.environ["FAKE_ENGINE_STARTS"]).read_bytes()) < wanted:
        time.sleep(0.01)


def _die() -> None:
    """As FAKE_ENGINE_DIES_BY says: by that signal, else with exit status 3."""
    if "FAKE_ENGINE_DIES_BY" in os.environ:
        os.kill(os.getpid(), int(os.environ["FAKE_ENGINE_DIES_BY"]))
        time.sleep(60)
    os._exit(3)


class FakeEngine:
    """Steps through what it was given, `BATCH` requests at a time. Faults are asked for by environment variables."""

    def __init__(self, untimed: Untimed = nullcontext) -> None:
        self._untimed, mortal = untimed, _may_die()
        _wait_for_others()
        if not mortal:  # the start that takes the place of one that died
            time.sleep(float(os.environ.get("FAKE_ENGINE_RELOAD_S", "0")))
        if mortal and "FAKE_ENGINE_DIES_LOADING" in os.environ:
            _die()
        self._waiting: deque[tuple[Request, float]] = deque()  # and when it came
        self._started, self._counted_s = time.perf_counter(), 0.0
        self._steps = 0
        self._delay_s = float(os.environ.get("FAKE_ENGINE_DELAY_S", "0"))
        self._counts = (
            "FAKE_ENGINE_COUNTS_TIME" in os.environ
        )  # a step takes its delay to the bit, and no time
        self._die_at = int(os.environ.get("FAKE_ENGINE_DIES_AT_STEP", "-1")) if mortal else -1
        # does nothing any more, at that step of a start that may die; or with any prompt of more tokens, in every start
        self._hang_at = int(os.environ.get("FAKE_ENGINE_HANGS_AT_STEP", "-1")) if mortal else -1
        self._hangs_of = int(os.environ.get("FAKE_ENGINE_HANGS_OF_MORE_TOKENS", "1000000"))
        # once the log has so many requests: of a job's rows, in whichever start
        self._dies_after = int(os.environ.get("FAKE_ENGINE_DIES_AFTER_ROWS", "-1"))
        # of any prompt of more tokens, in every start
        self._dies_of = int(os.environ.get("FAKE_ENGINE_DIES_OF_MORE_TOKENS", "1000000"))
        self._raises = os.environ.get(
            "FAKE_ENGINE_RAISES", ""
        )  # the name of an exception: raised instead of dying
        self._log = os.environ.get(
            "FAKE_ENGINE_LOG"
        )  # a file that gets the key of every request that is computed
        self._fail_every = int(os.environ.get("FAKE_ENGINE_FAILS_EVERY", "0"))
        self._batch = int(os.environ.get("FAKE_ENGINE_BATCH", str(BATCH)))

    @property
    def unfinished(self) -> int:
        return len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        self._waiting.extend((request, self._now()) for request in requests)

    def forget_waiting(self) -> None:
        """A worker is told so before it leaves."""
        if "FAKE_ENGINE_DIES_LEAVING" in os.environ:
            _die()
        self._waiting.clear()

    def _is_spent(self) -> bool:
        """Whether as many rows were computed, in all starts, as ever shall be."""
        if self._dies_after < 0 or self._log is None or not Path(self._log).exists():
            return False
        return len(Path(self._log).read_text().split()) >= self._dies_after

    def step(self) -> FakeOutput:
        if self._is_spent():
            _die()
        if self._steps == self._hang_at or any(len(r.prompt) > self._hangs_of for r, _ in self._waiting):
            self._hang()
        if self._steps == self._die_at:
            if self._raises:
                raise getattr(builtins, self._raises)("the fake engine was asked to raise it")
            if "FAKE_ENGINE_DIES_SENDING" in os.environ:
                break_the_next_message()
            else:
                _die()
        began = self._now()
        self._delay()
        taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
        if any(len(request.prompt) > self._dies_of for request, _ in taken):
            _die()
        if self._log is not None:
            with open(self._log, "a") as log:
                log.writelines(f"{request.key.hex()}\n" for request, _ in taken)
        completions = [self._complete(r) for r, _ in taken]
        tokens = sum(len(r.prompt) for r, _ in taken)
        sampled = sum(len(c.token_ids) for c in completions)
        ended = self._now()
        requests = [_request(r, queued, began, ended) for r, queued in taken]
        decodes = sum(max(0, len(c.token_ids) - 1) for c in completions)
        sample = _step(self._steps, (began, ended), (tokens, decodes, sampled), len(self._waiting))
        self._steps += 1
        return FakeOutput(completions, requests, sample)

    def _hang(self) -> None:
        """Do nothing for so long, which by default is for ever; FAKE_ENGINE_HANG_UNTIMED: and say that it may, as a
        graph's capture does, in which a kernel is compiled."""
        seconds = float(os.environ.get("FAKE_ENGINE_HANG_S", "3600"))
        if "FAKE_ENGINE_HANG_UNTIMED" not in os.environ:
            time.sleep(seconds)
            return
        with self._untimed():
            with self._untimed():
                pass
            time.sleep(seconds)

    def _delay(self) -> None:
        self._counted_s += self._delay_s
        if not self._counts:
            time.sleep(self._delay_s)

    def _now(self) -> float:
        return self._counted_s if self._counts else time.perf_counter() - self._started

    def _complete(self, request: Request) -> Completion:
        if self._fail_every and int.from_bytes(request.key[:4], "big") % self._fail_every == 0:
            problem = RowError("fake_failure", "engine", "the fake engine was asked to fail", retryable=True)
            return Completion(request.key, np.empty(0, np.int32), "error", error=problem)
        return Completion(request.key, answer(request), "stop", logprobs=logprobs(request))


def _request(request: Request, queued: float, began: float, ended: float) -> RequestSample:
    tokens = len(request.prompt), len(answer(request))
    return RequestSample(request.key, *tokens, 0, 0, queued, began, ended, ended)


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


def build(
    config: EngineConfig,
    stop_streams: StopStreams | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = alone,
) -> BuiltFake:
    """Takes the place of `batchinfer.engine.load.build.build_engine`."""
    info = EngineInfo("fake", "cpu", config.dtype, 1, 512, 512, 16, 1, 0, 0, 0.0)
    return BuiltFake(FakeEngine(untimed), info)
