"""Times decode steps with trees of drafts, with chains of them and with none, in turns; and prints what they can gain.

python -m tests.batchinfer.engine.tree_times FOLDER [pairs] | bounds FLOPS BYTES

FOLDER gets a random model in float32, as large as one of 135M but for its vocabulary, and heads, which are a fifth of
it, if it does not have them. All is computed, the heads too; then each sampled token is replaced by that of a given
answer, and the heads' candidates by ones that are right as often as RIGHT says.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from batchinfer.core.request import Request
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.drafts.medusa import RANKS, HeadsRunner, best_shape
from batchinfer.engine.load.build import load_weights
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.runner.runner import Launched
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.machine.hardware import detect
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.draft_bounds import LLAMA_135M, step_seconds
from tests.batchinfer.engine.draft_times import TEXT, work
from tests.batchinfer.medusa_heads import heads_of, save_heads

HEADS, VOCAB = 4, 8192
BEFORE = 3  # rows
# How often the first candidate of each head is right, and the next ones: about as Cai et al., 2024, figure 2 has them
RIGHT = [[first, 0.13, 0.06, 0.03, 0.02] for first in (0.6, 0.5, 0.42, 0.36)]
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


def make(folder: Path) -> None:
    """Make the model and its heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=30,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **SIZES,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    save_heads(folder / "heads", heads_of(SIZES["hidden_size"], config.vocab_size, HEADS, 1), 1)


class Given:
    """A runner whose tokens are computed, and replaced by those of a row's answer; and heads whose candidates are."""

    def __init__(self, loaded: LoadedModel, answers: dict[bytes, list[int]], seed: int) -> None:
        self.model, self.answers = loaded.runner.model, answers
        self.tokens, self.random = list[int](), random.Random(seed)
        assert isinstance(loaded.beside, HeadsRunner)
        self.inner = replace(loaded.runner, model=self)
        self.own, self.heads = loaded.beside.heads, loaded.beside.heads.heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: StepPlan) -> Launched:
        assert plan.requests is not None
        rows = range(len(plan.tokens)) if plan.sampled is None else plan.sampled.tolist()
        ((key, said),) = plan.requests
        bits = [0] * len(plan.tokens) if plan.tree_bits is None else plan.tree_bits.tolist()
        known = said - (len(rows) - 1)
        self.tokens = [
            self.answers[key][known + (int(bits[row]).bit_count() if any(bits) else at)]
            for at, row in enumerate(rows)
        ]
        launched: Launched = self.inner.launch(plan)
        self.left = self.answers[key][known:]
        return launched

    def forward(self, *given: Any) -> Tensor:
        found: Tensor = self.model.forward(*given)
        return found

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.model.argmax(hidden) * 0 + torch.tensor(self.tokens)


class Heads:
    """Heads that are computed, whose candidates are those of answers as often as RIGHT says."""

    def __init__(self, given: Given, said: dict[str, Any]) -> None:
        self.given, self.heads, self.said = given, given.heads, said

    def tokens(self, states: Tensor, count: int, ranks: int = 1) -> Tensor:
        found = self.given.own.tokens(states, count, ranks) * 0 + torch.arange(VOCAB - ranks, VOCAB)
        answer = self.said["answer"]()
        for head, token in enumerate(answer[:count]):
            draw = self.given.random.random()
            for rank, chance in enumerate(RIGHT[head]):
                draw -= chance
                if draw < 0:
                    if rank < ranks:
                        found[0, head, rank] = token
                    break
        return found


def timed(loaded: LoadedModel, peaks: Peaks, way: str, seed: int) -> tuple[float, int, int, int]:
    """Return the seconds of the decode steps of one row, their number, and the drafts verified and right. The engine
    has answered BEFORE others."""
    requests, answers = list[Request](), dict[bytes, list[int]]()
    for number in range(BEFORE + 1):
        (request,), own = work(1, 1.0, seed + 1000 * number)
        answers |= {key: [token % (VOCAB - 99) for token in tokens] for key, tokens in own.items()}
        requests.append(replace(request, prompt=request.prompt % VOCAB))
    given: Any = Given(loaded, answers, seed)
    running = list[Any]()
    heads: Any = Heads(given, {"answer": lambda: answers[running[0].request.key][running[0].output_length :]})
    assert isinstance(loaded.beside, HeadsRunner)
    beside = replace(loaded.beside, heads=heads, branches=way == "tree")
    drafts: Any = () if way == "none" else ("earlier",)  # of which the row has none
    engine = replace(loaded, beside=beside, drafts=drafts).engine(peaks, runner=given)
    for request in requests if drafts else requests[-1:]:
        found = _timed(engine, request, running)
    return found


def _timed(engine: Engine, request: Request, running: list[Any]) -> tuple[float, int, int, int]:
    engine.add([request])
    took, steps, drafted, right = 0.0, 0, 0, 0
    while engine.unfinished:
        running[:] = [*engine._scheduler.running] or running
        began = time.perf_counter()
        sample = engine.step().sample
        took += time.perf_counter() - began if sample and not sample.prefill_tokens else 0.0
        if sample is not None and not sample.prefill_tokens:
            steps, drafted = steps + 1, drafted + sample.drafted_tokens
            right += sample.accepted_tokens
    return took, steps, drafted, right


def bounds(peaks: Peaks) -> None:
    """Print the tokens a second of decode steps with the best tree, and with the best chain, against none."""
    print("| rows | chain | tree of as many | of up to 24 |\n|---|---|---|---|")
    for rows in (1, 2, 4, 8, 16, 64):
        seconds = [step_seconds(LLAMA_135M, peaks, rows, 512, 30, rows * n) for n in range(25)]
        line = []
        for ranks, most in ((1, HEADS), (RANKS, HEADS), (RANKS, 24)):
            chances = best_shape([own[:ranks] for own in RIGHT], most).chances
            gains = [(1 + sum(chances[:n])) * seconds[0] / seconds[n] for n in range(len(chances) + 1)]
            best = max(range(len(gains)), key=gains.__getitem__)
            line.append(f"{gains[best]:.2f} × ({best}, {1 + sum(chances[:best]):.2f} tokens a step)")
        print(f"| {rows} |", " | ".join(line), "|")


def main(folder: str, pairs: str = "3", *more: str) -> None:
    """Print the bounds, or time the ways in turns."""
    if folder == "bounds":
        return bounds(Peaks(float(pairs), float(more[0])))
    path = Path(folder)
    if not (path / "heads").exists():
        make(path)
    load = LoadConfig(path / "model", "float32", "cpu", heads=path / "heads")
    peaks = detect("cpu").peaks("float32", "none")
    assert peaks is not None, "doctor --measure finds them"
    print(peaks)
    config = EngineConfig(load, 1024, 2 * TEXT + 8, max_num_seqs=8, kv_memory=1 << 29, peaks=peaks)
    loaded = load_weights(load).model(config)
    ways, found = ("none", "chain", "tree"), list[list[tuple[float, int, int, int]]]()
    timed(loaded, peaks, "tree", 99)  # nothing is cold then
    for pair in range(int(pairs)):
        found.append([timed(loaded, peaks, way, pair) for way in ways])
        print(pair, dict(zip(ways, found[-1], strict=True)), flush=True)
    for at, way in enumerate(ways):
        own = zip(*(one[at] for one in found), strict=True)
        took, steps, drafted, right = map(statistics.median, own)
        print(f"{way}: {took:.2f} s, {steps} steps, {right} of {drafted} right")


if __name__ == "__main__":
    main(*sys.argv[1:])
