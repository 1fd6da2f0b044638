"""Runs a step on the device: the forward pass and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.runner.sampled import DeviceTokens, Sampled, by_sequence
from batchinfer.engine.runner.sampler import LogitsHead, Sampler
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_shape import step_shape
from batchinfer.engine.tensors.batch import build_batch
from batchinfer.engine.tensors.table_rows import TableRows
from batchinfer.models.ops.interface import AttentionInputs, AttentionPlan, LayerCache, Ops
from batchinfer_kernels.cost import ModelCost, StepShape


class Model(LogitsHead, Protocol):
    """A decoder, as the runner needs it; `batchinfer.models.decoder.decoder` has it."""

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run a step: (T,) → hidden states (T, hidden). `inputs` and `plans` have an element for each cache group,
        `caches` one for each layer, which names its group."""


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The result of a step that was run at once."""

    next_tokens: list[list[int]]
    padded_tokens: int
    next_logprobs: Mapping[Sequence, TokenLogprobs] = field(default_factory=dict)
    launch: StepLaunch | None = None

    def tokens(self) -> list[list[int]]:
        """Return the next tokens of each chunk that samples."""
        return self.next_tokens

    def logprobs(self) -> Mapping[Sequence, TokenLogprobs]:
        """Return the log-probabilities of each sequence that asks."""
        return self.next_logprobs


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """A model, its KV cache tensors and a sampler on one device."""

    model: Model
    ops: Ops
    caches: list[LayerCache]
    layout: CacheLayout
    sampler: Sampler
    cost: ModelCost
    device: torch.device
    rows: TableRows = field(default_factory=TableRows)

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be launched before the tokens of the one before it are known."""
        return False

    def needs_tokens(self, sequence: Sequence) -> bool:
        """Whether a step of this sequence needs the token before on the host, so that no step may look ahead of it."""
        return self.sampler.masks(sequence)

    @property
    def most_tokens(self) -> int | None:
        """The runner never limits its steps: None."""
        return None

    @property
    def capture_s(self) -> float | None:
        """Seconds that capturing graphs has taken so far; None on a CPU, where nothing is captured."""
        return None if self.device.type == "cpu" else 0.0

    @property
    def graph_bytes(self) -> int | None:
        """Bytes of the device's memory that captured graphs take; None on a CPU."""
        return None if self.device.type == "cpu" else 0

    @property
    def _launch(self) -> StepLaunch | None:
        return None if self.device.type == "cpu" else StepLaunch("eager", 0.0)

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], copies: Seq[Copy] = ()) -> Launched:
        """Run the chunks, write their K and V, sample where a chunk reaches its sequence's end."""
        batch = build_batch(chunks, self.layout, self.rows, self.device, copies)
        plans = self.plan_attention(batch.inputs)
        hidden = self.model.forward(batch.token_ids, batch.inputs, self.caches, plans)
        if not batch.sampling:
            return RunnerOutput([], plans[0].padded_tokens, launch=self._launch)
        sampled = self.next_tokens(hidden[batch.sampled_rows], batch.sampling)
        if sampled.masked is not None:
            sampled.masked.note(sampled.masked.barred.numpy(force=True))
        tokens, found = [[token] for token in sampled.tokens.tolist()], sampled.logprobs
        arrays = (tensor.numpy(force=True) for tensor in found.tensors) if found else ()
        logprobs = by_sequence(found.sequences, *arrays) if found else {}
        return RunnerOutput(tokens, plans[0].padded_tokens, logprobs, self._launch)

    def plan_attention(self, inputs: list[AttentionInputs]) -> list[AttentionPlan]:
        """Make a plan for each cache group."""
        plans: list[AttentionPlan] = []
        for group, own in zip(self.layout.groups, inputs, strict=True):
            beside = plans[-1] if plans else None
            plans.append(self.ops.plan_attention(own, self.layout.block_size, group.windows, beside))
        return plans

    def next_tokens(
        self, hidden: Tensor, sequences: list[Sequence], device_tokens: DeviceTokens | None = None
    ) -> Sampled:
        """Sample what follows these rows' hidden states. `device_tokens`: last tokens that only the device knows."""
        return self.sampler.next_tokens(self.ops, self.model, hidden, sequences, device_tokens)

    def step_shape(self, chunks: list[Chunk], sampled: int, shared: int, copied: int = 0) -> StepShape:
        """Sum up the least work of these chunks; `step_shape` explains the arguments."""
        return step_shape(chunks, sampled, shared, self.layout, copied)
