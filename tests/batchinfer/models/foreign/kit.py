"""Engines on model types that transformers computes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from batchinfer.engine.kv.cache_layout import CacheLayout, cache_layout
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.models.foreign.checkpoint import ForeignCheckpoint, inspect_foreign
from batchinfer.models.foreign.interface import silence_transformers
from batchinfer.models.foreign.model import TransformersModel
from batchinfer.models.foreign.probe import describe
from batchinfer.models.foreign.source import ForeignSource
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.interface import Ops
from tests.batchinfer.engine.small_engine import Limits
from tests.checkpoints import kept_folder
from tests.foreign_models import EOS, make_foreign

PLACE = Arithmetic(torch.float32, torch.device("cpu"))
LONGEST = 320


@dataclass(frozen=True)
class Foreign:
    """A tiny checkpoint, the model that transformers loads from it, and our source of it."""

    folder: Path
    theirs: Any
    checkpoint: ForeignCheckpoint

    @property
    def source(self) -> ForeignSource:
        return ForeignSource(self.checkpoint)

    def loaded(self) -> tuple[TransformersModel, Ops]:
        ops = self.source.choose_ops(PLACE)
        return self.source.load(ops, PLACE)(ops, LONGEST), ops

    def runner(self, limits: Limits) -> ModelRunner:
        """Return a runner in float32 with a poisoned cache."""
        model, ops = self.loaded()
        layout = self.layout(limits.block_size)
        caches = allocate_caches(ops, self.source.spec.caches, layout, limits.blocks, torch.float32, "cpu")
        for layer in caches:
            layer.k.fill_(float("nan"))
            layer.v.fill_(float("nan"))
        sampler, cost = Sampler(frozenset(self.source.spec.eos_token_ids)), self.source.cost(PLACE)
        return ModelRunner(model, ops, caches, layout, sampler, cost, PLACE.device)

    def layout(self, block_size: int) -> CacheLayout:
        return cache_layout(self.source.spec.caches, block_size, LONGEST)

    def greedy(self, prompts: list[list[int]], most: int) -> list[list[int]]:
        """Return greedy tokens of transformers' `generate`, one prompt at a time."""
        answers = []
        with silence_transformers():
            self.theirs.set_attn_implementation("eager")
            for prompt in prompts:
                ids = torch.tensor([prompt])
                asked = {"max_new_tokens": most, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
                found = self.theirs.generate(ids, attention_mask=torch.ones_like(ids), **asked)
                answers.append(found[0, len(prompt) :].tolist())
        return answers


def make(kind: str) -> Foreign:
    folder = kept_folder()
    theirs = make_foreign(folder, kind)
    return Foreign(folder, theirs, inspect_foreign(folder, describe))


def raw_config(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw
