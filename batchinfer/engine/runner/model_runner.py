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
from batchinfer.engine.runner.watched_model import WatchedModel
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


class Borders(Protocol):
    """The borders say what comes before a runner's layers, and what becomes of their results. Neither is a part of a
    captured step."""

    @property
    def begins(self) -> bool:
        """Whether the layers read token ids, and not what an earlier stage has made of them."""

    @property
    def ends(self) -> bool:
        """Whether tokens are sampled behind the layers, and no later stage goes on with their results."""

    def receive(self, tokens: int) -> None:
        """Have the hidden states of so many tokens, which the stage before sends, where the layers read them."""

    def hand_on(self, hidden: Tensor) -> None:
        """Send the hidden states of a step's tokens, (T, hidden), to the stage behind."""


class WholeModel:
    """The borders of a runner that has all layers."""

    begins = ends = True

    def receive(self, tokens: int) -> None:
        """Do nothing: there is no stage before."""

    def hand_on(self, hidden: Tensor) -> None:
        """Do nothing: there is no stage behind."""


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


class SampledStates(Protocol):
    """Is given the hidden states of the rows that a step samples."""

    def take(self, hidden: Tensor, plan: StepPlan, host: HostBatch) -> None:
        """Take what a step gave: hidden (n, hidden) of the rows that its plan names, which nobody changes behind that.
        `host`: the same step as its arrays."""


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The result of a step that was run at once."""

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
        """Return the log-probabilities of each chunk that asks."""
        return self.next_logprobs

    def states(self) -> Mapping[int, States]:
        """Return the hidden states that each chunk asks for."""
        return self.asked_states

    def scores(self) -> TokenScores:
        """Return the log-probabilities of the tokens that the plan names."""
        return self.token_scores

    def barred(self) -> Mapping[int, Seq[bool]]:
        """Return which tokens of chunks that have a mask it gave in the place of the most likely ones."""
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
    in_group: bool = False  # whether other ranks run the same steps, each a part of the model
    borders: Borders = field(default_factory=WholeModel)
    kept: SampledStates | None = (
        None  # is given the hidden states of rows that are sampled; None: nobody needs them
    )

    def give_adapters(self, numbers: Mapping[str, int]) -> None:
        """Have rows find the adapters of a model of ours, whose numbers these are by their fingerprints."""
        if isinstance(self.model, Decoder):
            places, put = self.model.adapter_places, self.model.place_adapter
            self.state.adapters = AdapterPlaces(numbers, places, put)

    def in_turn(self, first_block: int) -> ModelRunner:
        """Return a runner of the steps of one of several engines that take turns on this one's cache, of which it has
        the blocks from `first_block` on."""
        return replace(self, state=StepState(first_block, adapters=self.state.adapters))

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be launched before the tokens of the one before it are known."""
        return False

    @property
    def follows_trees(self) -> bool:
        """Whether drafts of a row may be a tree."""
        windows = {window for group in self.layout.groups for window in group.windows}
        return self.ops.follows_trees and windows == {None} and not self.in_group

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
    def launch(self, plan: StepPlan) -> Launched:
        """Run the chunks, write their K and V, sample the rows that the plan names."""
        host = self.state.batch(plan, self.layout)
        hidden, sampling, padded = self._forward_batch(host)
        if not plan.sampled_rows:
            return RunnerOutput([], padded, launch=self._launch)
        sampled = self.next_tokens(hidden, sampling)
        masked, found, states = sampled.masked, sampled.logprobs, sampled.states
        given = sampled.tokens.tolist()
        rows = rows_of_chunks(given, plan)
        if rows is not None and host.tree is not None:
            hidden = self._behind_one_another(host, hidden, rows)
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
        """Run the chunks: (hidden states of the rows that the plan names, how these are sampled, padded tokens)."""
        return self._forward_batch(self.state.batch(plan, self.layout))

    def _forward_batch(self, host: HostBatch) -> tuple[Tensor, SamplingPlan, int]:
        batch = build_batch(host, self.device)
        self.state.tables.sent()
        plans = self.plan_attention(batch.inputs)
        self.borders.receive(len(host.token_ids))
        hidden = self.model.forward(batch.token_ids, batch.inputs, self.caches, plans)
        self.borders.hand_on(hidden)
        rows = hidden[batch.sampled_rows] if len(host.sampled_rows) else hidden[:0]
        return rows, batch.sampling, plans[0].padded_tokens

    def _behind_one_another(self, host: HostBatch, hidden: Tensor, rows: list[Seq[int]]) -> Tensor:
        """Move K and V of those nodes of trees that were right behind the tokens before their trees, where those of a
        chain would lie; so do their states in what is returned: (n, hidden), the rows of each chunk in its place."""
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
        """Move tokens of a step, (n, 2): the one that is read and the one that is written."""
        each = [torch.from_numpy(slots[moves]).to(self.device) for slots in host.slots]
        # Layers that read the K and V of another one have its cache
        for cache in {(one.k.data_ptr(), one.group): one for one in self.caches}.values():
            self.ops.move_slots(cache, each[cache.group])
        if isinstance(self.model, WatchedModel):
            self.model.move(each)

    def plan_attention(self, inputs: list[AttentionInputs]) -> list[AttentionPlan]:
        """Make a plan for each cache group."""
        plans: list[AttentionPlan] = []
        for group, own in zip(self.layout.groups, inputs, strict=True):
            beside = plans[-1] if plans else None
            plans.append(self.ops.plan_attention(own, self.layout.block_size, group.windows, beside))
        return plans

    def next_tokens(
        self, hidden: Tensor, sampling: SamplingPlan, device_tokens: DeviceTokens | None = None
    ) -> Sampled:
        """Sample what follows these rows' hidden states. `device_tokens`: last tokens that only the device knows."""
        return self.sampler.next_tokens(self.ops, self.model, hidden, sampling, device_tokens)
