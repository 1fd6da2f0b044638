"""Counts the tokens that a step of the quickstart gives a row, if drafts took no time: so as many are verified as a row
may have, and nothing depends on the machine.

python -m tests.batchinfer.engine.free_drafts [orders] [--rows 1 2 8] [--drafts 2 4 8]

Every line is a row of a table: rows at once, drafts of a row, and what lookahead gives, what the row's own text and
other answers give, and what all of them together give.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML
from transformers import AutoTokenizer

from batchinfer.core.request import Request
from batchinfer.core.samples import StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.lookahead import Lookahead
from batchinfer.engine.drafts.other_answers import OtherAnswers
from batchinfer.engine.drafts.own_text import OwnText
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.load.build import load_weights
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer_kernels.cost import Peaks

QUICKSTART = Path(__file__).parents[3] / "jobs" / "quickstart"
PEAKS = Peaks(1e11, 1e10)


class SameTimes(DraftedStepTimes):
    """Every step takes as long."""

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        return 1.0

    def measured(self, sample: StepSample) -> None:
        pass


def requests(count: int) -> Iterator[Request]:
    """Return the requests of the first orders that are whole."""
    prompt = YAML(typ="safe").load(QUICKSTART / "job.yaml")["prompt"]
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    lines = (QUICKSTART / "data" / "orders.jsonl").read_text("utf-8", "replace").splitlines()
    for number, line in enumerate(lines[:count]):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):  # some are broken on purpose
            continue
        said = [
            {"role": "system", "content": prompt["system"]},
            {"role": "user", "content": text},
        ]
        shown = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        ids = np.array(tokenizer(shown, add_special_tokens=False)["input_ids"], np.int32)
        yield Request(number.to_bytes(32, "big"), ids, SamplingParams(max_tokens=96))


def counted(
    loaded: LoadedModel, rows: list[Request], drafts: int, named: tuple[str, ...]
) -> tuple[float, float]:
    """Return the tokens that a row gets in a step in which it decodes, and the share of drafts that were right."""
    times = SameTimes(loaded.runner.cost, PEAKS)
    lookahead = Lookahead() if "lookahead" in named else None
    sources = [OwnText(), OtherAnswers()] if "others" in named else []
    drafter = CostedDrafter(
        sources, times, 1 << 20, clock=lambda: 0.0, most_drafts=drafts, lookahead=lookahead
    )
    engine, steps = loaded.engine(PEAKS, drafter=drafter), list[StepSample]()
    engine.add(rows)
    for output in engine.drain():
        steps += [] if output.sample is None else [output.sample]
    drafted, right = (
        sum(getattr(step, f"{name}_tokens") for step in steps) for name in ("drafted", "accepted")
    )
    sampled = sum(step.sampled_tokens for step in steps)
    # The first token of each row comes with its prompt
    return (sampled - len(rows)) / (sampled - right - len(rows)), right / max(1, drafted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("orders", type=int, nargs="?", default=100)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    asked = parser.parse_args()
    load, work = LoadConfig(QUICKSTART / "model", "float32", "cpu"), [*requests(asked.orders)]
    weights = load_weights(load)
    for rows in asked.rows:
        config = EngineConfig(load, 512, 400, max_num_seqs=rows, kv_memory=1 << 28, peaks=PEAKS)
        loaded = weights.model(config)
        for drafts in asked.drafts:
            found = [
                counted(loaded, work, drafts, named)
                for named in (("lookahead",), ("others",), ("others", "lookahead"))
            ]
            told = " | ".join(f"{tokens:.2f} ({right:.0%} right)" for tokens, right in found)
            print(f"| {rows} | {drafts} | {told} |", flush=True)


if __name__ == "__main__":
    main()
