"""Times a job that copies its prompts, with drafts and without, in turns; the model is as large as one of 135M, and its
answers are given.

python -m tests.batchinfer.engine.draft_times FOLDER [pairs] [dtype] [share of tokens that are edited] [rows ...]

FOLDER has a checkpoint. A row's prompt is a text of 300 tokens, and its answer the same text, of which a share of the
tokens is another one. All is computed; then each sampled token is replaced by the answer's. An engine with drafts has
answered as many other rows before those that are timed. A line ends with what the roofline allows, and the share of it
that is reached.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.load.build import load_weights
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.step_plan import COMPUTES, StepPlan
from batchinfer.machine.hardware import detect
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.draft_bounds import best, step_seconds
from tests.model_costs import llama_cost

TEXT, VOCAB = 300, 30_000


class Scripted:
    """A runner and its model, whose argmax is computed, and replaced by the next token of a row's answer."""

    def __init__(self, runner: Any, answers: Mapping[bytes, list[int]]) -> None:
        self._model, self._answers, self._tokens = runner.model, answers, list[int]()
        self.inner = replace(runner, model=self, wants=COMPUTES._replace(requests=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: StepPlan) -> Launched:
        assert plan.requests is not None
        lengths = plan.chunk_lengths
        own = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(own)) - (np.cumsum(lengths) - lengths)[own] + plan.starts[own]
        sampled = range(len(own)) if plan.sampled is None else plan.sampled.tolist()
        self._tokens = [
            self._answers[plan.requests[own[at]][0]][int(positions[at]) + 1 - TEXT] for at in sampled
        ]
        launched: Launched = self.inner.launch(plan)
        return launched

    def forward(self, *given: Any) -> Tensor:
        hidden: Tensor = self._model.forward(*given)
        return hidden

    def argmax(self, hidden: Tensor) -> Tensor:
        return self._model.argmax(hidden) * 0 + torch.tensor(self._tokens)


def work(rows: int, edited: float, seed: int) -> tuple[list[Request], dict[bytes, list[int]]]:
    """Return requests and their answers."""
    rng, answers, requests = random.Random(seed), dict[bytes, list[int]](), list[Request]()
    for _ in range(rows):
        text = [rng.randrange(VOCAB) for _ in range(TEXT)]
        key = rng.randbytes(32)
        answers[key] = [rng.randrange(VOCAB) if rng.random() < edited else token for token in text]
        params = SamplingParams(max_tokens=TEXT, ignore_eos=True)
        requests.append(Request(key, np.array(text, np.int32), params))
    return requests, answers


def timed(
    loaded: LoadedModel, peaks: Peaks, rows: int, edited: float, seed: int
) -> tuple[float, int, int, int]:
    """Return the seconds of the decode steps, their number, and the drafts verified and right."""
    before, known = work(rows, edited, seed + 1000)
    requests, answers = work(rows, edited, seed)
    scripted: Any = Scripted(loaded.runner, known | answers)
    engine = loaded.engine(peaks, runner=scripted)
    if loaded.drafts:
        engine.add(before)
        while engine.unfinished:
            engine.step()
    engine.add(requests)
    took, steps, drafted, right = 0.0, 0, 0, 0
    while engine.unfinished:
        began = time.perf_counter()
        sample = engine.step().sample
        if sample is not None and not sample.prefill_tokens:
            took, steps = took + time.perf_counter() - began, steps + 1
            drafted, right = drafted + sample.drafted_tokens, right + sample.accepted_tokens
    return took, steps, drafted, right


def main(
    folder: str, pairs: str = "7", dtype: str = "bfloat16", edited: str = "0.05", *rows_each: str
) -> None:
    """Print a line for each number of rows."""
    load = LoadConfig(Path(folder), dtype, "cpu")
    peaks = detect("cpu").peaks(dtype, "none")
    assert peaks is not None, "peaks of this machine are unknown: batchinfer doctor --measure"
    config = EngineConfig(load, 1024, 2 * TEXT + 8, max_num_seqs=64, kv_memory=1 << 31, peaks=peaks)
    plain = load_weights(load).model(config)
    drafting = replace(plain, drafts=("prompt", "answers"))
    size = getattr(torch, dtype).itemsize
    cost = llama_cost(30, 576, 1536, 9, 3, 64, 49152, size, size)
    for rows in map(int, rows_each or ("1", "2", "4", "8", "64")):
        found: dict[bool, list[tuple[float, int, int, int]]] = {False: [], True: []}
        for seed in range(int(pairs)):
            for drafts in (False, True):
                found[drafts].append(timed(drafting if drafts else plain, peaks, rows, float(edited), seed))
        without, given = (statistics.median(one[0] for one in found[which]) for which in (False, True))
        ratios = sorted(a[0] / b[0] for a, b in zip(found[False], found[True], strict=True))
        _, steps, drafted, right = found[True][-1]
        seconds = partial(step_seconds, cost, peaks, rows, 3 * TEXT // 2, cost.layers)
        _, bound = best(seconds, rows, 1 - float(edited))
        print(
            f"| {rows} | {without:.2f} | {given:.2f} | {without / given:.2f} × ({ratios[0]:.2f}-{ratios[-1]:.2f}) | "
            f"{TEXT - 1} → {steps} | {right / max(1, drafted):.0%} of {drafted} | {bound:.2f} × | "
            f"{without / given / bound:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
