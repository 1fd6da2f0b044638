"""Decode steps with drafts and without, in turns, on random models as large as one of 135M."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import BesideConfig, EngineConfig, LoadConfig
from batchinfer.engine.drafts.medusa import HeadsRunner
from batchinfer.engine.load.build import load_weights
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.models.ops.peaks import measure_peaks
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.medusa_heads import heads_of, save_heads
from tests.model_costs import llama_cost
from tests.speed.draft_bounds import HEADS, RIGHT, best, step_seconds
from tests.speed.harness import in_turns, medians, option, ratios, rounds, section, show

SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
TEXT, TOKENS = 300, 8000  # length of a prompt and of its answer; size of the vocabulary in use
VOCAB, HEADS_VOCAB = 49_152, 8192
SMALL_LAYERS, PROMPT, ANSWER = 2, 200, 100
Figures = dict[str, Any]
Way = Callable[[int], Figures]


def make(folder: Path, dtype: torch.dtype, vocab: int, **more: Any) -> LlamaForCausalLM:
    """Write a model, and return it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, num_hidden_layers=30, max_position_embeddings=2048, tie_word_embeddings=True, **SIZES, **more
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return model


def loaded(load: LoadConfig, rows: int, length: int) -> tuple[LoadedModel, Peaks]:
    """Load a model for a number of rows, each of up to `length` tokens."""
    found = measure_peaks("cpu", (load.dtype,))
    peaks = Peaks(found.peak_flops[load.dtype], found.bandwidth)
    config = EngineConfig(load, 1024, length + 8, max_num_seqs=rows, kv_memory=1 << 31, peaks=peaks)
    return load_weights(load).model(config), peaks


def decoded(
    engine: Engine, requests: Iterable[Request], told: Callable[[Engine], None] | None = None
) -> Figures:
    """Return the seconds of the decode steps, their number, the drafts verified and right, and the seconds of
    proposals."""
    engine.add(list(requests))
    found = {"seconds": 0.0, "steps": 0, "drafted": 0, "right": 0, "proposing_s": 0.0}
    while engine.unfinished:
        if told is not None:
            told(engine)
        began = time.perf_counter()
        sample = engine.step().sample
        if sample is not None and not sample.prefill_tokens:
            took = time.perf_counter() - began
            own = (took, 1, sample.drafted_tokens, sample.accepted_tokens, sample.proposing_s)
            found = {name: value + more for (name, value), more in zip(found.items(), own, strict=True)}
    return found


def compared(ways: Mapping[str, Way], count: int, **facts: Any) -> list[Figures]:
    """Run the ways in turns, and return a line for each, with how many times as fast as the first it is."""
    found = in_turns(ways, count)
    seconds = {name: [run["seconds"] for run in runs] for name, runs in found.items()}
    first = seconds[next(iter(ways))]
    return [
        {**facts, "way": name, **medians(runs), "times as fast": ratios(first, seconds[name])}
        for name, runs in found.items()
    ]


def request(rng: random.Random, tokens: int, length: int, answer: int) -> Request:
    """Return a request with a random prompt of `length` tokens and an answer of `answer` tokens."""
    prompt = np.array([rng.randrange(tokens) for _ in range(length)], np.int32)
    return Request(rng.randbytes(32), prompt, SamplingParams(max_tokens=answer, ignore_eos=True))


class Scripted:
    """A runner and its model, whose argmax is computed, and replaced by the next token of a row's answer."""

    def __init__(self, runner: Any, answers: Mapping[bytes, list[int]]) -> None:
        self._model, self._answers, self._tokens = runner.model, answers, list[int]()
        self._inner = replace(runner, model=self, wants=runner.wants._replace(requests=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan) -> Launched:
        assert plan.requests is not None
        lengths = plan.chunk_lengths
        own = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(own)) - (np.cumsum(lengths) - lengths)[own]
        if plan.tree_bits is not None and plan.tree_bits.any():  # of the one row
            places = np.array([int(bits).bit_count() for bits in plan.tree_bits.tolist()])
        at = places + plan.starts[own] + 1 - TEXT
        sampled = range(len(own)) if plan.sampled is None else plan.sampled.tolist()
        self._tokens = [self._answers[plan.requests[own[row]][0]][int(at[row])] for row in sampled]
        launched: Launched = self._inner.launch(plan)
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
    requests = [request(rng, TOKENS, TEXT, TEXT) for _ in range(rows)]
    return requests, {
        one.key: [rng.randrange(TOKENS) if rng.random() < edited else token for token in one.prompt.tolist()]
        for one in requests
    }


@section(
    "drafts",
    option("--dtype", default="bfloat16"),
    option("--edited", default=0.05, help="the share of an answer's tokens that are not its prompt's"),
    option("--rows", default=(1, 2, 4, 8, 64)),
    rounds(7),
)
def copying(given: Namespace, place: Path) -> list[Figures]:
    """Time decode steps of rows that copy their prompts, with drafts and without.

    A row's prompt is a text of 300 tokens, and its answer nearly the same text. All is computed; then each sampled
    token is replaced by the answer's. An engine with drafts has answered the same number of other rows before. `bound`:
    how many times as fast the roofline allows.
    """
    dtype = getattr(torch, given.dtype)
    make(place, dtype, VOCAB)
    plain, peaks = loaded(LoadConfig(place, given.dtype, "cpu"), max(given.rows), 2 * TEXT)

    def run(rows: int, drafts: Any, seed: int) -> Figures:
        before, known = scripted(rows, given.edited, seed + 1000)
        requests, answers = scripted(rows, given.edited, seed)
        runner: Any = Scripted(plain.runner, known | answers)
        engine = replace(plain, drafts=drafts).engine(peaks, runner=runner)
        if drafts:
            decoded(engine, before)
        return decoded(engine, requests)

    cost, lines = llama_cost(30, 576, 1536, 9, 3, 64, VOCAB, dtype.itemsize, dtype.itemsize), list[Figures]()
    for rows in given.rows:
        ways = {"without": partial(run, rows, ()), "with": partial(run, rows, ("prompt", "answers"))}
        _, bound = best(partial(step_seconds, cost, peaks, 3 * TEXT // 2), rows, 1 - given.edited)
        lines += compared(ways, given.rounds, rows=rows, bound=bound)
    show(lines)
    return lines


@section(
    "beside",
    option("--by", default=0.02, help="how much the layers that only the large model has change"),
    option("--rows", default=(1, 8, 64)),
    rounds(3),
)
def beside(given: Namespace, place: Path) -> list[Figures]:
    """Time decode steps with a draft model beside and without.

    The draft model is the first two layers of the model; the others change what they say by a little. Prompts are 200
    random tokens, answers 100 tokens.
    """
    model = make(place / "large", torch.bfloat16, VOCAB, initializer_range=0.05)
    with torch.no_grad():
        for layer in model.model.layers[SMALL_LAYERS:]:
            layer.self_attn.o_proj.weight.mul_(given.by)
            layer.mlp.down_proj.weight.mul_(given.by)
    model.save_pretrained(place / "large")
    model.model.layers = model.model.layers[:SMALL_LAYERS]
    model.config.num_hidden_layers, model.config.layer_types = SMALL_LAYERS, None
    model.save_pretrained(place / "small")
    small = BesideConfig(place / "small", "bfloat16")
    load = LoadConfig(place / "large", "bfloat16", "cpu", beside=small)
    both, peaks = loaded(load, max(given.rows), PROMPT + ANSWER)

    def run(rows: int, drafts: Any, seed: int) -> Figures:
        rng = random.Random(seed)
        requests = [request(rng, VOCAB, PROMPT, ANSWER) for _ in range(rows)]
        return decoded(replace(both, drafts=drafts).engine(peaks), requests)

    lines = list[Figures]()
    for rows in given.rows:  # no row has an earlier answer
        ways = {"without": partial(run, rows, ()), "with": partial(run, rows, ("earlier",))}
        lines += compared(ways, given.rounds, rows=rows)
    show(lines)
    return lines


class GivenHeads:
    """Heads that are computed, and whose candidates are then right as often as RIGHT says."""

    def __init__(self, own: Any, answers: Mapping[bytes, list[int]], seed: int) -> None:
        self.own, self.heads, self.answers, self.random = own, own.heads, answers, random.Random(seed)
        self.running = list[Sequence]()

    def watch(self, engine: Engine) -> None:
        self.running = [*engine._scheduler.running] or self.running

    def tokens(self, states: Tensor, count: int, ranks: int = 1) -> Tensor:
        found: Tensor = self.own.tokens(states, count, ranks) * 0 + torch.arange(
            HEADS_VOCAB - ranks, HEADS_VOCAB
        )
        row = self.running[0]
        for head, token in enumerate(self.answers[row.request.key][row.output_length :][:count]):
            draw = self.random.random()
            for rank, chance in enumerate(RIGHT[head]):
                draw -= chance
                if draw < 0:
                    if rank < ranks:
                        found[0, head, rank] = token
                    break
        return found


def _with_heads(model: LoadedModel, peaks: Peaks, before: int, way: str, seed: int) -> Figures:
    """Time the decode steps of one row. The engine has answered some others."""
    requests, answers = scripted(before + 1, 1.0, seed)
    runner: Any = Scripted(model.runner, answers)
    assert isinstance(model.beside, HeadsRunner)
    heads: Any = GivenHeads(model.beside.heads, answers, seed)
    drafts: Any = () if way == "none" else ("earlier",)  # the row has no earlier answer
    own = replace(model.beside, heads=heads, branches=way == "tree")
    engine = replace(model, beside=own, drafts=drafts).engine(peaks, runner=runner)
    return [decoded(engine, [one], heads.watch) for one in (requests if drafts else requests[-1:])][-1]


@section(
    "trees", option("--before", default=3, help="rows that an engine with drafts has answered"), rounds(3)
)
def trees(given: Namespace, place: Path) -> list[Figures]:
    """Time decode steps of one row with trees of drafts, with chains of them and with none.

    The model is in float32 and has a small vocabulary; its heads are a fifth of it. All is computed, the heads too;
    then each sampled token is replaced by a given answer's, and the heads' candidates by ones that are right as often
    as RIGHT says.
    """
    make(place / "model", torch.float32, HEADS_VOCAB)
    save_heads(place / "heads", heads_of(SIZES["hidden_size"], HEADS_VOCAB, HEADS, 1), 1)
    load = LoadConfig(place / "model", "float32", "cpu", heads=place / "heads")
    model, peaks = loaded(load, 8, 2 * TEXT)
    run = partial(_with_heads, model, peaks, given.before)
    run("tree", 99)  # nothing is cold then
    ways = {way: partial(run, way) for way in ("none", "chain", "tree")}
    lines = compared(ways, given.rounds)
    show(lines)
    return lines
