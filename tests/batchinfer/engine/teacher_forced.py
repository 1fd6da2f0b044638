"""Runs an engine with forced answers and records the logits before each of their tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer.core.samples import StepSample
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import Scheduler
from batchinfer_kernels.arithmetic import Dtype, KvCacheDtype, Quantization
from tests.batchinfer.engine.driver import Hopeful, Preempting
from tests.batchinfer.engine.small_engine import (
    Limits,
    Noted,
    Place,
    Ran,
    RecordingSampler,
    drain,
    greedy,
    make_engine,
    poison,
    request,
)


@dataclass(frozen=True)
class Row:
    """A prompt and its forced answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Way:
    """A way to split, share and distribute work."""

    budget: int = 4096
    seqs: int = 64
    caching: bool = True
    blocks: int | None = None  # number of blocks; None for all, a small number for preemptions
    threads: int = 1
    backwards: bool = False

    def __str__(self) -> str:
        said = [f"budget{self.budget}", f"seqs{self.seqs}", f"threads{self.threads}"]
        said += ["shared" if self.caching else "private"]
        said += [f"blocks{self.blocks}"] if self.blocks else []
        return "-".join([*said, *(["backwards"] if self.backwards else [])])


def load(
    model: Path,
    dtype: Dtype,
    quantization: Quantization = "none",
    *,
    deterministic: bool = True,
    max_model_len: int = 512,
    block_size: int = 16,
    blocks: int = 400,
    tiles: bool = False,
    kv_cache: KvCacheDtype = "auto",
) -> LoadedModel:
    """Load the model as a job with these options does, with a poisoned cache."""
    loaded = load_model(
        EngineConfig(
            LoadConfig(
                model,
                dtype,
                "cpu",
                threads=1,
                quantization=quantization,
                deterministic=deterministic,
                tiles=tiles,
                kv_cache=kv_cache,
            ),
            max_model_len=max_model_len,
            longest=blocks * block_size,
            max_num_seqs=1,
            block_size=block_size,
            kv_memory=2**30,
        )
    )
    for cache in loaded.runner.caches:
        poison(cache)
    return loaded


class Forced:
    """An engine on a loaded model. Rows that run again find their prefixes in the cache."""

    def __init__(self, loaded: LoadedModel, rows: Seq[Row], way: Way) -> None:
        self.way = way
        self._requests = [
            request(number, row.prompt, len(row.answer), ignore_eos=True) for number, row in enumerate(rows)
        ]
        self.sampler = RecordingSampler(frozenset(), answers=[row.answer for row in rows])
        limits = replace(
            loaded.limits,
            max_num_seqs=way.seqs,
            max_num_batched_tokens=way.budget,
            prefix_caching=way.caching,
        )
        windows = loaded.runner.layout.sizes.windows
        pool = BlockPool(way.blocks or loaded.info.blocks, loaded.info.block_size, len(windows))
        kind = Preempting if way.blocks and windows != (None,) else Scheduler
        scheduler = kind(limits, pool, Hopeful() if way.blocks else None, windows)
        runner: Any = Noted(replace(loaded.runner, sampler=self.sampler))
        self._engine = Engine(runner, scheduler, loaded.engine_limits)
        self.steps: list[StepSample] = []

    def run(self, numbers: Seq[int] | None = None) -> dict[Place, Tensor]:
        """Return the logits by place, of the given rows or of all. Restores the number of threads."""
        numbers = range(len(self._requests)) if numbers is None else numbers
        before = torch.get_num_threads()
        torch.set_num_threads(self.way.threads)
        try:
            self._engine.add([self._requests[n] for n in sorted(numbers, reverse=self.way.backwards)])
            for output in self._engine.drain():
                self._engine.check_integrity()
                self.steps += [output.sample] if output.sample else []
        finally:
            torch.set_num_threads(before)
        return self.sampler.seen


def run_alone(loaded: LoadedModel, rows: Seq[Row]) -> dict[Place, Tensor]:
    """Return the reference logits: each row alone, with an unchunked prompt, an empty cache and one thread."""
    seen: dict[Place, Tensor] = {}
    for number in range(len(rows)):
        seen |= Forced(loaded, rows, Way(caching=False)).run([number])
    return seen


def different(got: dict[Place, Tensor], wanted: dict[Place, Tensor]) -> list[Place]:
    """Return the places whose bits differ. NaN differs from itself."""
    assert got.keys() == wanted.keys()
    return sorted(place for place in wanted if not torch.equal(got[place], wanted[place]))


def forced_logits(runner: ModelRunner, limits: Limits, rows: Seq[Row]) -> tuple[dict[Place, Tensor], Ran]:
    """Return the logits before each token of forced answers of equal length, and the run."""
    sampler = RecordingSampler(frozenset(), answers=[row.answer for row in rows])
    engine = make_engine(Noted(replace(runner, sampler=sampler)), limits, frozenset())
    ran = drain(engine, greedy([row.prompt for row in rows], len(rows[0].answer), ignore_eos=True))
    return {place: logits.cpu() for place, logits in sampler.seen.items()}, ran


def farthest(got: dict[Place, Tensor], wanted: dict[Place, Tensor]) -> list[float]:
    """Return the maximum difference of each token's logits, ascending."""
    assert got.keys() == wanted.keys()
    return sorted(float((got[place] - wanted[place]).abs().max()) for place in wanted)
