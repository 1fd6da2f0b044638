"""Runs a step on the device: the forward pass and sampling."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.core.request import TokenLogprobs
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.runner.sampled import (
    DeviceTokens,
    Sampled,
    barred_of_chunks,
    logprobs_of_chunks,
    rows_of_chunks,
    states_of_chunks,
    tokens_of_chunks,
)
from batchinfer.engine.runner.sampler import LogitsHead, Sampler
from batchinfer.engine.runner.tapped_model import TappedModel
from batchinfer.engine.schedule.step_plan import (
    COMPUTES,
    PlanWants,
    SamplingPlan,
    States,
    StepPlan,
    TokenScores,
)
from batchinfer.engine.tensors.adapter_places import AdapterPlaces
from batchinfer.engine.tensors.batch import HostBatch, build_batch
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer_kernels.cost import ModelCost


class StageIO(Protocol):
    """Transfers hidden states between pipeline stages, outside of captured graphs."""

    @property
    def is_first(self) -> bool:
        """Return True if the runner's layers read token ids, not the hidden states of an earlier stage."""

    @property
    def is_last(self) -> bool:
        """Return True if tokens are sampled from the output of the runner's layers."""

    def receive(self, tokens: int) -> None:
        """Receive the hidden states of `tokens` tokens from the previous stage into the layers' input buffer."""

    def send(self, hidden: Tensor) -> None:
        """Send the hidden states of a step's tokens, (T, hidden), to the next stage."""


class SingleStageIO:
    """The StageIO of a runner that has all layers."""

    is_first = is_last = True

    def receive(self, tokens: int) -> None:
        """Return at once, as there is no other stage."""

    def send(self, hidden: Tensor) -> None:
        """Return at once, as there is no other stage."""


class Model(LogitsHead, Protocol):
    """The interface of a decoder that runners need; see `batchinfer.models.decoder.decoder`."""

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run a step: (T,) → hidden states (T, hidden).

        Args:
            token_ids: (T,).
            inputs: The attention inputs of each cache group.
            caches: The cache of each layer.
            plans: The attention plan of each cache group.
        """


class SampledStates(Protocol):
    """Receives the hidden states of the sampled rows of each step."""

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Receive the hidden states of a step.

        Args:
            hidden: (n, hidden), of the sampled rows. Not modified afterwards.
            plan: The step's plan.
            host: The arrays of the same step.
        """


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The results of a finished step; see `Launched`."""

    next_tokens: list[list[int]]
    padded_tokens: int
    next_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    next_barred: Mapping[int, Seq[bool]] = field(default_factory=dict)
    launch: StepLaunch | None = None
    asked_states: Mapping[int, States] = field(default_factory=dict)
    token_scores: TokenScores = field(default_factory=partial(TokenScores.joined, ()))
    collective_s: float | None = None

    def tokens(self) -> list[list[int]]:
        """Return the next tokens of each chunk that samples."""
        return self.next_tokens

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of chunks that request them."""
        return self.next_logprobs

    def states(self) -> Mapping[int, States]:
        """Return the hidden states that chunks request."""
        return self.asked_states

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the plan's scored tokens."""
        return self.token_scores

    def barred(self) -> Mapping[int, Seq[bool]]:
        """Return, per chunk with a mask, which tokens replaced a forbidden most likely token."""
        return self.next_barred


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
    wants: PlanWants = COMPUTES
    state: StepState = field(default_factory=StepState)
    in_group: bool = False  # True if other ranks run the same steps with other shards of the model
    stage_io: StageIO = field(default_factory=SingleStageIO)
    # Receives the hidden states of sampled rows for draft heads; None: there are no draft heads
    kept: SampledStates | None = None

    def give_adapters(self, numbers: Mapping[str, int]) -> None:
        """Make the model's adapters available to rows.

        Args:
            numbers: The number of each adapter, by its fingerprint. Ignored for models that are not a Decoder.
        """
        if isinstance(self.model, Decoder):
            places, put = self.model.adapter_slots, self.model.place_adapter
            self.state.adapters = AdapterPlaces(numbers, places, put)

    def with_first_block(self, first_block: int) -> ModelRunner:
        """Return a runner for another engine that uses the blocks from `first_block` on of the same cache."""
        return replace(self, state=StepState(first_block, adapters=self.state.adapters))

    @property
    def looks_ahead(self) -> bool:
        """Return False: each step is finished before the next one is scheduled."""
        return False

    @property
    def follows_trees(self) -> bool:
        """Return True if the drafts of a row may form a tree: only with full attention and on one rank."""
        windows = {window for group in self.layout.groups for window in group.windows}
        return self.ops.follows_trees and windows == {None} and not self.in_group

    @property
    def most_tokens(self) -> int | None:
        """Return None: steps are not limited."""
        return None

    @property
    def capture_s(self) -> float | None:
        """Return the seconds spent capturing graphs so far, or None on a CPU."""
        return None if self.device.type == "cpu" else 0.0

    @property
    def graph_bytes(self) -> int | None:
        """Return the bytes of device memory that captured graphs take, or None on a CPU."""
        return None if self.device.type == "cpu" else 0

    @property
    def _launch(self) -> StepLaunch | None:
        return None if self.device.type == "cpu" else StepLaunch("eager", 0.0)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Run the forward pass of a plan and sample."""
        host = self.state.batch(plan, self.layout)
        hidden, sampling, padded = self._forward_batch(host)
        if not plan.sampled_rows:
            return RunnerOutput([], padded, launch=self._launch)
        sampled = self.next_tokens(hidden, sampling)
        masked, found, states = sampled.masked, sampled.logprobs, sampled.states
        given = sampled.tokens.tolist()
        rows = rows_of_chunks(given, plan)
        if rows is not None and host.tree is not None:
            hidden = self._move_accepted(host, hidden, rows)
        if self.kept is not None:
            self.kept.take(hidden, plan, host)
        arrays = (tensor.numpy(force=True) for tensor in found.tensors) if found else ()
        asked = states.of_chunks(states.states.numpy(force=True)) if states else {}
        scored = [] if sampled.scores is None else [one.numpy(force=True) for one in sampled.scores.tensors]
        barred = masked.of_rows(masked.barred.numpy(force=True)) if masked else {}
        return RunnerOutput(
            tokens_of_chunks(given, plan, rows),
            padded,
            logprobs_of_chunks(found.of_rows(*arrays), rows) if found else {},
            barred_of_chunks(barred, rows),
            self._launch,
            states_of_chunks([asked], plan),
            TokenScores.joined([scored] if scored else []),
        )

    def forward(self, plan: StepPlan) -> tuple[Tensor, SamplingPlan, int]:
        """Run the forward pass only.

        Returns:
            The hidden states of the sampled rows, (n, hidden); how these are sampled; the number of padding tokens.
        """
        return self._forward_batch(self.state.batch(plan, self.layout))

    def _forward_batch(self, host: HostBatch) -> tuple[Tensor, SamplingPlan, int]:
        batch = build_batch(host, self.device)
        self.state.tables.sent()
        plans = self.plan_attention(batch.inputs)
        self.stage_io.receive(len(host.token_ids))
        hidden = self.model.forward(batch.token_ids, batch.inputs, self.caches, plans)
        self.stage_io.send(hidden)
        rows = hidden[batch.sampled_rows] if len(host.sampled_rows) else hidden[:0]
        return rows, batch.sampling, plans[0].padded_tokens

    def _move_accepted(self, host: HostBatch, hidden: Tensor, rows: list[Seq[int]]) -> Tensor:
        """Move K and V of accepted draft tree nodes to consecutive slots, as if they had been a chain.

        Args:
            host: The step.
            hidden: (n, hidden), of the sampled rows.
            rows: The accepted rows of each chunk; see `rows_of_chunks`.

        Returns:
            `hidden` with the states of accepted nodes moved in the same way.
        """
        chosen = (
            host.sampled_rows if host.sampling.chosen is None else host.sampled_rows[host.sampling.chosen]
        )
        moves = [
            (token, int(chosen[own[0]]) + at)
            for own in rows
            for at, token in enumerate(chosen[list(own)].tolist())
            if token != chosen[own[0]] + at
        ]
        if not moves:
            return hidden
        self._move(host, np.array(moves, np.int64))
        order = np.arange(len(hidden))
        order[np.searchsorted(host.sampled_rows, [target for _, target in moves])] = np.searchsorted(
            host.sampled_rows, [source for source, _ in moves]
        )
        return hidden[torch.from_numpy(order).to(hidden.device)]

    def _move(self, host: HostBatch, moves: NDArray[np.int64]) -> None:
        """Move K and V (and states for draft heads) between tokens of a step: (n, 2), from and to."""
        each = [torch.from_numpy(slots[moves]).to(self.device) for slots in host.slots]
        # Layers may share a cache
        for cache in {(one.k.data_ptr(), one.group): one for one in self.caches}.values():
            self.ops.move_slots(cache, each[cache.group])
        if isinstance(self.model, TappedModel):
            self.model.move(each)

    def plan_attention(self, inputs: list[AttentionInputs]) -> list[AttentionPlan]:
        """Make an attention plan for each cache group."""
        plans: list[AttentionPlan] = []
        for group, own in zip(self.layout.groups, inputs, strict=True):
            previous = plans[-1] if plans else None
            plans.append(self.ops.plan_attention(own, self.layout.block_size, group.windows, previous))
        return plans

    def next_tokens(
        self, hidden: Tensor, sampling: SamplingPlan, device_tokens: DeviceTokens | None = None
    ) -> Sampled:
        """Sample the next tokens.

        Args:
            hidden: (n, hidden), of the sampled rows.
            sampling: How they are sampled.
            device_tokens: The tokens of the previous step, if the host does not have them yet.
        """
        return self.sampler.next_tokens(self.ops, self.model, hidden, sampling, device_tokens)
