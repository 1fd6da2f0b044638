"""Measures decode and prefill by the engine: the time of a step against the roofline of its operators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from batchinfer.bench.runs import Run, timed_run
from batchinfer.bench.workloads import Row
from batchinfer_kernels.cost import Cost, ModelCost, StepShape
from tests.gpu_suite.loaded import codes_dtype, dtype_of, loaded_model, name_of
from tests.gpu_suite.order import plan_in_memory
from tests.suite.section import BenchSection, Part, Result, Times, WrongResult

# (sequences, prompt); the first one has a target. Prompts are short enough that running them leaves time for the rest.
DECODES = ((64, 1024), (128, 1024), (256, 512), (16, 1024), (1, 1024), (64, 4096))
CODED_DECODES, CODED_PREFILLS = ((64, 1024), (64, 4096)), (2048,)  # for quantised models
SKEWED = (16_000, 256, 256)  # prompt of the long row, number of other rows, and their prompts, in tokens
PREFILLS = (8192, 2048, 512)
DECODE_STEPS, WARM_STEPS = 40, 8
TINY_STEPS, TINY_WARM_STEPS = 2, 1
PREFILL_RUNS = 5
MBU_TARGET = 0.8  # target for decode with a batch of 64


def parts(section: BenchSection) -> list[Part]:
    """Return a part a size."""
    plain = section.model is None or section.model.is_plain
    decodes: Sequence[tuple[int, int]] = DECODES if plain else CODED_DECODES
    prefills: Sequence[int] = PREFILLS if plain else CODED_PREFILLS
    if section.rehearsal:
        decodes, prefills = ((2, 5),) if plain else ((1, 2),), (9,) if plain else (5,)
    prompts = {f"{count} sequences at {prompt}": [prompt] * count for count, prompt in decodes}
    if plain and not section.rehearsal:
        long, others, short = SKEWED
        prompts[f"{others} sequences at {short}, one at {long}"] = [long, *[short] * others]
    found: list[Part] = [
        (f"decode {size}", partial(decode, section, own, size)) for size, own in prompts.items()
    ]
    return found + [(f"prefill {tokens}", partial(prefill, section, tokens)) for tokens in prefills]


def decode(section: BenchSection, prompts: Sequence[int], size: str) -> Result:
    """Measure steps of one token per sequence, without the first ones, which compile and capture.

    Raises:
        WrongResult: If there are no such steps.
    """
    loaded, wanted, warm = loaded_model(section), DECODE_STEPS, WARM_STEPS
    if section.rehearsal:
        wanted, warm = TINY_STEPS, TINY_WARM_STEPS
    # The row that is prefilled first must still decode when the last prompt is prefilled
    count, room = len(prompts), loaded.info.max_num_batched_tokens - len(prompts)
    reading = -(-sum(prompts) // max(1, room))
    ran = _run(section, _rows(prompts, wanted + warm + reading))
    own = [n for n, step in enumerate(ran.steps) if step.prefill_tokens == 0 and step.decode_tokens == count]
    own = own[-wanted:]
    if len(own) < wanted:
        raise WrongResult(
            f"{len(own)} of {len(ran.steps)} steps decode all {count} sequences and do nothing else"
        )
    shapes = [ran.shapes[n] for n in own]
    seconds = [ran.steps[n].duration_s for n in own]
    found = _costs(loaded.runner.cost, [shapes[len(shapes) // 2]])
    first, length = DECODES[0]
    aimed = list(prompts) == [length] * first and loaded.info.quantization == "none"
    targets = {"mbu": MBU_TARGET} if aimed else {}
    return replace(_result(section, f"decode, {size}", count, seconds, found), targets=targets)


def prefill(section: BenchSection, tokens: int) -> Result:
    """Measure one prompt, chunked by its engine."""
    loaded = loaded_model(section)
    runs = [_run(section, _rows([tokens], 1)) for _ in range(2 if section.rehearsal else PREFILL_RUNS)]
    seconds = [sum(step.duration_s for step in ran.steps) for ran in runs[1:]]  # the first one compiles
    found = _costs(loaded.runner.cost, runs[-1].shapes)
    return _result(section, f"prefill, {tokens} tokens", tokens, seconds, found)


def _run(section: BenchSection, rows: Sequence[Row]) -> Run:
    return timed_run(loaded_model(section), rows, planner=plan_in_memory)


def _rows(prompts: Sequence[int], outputs: int) -> list[Row]:
    """Return rows that share no prefix."""
    r = random.Random(sum(prompts))
    return [Row(tuple(r.randrange(300, 500) for _ in range(prompt)), outputs) for prompt in prompts]


def _costs(model: ModelCost, steps: Sequence[StepShape]) -> dict[str, Cost]:
    """Return the cost of each operator over these steps."""
    total: dict[str, Cost] = {}
    for step in steps:
        for name, cost in model.step(step).items():
            total[name] = total.get(name, Cost()) + cost
    return total


def _result(
    section: BenchSection, name: str, tokens: int, seconds: Sequence[float], costs: dict[str, Cost]
) -> Result:
    return Result(
        f"{name}, {name_of(section)}",
        times={"ours": Times.of(seconds)},
        costs=costs,
        dtype=dtype_of(section),
        codes_dtype=codes_dtype(section),
        tokens=tokens,
    )
