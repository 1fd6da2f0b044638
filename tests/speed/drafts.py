"""Decode steps with and without drafts, in turns, on a random model of 135M weights.

A row's prompt is a text of 300 tokens, and its answer nearly the same text. The model runs, but its tokens are
replaced by those of the answer. An engine with drafts has answered the same number of other rows before. `bound`:
speedup that the roofline allows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
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
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.runner.runner import LaunchedStep
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.models.ops.peaks import measure_peaks
from batchinfer_kernels.cost import Peaks
from tests.model_costs import llama_cost
from tests.speed.draft_bounds import best_gain, step_seconds
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import Metrics, compared

SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
TEXT, TOKENS = 300, 8000  # length of a prompt and of its answer; size of the vocabulary in use
VOCAB = 49_152


@cache
def loaded(folder: Path, dtype: str, rows: int) -> tuple[LoadedModel, Peaks]:
    """Write and load a model for a number of rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=30,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **SIZES,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    load, found = LoadConfig(folder, dtype, "cpu"), measure_peaks("cpu", (dtype,))
    peaks = Peaks(found.peak_flops[dtype], found.bandwidth)
    engine = EngineConfig(load, 1024, 2 * TEXT + 8, max_num_seqs=rows, kv_memory=1 << 31, peaks=peaks)
    return load_weights(load).model(engine), peaks


def decoded(engine: Engine, requests: Iterable[Request]) -> Metrics:
    """Return seconds and number of decode steps, verified and accepted drafts, and seconds of draft sources."""
    engine.add(list(requests))
    found = {"decode_s": 0.0, "steps": 0, "drafted": 0, "right": 0, "proposing_s": 0.0}
    while engine.unfinished:
        began = time.perf_counter()
        sample = engine.step().sample
        if sample is not None and not sample.prefill_tokens:
            took = time.perf_counter() - began
            own = (took, 1, sample.drafted_tokens, sample.accepted_tokens, sample.proposing_s)
            found = {name: value + more for (name, value), more in zip(found.items(), own, strict=True)}
    return found


def request(rng: random.Random) -> Request:
    """Return a request with a random prompt."""
    prompt = np.array([rng.randrange(TOKENS) for _ in range(TEXT)], np.int32)
    return Request(rng.randbytes(32), prompt, SamplingParams(max_tokens=TEXT, ignore_eos=True))


class Scripted:
    """A runner and its model. Its argmax is computed, and replaced by the next token of a row's answer."""

    def __init__(self, runner: Any, answers: Mapping[bytes, list[int]]) -> None:
        self._model, self._answers, self._tokens = runner.model, answers, list[int]()
        self._inner = replace(runner, model=self, wants=runner.wants._replace(requests=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        assert plan.requests is not None
        lengths = plan.chunk_lengths
        own = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(own)) - (np.cumsum(lengths) - lengths)[own]
        at = places + plan.starts[own] + 1 - TEXT
        sampled = range(len(own)) if plan.sampled is None else plan.sampled.tolist()
        self._tokens = [self._answers[plan.requests[own[row]][0]][int(at[row])] for row in sampled]
        launched: LaunchedStep = self._inner.launch(plan)
        return launched

    def forward(self, *given: Any) -> Tensor:
        hidden: Tensor = self._model.forward(*given)
        return hidden

    def argmax(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._model.argmax(hidden)
        return found * 0 + torch.tensor(self._tokens)


def scripted(rows: int, edited: float, seed: int) -> tuple[list[Request], dict[bytes, list[int]]]:
    """Return requests and their answers: the prompts, with a share of the tokens replaced."""
    rng = random.Random(seed)
    requests = [request(rng) for _ in range(rows)]
    return requests, {
        one.key: [rng.randrange(TOKENS) if rng.random() < edited else token for token in one.prompt.tolist()]
        for one in requests
    }


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each number of rows."""
    return [(f"{rows} rows", partial(_copying, section, rows)) for rows in section.given.rows]


def _copying(section: BenchSection, rows: int) -> list[Result]:
    given = section.given
    plain, peaks = loaded(section.place, given.dtype, max(given.rows))

    def run(drafts: Any, seed: int) -> Metrics:
        before, known = scripted(rows, given.edited, seed + 1000)
        requests, answers = scripted(rows, given.edited, seed)
        runner: Any = Scripted(plain.runner, known | answers)
        engine = replace(plain, drafts=drafts).engine(peaks, runner=runner)
        if drafts:
            decoded(engine, before)
        return decoded(engine, requests)

    size = getattr(torch, given.dtype).itemsize
    cost = llama_cost(30, 576, 1536, 9, 3, 64, VOCAB, size, size)
    bound = best_gain(partial(step_seconds, cost, peaks, 3 * TEXT // 2), rows, 1 - given.edited)
    ways = {"without": partial(run, ()), "with": partial(run, ("prompt", "answers"))}
    return compared(f"{rows} rows", ways, given.rounds, "decode_s", bound=bound)
