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
from batchinfer.engine.runner.runner import LaunchedStep, StepLaunch
from batchinfer.engine.runner.sampled import (
    DeviceTokens,
    SamplingResult,
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
from batchinfer.engine.tensors.adapter_slots import AdapterSlots
from batchinfer.engine.tensors.batch import HostBatch, build_batch
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer_kernels.cost import ModelCost


class StageIO(Protocol):
    """Transfers hidden states to and from neighbouring pipeline stages. It runs outside of captured CUDA graphs."""

    @property
    def is_first(self) -> bool:
        """True if the runner's layers read token ids, not the hidden states of an earlier stage."""

    @property
    def is_last(self) -> bool:
        """True if tokens are sampled from the output of the runner's layers."""

    def receive(self, tokens: int) -> None:
        """Receive the hidden states of `tokens` tokens from the previous stage into the layers' input buffer."""

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage.

        Args:
            hidden: [T, hidden], the hidden states of the T tokens of a step.
        """


class SingleStageIO:
    """The `StageIO` of a runner that has all layers of the model, so there is nothing to transfer."""

    is_first = is_last = True

    def receive(self, tokens: int) -> None:
        """Do nothing: there is no previous stage."""

    def send(self, hidden: Tensor) -> None:
        """Do nothing: there is no next stage."""


class Model(LogitsHead, Protocol):
    """A model that a runner can run: its layers, and the output layer that computes logits."""

    def forward(
        self,
        token_ids: Tensor,
        inputs: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        """Run the layers for a step, and return the hidden states of its T tokens, [T, hidden].

        Args:
            token_ids: [T], the tokens of the step.
            inputs: The attention inputs of each cache group.
            caches: The KV cache of each layer with attention.
            plans: The attention plan of each cache group.
        """


class SampledStates(Protocol):
    """The interface of objects that store hidden states from which tokens were sampled, as input of draft heads."""

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Store the hidden states of a step.

        Args:
            hidden: [n, hidden], the hidden states of the tokens of the step from which tokens are sampled. The caller
                does not modify them afterwards.
            plan: The plan of the step.
            host: The inputs of the step.
        """


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The results of a finished step.

    Attributes:
        next_tokens: A list of sampled tokens for each sequence that gets tokens, in the order of the step's plan.
        padded_tokens: The number of positions that were computed only because the step was padded.
        next_logprobs: The log-probabilities of sampled tokens, by the index of the sequence in `next_tokens`.
        next_barred: By the same index, for each sampled token: True if the token mask forbade the most likely token.
        launch: How the step was launched on a GPU, or None on a CPU.
        asked_states: The requested hidden states, by the index of the sequence among the sequences that request them.
        token_scores: The log-probabilities of given tokens (of continuations or prompts) that the step's plan asks
            for.
        collective_s: The seconds spent in collectives, or None if there are none or they are not timed.
    """

    next_tokens: list[list[int]]
    padded_tokens: int
    next_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    next_barred: Mapping[int, Seq[bool]] = field(default_factory=dict)
    launch: StepLaunch | None = None
    asked_states: Mapping[int, States] = field(default_factory=dict)
    token_scores: TokenScores = field(default_factory=partial(TokenScores.joined, ()))
    collective_s: float | None = None

    def tokens(self) -> list[list[int]]:
        """Return a list of sampled tokens for each sequence that gets tokens, in the order of the step's plan."""
        return self.next_tokens

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return the log-probabilities of the sampled tokens, for sequences that request them.

        A key is the index of a sequence among all sequences that get tokens.
        """
        return self.next_logprobs

    def states(self) -> Mapping[int, States]:
        """Return the hidden states of sequences that request them.

        A key is the index of a sequence among the sequences that request hidden states of this step.
        """
        return self.asked_states

    def scores(self) -> TokenScores:
        """Return the log-probabilities of given tokens (of continuations or prompts) that the step's plan asks for."""
        return self.token_scores

    def barred(self) -> Mapping[int, Seq[bool]]:
        """Return for each sampled token True if the token mask forbade the most likely token.

        A key is the index of a sequence among all sequences that get tokens. Only sequences with a mask have a value.
        """
        return self.next_barred


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """Runs the steps of an engine with a model, its KV cache and a sampler on one device, and waits for each step.

    Attributes:
        model: The model.
        ops: The operators.
        caches: The KV cache of each layer with attention.
        layout: The layout of the KV cache.
        sampler: Samples the tokens.
        cost: The FLOPs and bytes of the model's operators.
        device: The device.
        wants: The optional parts of step plans that the runner needs.
        state: Values from earlier plans that a plan need not repeat, such as block tables.
        in_group: True if other ranks run the same steps with other shards of the model.
        stage_io: Transfers hidden states between pipeline stages.
        kept: Stores the hidden states from which tokens are sampled, for draft heads. None: there are no draft heads.
    """

    model: Model
    ops: Ops
    caches: list[LayerCache]
    layout: CacheLayout
    sampler: Sampler
    cost: ModelCost
    device: torch.device
    wants: PlanWants = COMPUTES
    state: StepState = field(default_factory=StepState)
    in_group: bool = False
    stage_io: StageIO = field(default_factory=SingleStageIO)
    kept: SampledStates | None = None

    def give_adapters(self, numbers: Mapping[str, int]) -> None:
        """Set the LoRA adapters that rows may use.

        Only a `Decoder` has adapters. For other models, the call does nothing.

        Args:
            numbers: The number of each adapter by its fingerprint; 0 for an adapter that is merged into the weights.
        """
        if isinstance(self.model, Decoder):
            slots, put = self.model.adapter_slots, self.model.place_adapter
            self.state.adapters = AdapterSlots(numbers, slots, put)

    def with_first_block(self, first_block: int) -> ModelRunner:
        """Return a runner for another engine that shares the model and the KV cache with this runner.

        Args:
            first_block: The first KV cache block that the other engine uses.
        """
        return replace(self, state=StepState(first_block, adapters=self.state.adapters))

    @property
    def looks_ahead(self) -> bool:
        """Always False: each step is finished before the next step is scheduled."""
        return False

    @property
    def follows_trees(self) -> bool:
        """True if the drafts of a row may form a tree. This needs full attention in all layers, and a single rank."""
        windows = {window for group in self.layout.groups for window in group.windows}
        return self.ops.follows_trees and windows == {None} and not self.in_group

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of tokens per step. Always None (no limit): running out of memory is an error."""
        return None

    @property
    def capture_s(self) -> float | None:
        """The total number of seconds spent capturing CUDA graphs, or None on a CPU."""
        return None if self.device.type == "cpu" else 0.0

    @property
    def graph_bytes(self) -> int | None:
        """The number of bytes of device memory that captured CUDA graphs take, or None on a CPU."""
        return None if self.device.type == "cpu" else 0

    @property
    def _launch(self) -> StepLaunch | None:
        return None if self.device.type == "cpu" else StepLaunch("eager", 0.0)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run the forward pass of a step, and sample its tokens.

        Args:
            plan: The plan of the step.

        Returns:
            The results of the finished step.
        """
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
        """Run the forward pass of a step without sampling.

        Args:
            plan: The plan of the step.

        Returns:
            (hidden, sampling, padded): the hidden states from which tokens are sampled, [n, hidden]; how the tokens
            are sampled; the number of padding tokens.
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
        each = [torch.from_numpy(slots[moves]).to(self.device) for slots in host.slots]
        # Layers may share a cache
        for cache in {(one.k.data_ptr(), one.group): one for one in self.caches}.values():
            self.ops.move_slots(cache, each[cache.group])
        if isinstance(self.model, TappedModel):
            self.model.move(each)

    def plan_attention(self, inputs: list[AttentionInputs]) -> list[AttentionPlan]:
        """Return the plan of attention kernels for each cache group.

        Args:
            inputs: The step's attention inputs of each cache group.
        """
        plans: list[AttentionPlan] = []
        for group, own in zip(self.layout.groups, inputs, strict=True):
            previous = plans[-1] if plans else None
            plans.append(self.ops.plan_attention(own, self.layout.block_size, group.windows, previous))
        return plans

    def next_tokens(
        self, hidden: Tensor, sampling: SamplingPlan, device_tokens: DeviceTokens | None = None
    ) -> SamplingResult:
        """Sample the next tokens of a step, and compute the other outputs that rows request.

        Args:
            hidden: [n, hidden], the hidden states of the n rows (tokens of the step) that have an output.
            sampling: The outputs of the rows, and how tokens are chosen.
            device_tokens: The tokens that the previous step sampled. None: the host has them already.
        """
        return self.sampler.next_tokens(self.ops, self.model, hidden, sampling, device_tokens)
