"""Times decode steps with a draft model beside and without, in turns: a random model as large as one of 135M, whose
first two layers are the draft model; the others change what they say by a little.

python -m tests.batchinfer.engine.beside_times FOLDER [pairs] [by how much]

FOLDER gets both models, if it does not have them. Prompts are 200 random tokens, answers 100 tokens.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import BesideConfig, EngineConfig, LoadConfig
from batchinfer.engine.load.build import load_weights
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.machine.hardware import detect
from batchinfer_kernels.cost import Peaks

VOCAB, PROMPT, ANSWER, OWN = 49_152, 200, 100, 2


def make(folder: Path, by: float) -> None:
    """Make the two models."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=30, max_position_embeddings=2048, tie_word_embeddings=True,
        initializer_range=0.05, **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers[OWN:]:
            layer.self_attn.o_proj.weight.mul_(by)
            layer.mlp.down_proj.weight.mul_(by)
    model.save_pretrained(folder / "large")
    model.model.layers = model.model.layers[:OWN]
    model.config.num_hidden_layers = OWN
    model.config.layer_types = None
    model.save_pretrained(folder / "small")


def timed(loaded: LoadedModel, peaks: Peaks, rows: int, seed: int) -> tuple[float, int, int, int, float]:
    """Return the seconds of the decode steps, their number, the drafts verified and right, and the seconds of
    proposals."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(rows)]
    engine = loaded.engine(peaks)
    engine.add([Request(rng.randbytes(32), np.array(prompt, np.int32), params) for prompt in prompts])
    took, steps, drafted, right, proposing = 0.0, 0, 0, 0, 0.0
    while engine.unfinished:
        began = time.perf_counter()
        sample = engine.step().sample
        if sample is not None and not sample.prefill_tokens:
            took, steps = took + time.perf_counter() - began, steps + 1
            drafted, right = drafted + sample.drafted_tokens, right + sample.accepted_tokens
            proposing += sample.proposing_s
    return took, steps, drafted, right, proposing


def main(folder: str, pairs: str = "3", by: str = "0.02") -> None:
    """Print a line for each number of rows."""
    if not (Path(folder) / "large").exists():
        make(Path(folder), float(by))
    beside = BesideConfig(Path(folder) / "small", "bfloat16")
    load = LoadConfig(Path(folder) / "large", "bfloat16", "cpu", beside=beside)
    peaks = detect("cpu").peaks("bfloat16", "none")
    assert peaks is not None
    config = EngineConfig(load, 1024, PROMPT + ANSWER + 8, max_num_seqs=64, kv_memory=1 << 31, peaks=peaks)
    both = replace(load_weights(load).model(config), drafts=("earlier",))  # of which no row has any
    plain = replace(both, drafts=())
    for rows in (1, 8, 64):
        found: dict[bool, list[tuple[float, int, int, int, float]]] = {False: [], True: []}
        for seed in range(int(pairs)):
            for drafts in (False, True):
                found[drafts].append(timed(both if drafts else plain, peaks, rows, seed))
        without, given = (statistics.median(one[0] for one in found[which]) for which in (False, True))
        ratios = sorted(a[0] / b[0] for a, b in zip(found[False], found[True], strict=True))
        _, steps, drafted, right, proposing = found[True][-1]
        print(
            f"| {rows} | {without:.2f} | {given:.2f} | {without / given:.2f} × ({ratios[0]:.2f}-{ratios[-1]:.2f}) | "
            f"{ANSWER - 1} → {steps} | {right / max(1, drafted):.0%} of {drafted} | {proposing:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
