"""Launches steps on a GPU without waiting for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.request import TokenLogprobs
from batchinfer.core.samples import LAUNCH_MODES, LaunchMode
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs
from batchinfer.engine.graphs.graph_capture import GraphRecorder, NotCaptured
from batchinfer.engine.graphs.piecewise_graphs import PiecewiseGraphs
from batchinfer.engine.graphs.repeated_replays import RepeatedReplays
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.runner import LaunchedStep, StepLaunch
from batchinfer.engine.runner.sampled import (
    DeviceTokens,
    MaskedRows,
    RowLogprobs,
    RowStates,
    SamplingResult,
    barred_of_chunks,
    logprobs_of_chunks,
    rows_of_chunks,
    states_of_chunks,
    tokens_of_chunks,
)
from batchinfer.engine.runner.tapped_model import TappedModel
from batchinfer.engine.runner.tree_moves import move_accepted_nodes
from batchinfer.engine.schedule.step_plan import Ints, SamplingPlan, States, StepPlan, TokenScores
from batchinfer.engine.tensors.batch import HostBatch, RanStep
from batchinfer.engine.tensors.device_memory import out_of_memory_errors
from batchinfer.engine.tensors.device_tables import DeviceTables
from batchinfer.engine.tensors.staging import Download, upload
from batchinfer.engine.tensors.step_state import StepState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """A step that was launched on a GPU, and whose results are being copied to the host.

    A row is a token of the step that has an output, such as a sampled token.

    Attributes:
        download: The copy of tokens, log-probabilities, hidden states, masks and scores. None: the step has no
            outputs.
        padded_tokens: The number of positions that were computed only because the step was padded.
        launch: How the step was launched.
        plan: The plan of the step.
        logprob_rows: (index, log-probabilities) of each micro-batch with log-probabilities. The index counts the
            step's rows that get tokens before the micro-batch.
        masked_rows: (index, rows with masks) of each micro-batch with token masks, with the same kind of index.
        state_rows: The hidden states of each micro-batch that returns any.
        scored_batches: The number of micro-batches that compute log-probabilities of given tokens.
        collective_s: Always None: collectives are not timed on a GPU.
    """

    download: Download | None
    padded_tokens: int
    launch: StepLaunch
    plan: StepPlan
    logprob_rows: list[tuple[int, RowLogprobs]] = field(default_factory=list)
    masked_rows: list[tuple[int, MaskedRows]] = field(default_factory=list)
    state_rows: list[RowStates] = field(default_factory=list)
    scored_batches: int = 0
    collective_s: None = None

    def tokens(self) -> list[list[int]]:
        """Wait for the step, and return a list of sampled tokens for each sequence that gets tokens, in order."""
        if self.download is None:
            return []
        tokens: list[int] = self.download.arrays()[0].tolist()
        return tokens_of_chunks(tokens, self.plan, rows_of_chunks(tokens, self.plan))

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Wait for the step, and return the log-probabilities of the sampled tokens, for sequences that request them.

        A key is the index of a sequence among all sequences that get tokens.
        """
        if self.download is None or not self.logprob_rows:
            return {}
        found: dict[int, TokenLogprobs] = {}
        arrays = iter(self.download.arrays()[1:])
        for first, rows in self.logprob_rows:
            found |= rows.of_rows(next(arrays), next(arrays), next(arrays), first)
        return logprobs_of_chunks(found, self._rows())

    def states(self) -> Mapping[int, States]:
        """Wait for the step, and return the hidden states of sequences that request them.

        Returns:
            [n, hidden], or their sum, [1, hidden]. A key is the index of a sequence among the sequences that request
            hidden states of this step.
        """
        if self.download is None or not self.state_rows:
            return {}
        arrays = self.download.arrays()[1 + 3 * len(self.logprob_rows) :]
        stated = zip(self.state_rows, arrays[: len(self.state_rows)], strict=True)
        return states_of_chunks((rows.of_chunks(states) for rows, states in stated), self.plan)

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Wait for the step, and return for each sampled token True if the token mask forbade the most likely token.

        A key is the index of a sequence among all sequences that get tokens. Only sequences with a mask have a value.
        """
        if self.download is None or not self.masked_rows:
            return {}
        arrays = self.download.arrays()
        found: dict[int, bool] = {}
        begun = 1 + 3 * len(self.logprob_rows) + len(self.state_rows)
        for (first, rows), barred in zip(
            self.masked_rows, arrays[begun : begun + len(self.masked_rows)], strict=True
        ):
            found |= rows.of_rows(barred, first)
        return barred_of_chunks(found, self._rows())

    def _rows(self) -> list[Sequence[int]] | None:
        assert self.download is not None
        return rows_of_chunks(self.download.arrays()[0].tolist(), self.plan)

    def scores(self) -> TokenScores:
        """Wait for the step, and return the log-probabilities of given tokens that the step's plan asks for.

        Given tokens are tokens of continuations or prompts, in contrast to sampled tokens.
        """
        if self.download is None or not self.scored_batches:
            return TokenScores.joined([])
        arrays = self.download.arrays()[-4 * self.scored_batches :]
        return TokenScores.joined(arrays[at : at + 4] for at in range(0, len(arrays), 4))


@dataclass(frozen=True, slots=True)
class RepeatedRun:
    """Decode steps that were launched together (multi-step decoding), whose tokens are being copied to the host.

    The sequences of such steps request nothing but tokens.

    Attributes:
        download: The copy of the tokens of all steps, concatenated.
        padded_tokens: The number of positions, in all steps, that were computed only because the steps were padded.
        launch: How the steps were launched.
        repeats: [n], the number of steps in which each of the n sequences takes part.
        collective_s: Always None: collectives are not timed on a GPU.
    """

    download: Download
    padded_tokens: int
    launch: StepLaunch
    repeats: Ints
    collective_s: None = None

    def tokens(self) -> list[list[int]]:
        """Wait for the steps, and return a list of sampled tokens per sequence, in the order of the steps."""
        rows: list[list[int]] = self.download.arrays()[0].reshape(-1, len(self.repeats)).T.tolist()
        for place in np.flatnonzero(self.repeats < len(rows[0])).tolist():
            del rows[place][self.repeats[place] :]
        return rows

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return an empty mapping, because no sequence of a multi-step launch requests log-probabilities."""
        return {}

    def states(self) -> Mapping[int, States]:
        """Return an empty mapping, because no sequence of a multi-step launch requests hidden states."""
        return {}

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return an empty mapping, because no sequence of a multi-step launch has a token mask."""
        return {}

    def scores(self) -> TokenScores:
        """Return empty arrays, because a multi-step launch does not score given tokens."""
        return TokenScores.joined([])


@dataclass(frozen=True, slots=True)
class _Ran:
    """A launched step, with its results on the device.

    Attributes:
        sampled: (index, results) of each micro-batch that samples. The index counts the step's rows that get tokens
            before the micro-batch.
        tokens: [n], the tokens of all micro-batches. None: nothing was sampled.
        padded: The number of positions that were computed only because the step was padded.
        modes: The launch mode of each micro-batch.
    """

    sampled: list[tuple[int, SamplingResult]]
    tokens: Tensor | None
    padded: int
    modes: list[LaunchMode]

    @property
    def decoded(self) -> Tensor:
        assert self.tokens is not None, "a decode step samples"
        return self.tokens


@dataclass(frozen=True, slots=True)
class DeviceRunner(ModelRunner):
    """A runner that launches steps on a GPU without waiting for their results.

    Sampled tokens stay on the device for the next step. A step that does not fit into memory runs in micro-batches.

    Attributes:
        graphs: The CUDA graphs of decode steps. None: decode steps are not captured.
        mixed: The piecewise CUDA graphs, for steps that no decode graph covers, such as steps with prompts. None: such
            steps are not captured.
        recorder: The recorder that captured the graphs. None: nothing was captured.
        micro_batches: Limits the tokens per forward pass after the device ran out of memory.
        device_tokens: The tokens that the previous step sampled.
        tables: The block tables on the device.
    """

    graphs: DecodeGraphs | None = None
    mixed: PiecewiseGraphs | None = None
    recorder: GraphRecorder | None = None
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    device_tokens: DeviceTokens = field(default_factory=DeviceTokens)
    tables: DeviceTables = field(default_factory=DeviceTables)

    def with_first_block(self, first_block: int) -> DeviceRunner:
        """Return a runner for another engine that shares the model, the KV cache and the CUDA graphs with this runner.

        The new runner has its own block tables and sampled tokens.

        Args:
            first_block: The first KV cache block that the other engine uses.
        """
        own = StepState(first_block, adapters=self.state.adapters)
        return replace(self, state=own, device_tokens=DeviceTokens(), tables=DeviceTables())

    @property
    def looks_ahead(self) -> bool:
        """Always True: a step may be launched before the tokens of the previous step are known."""
        return True

    @property
    def most_tokens(self) -> int | None:
        """The maximum number of tokens per forward pass, lowered if the device ran out of memory. None: no limit."""
        return self.micro_batches.most_tokens

    @property
    def capture_s(self) -> float:
        """The total number of seconds spent capturing CUDA graphs."""
        return sum(graphs.capture_s for graphs in (self.graphs, self.mixed) if graphs is not None)

    @property
    def graph_bytes(self) -> int:
        """The number of bytes of device memory that captured CUDA graphs take."""
        return 0 if self.recorder is None else self.recorder.taken_bytes

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch the step of a plan on the GPU. With multi-step decoding, all decode steps of the plan are launched.

        Raises:
            torch.OutOfMemoryError: If memory is missing even for one token. If the model is sharded, also if memory is
                missing for the whole step.
        """
        captured_s, graph_bytes = self.capture_s, self.graph_bytes
        whole = self.state.batch(plan, self.layout)
        # A step may write to KV cache blocks that the running step still reads. Both steps are in the same CUDA stream,
        # so the blocks are overwritten only after the running step.
        ran = [self._step(whole, plan)]
        if plan.repeats is not None:
            ran += self._further_steps(whole, plan, plan.repeats)
        launch = StepLaunch(
            mode=max((mode for one in ran for mode in one.modes), key=LAUNCH_MODES.index),
            capture_s=self.capture_s - captured_s,
            graph_bytes=self.graph_bytes - graph_bytes,
        )
        padded = sum(one.padded for one in ran)
        if plan.repeats is not None:
            return RepeatedRun(
                Download(torch.cat([one.decoded for one in ran])), padded, launch, plan.repeats
            )
        (only,) = ran
        if only.tokens is None:
            return DeviceRun(None, padded, launch, plan)
        return self._launched(only.sampled, only.tokens, padded, launch, plan)

    def _step(self, whole: HostBatch, plan: StepPlan) -> _Ran:
        sampled: list[tuple[int, SamplingResult]] = []
        padded, begun, modes, kept = 0, 0, list[LaunchMode](), list[Tensor]()
        todo = deque(self.micro_batches.split(whole))
        while todo:
            host, failed = todo.popleft(), False
            try:
                with out_of_memory_errors():
                    found, padding, mode = self._run(host, kept)
            except torch.OutOfMemoryError:
                # Other ranks do not know about micro-batches
                if self.in_group or self.micro_batches.is_least(host):
                    raise
                failed = True
            if failed:  # outside of `except`, whose traceback keeps the step's tensors alive
                self.micro_batches.shrink(len(host.token_ids), len(host.query_lens))
                torch.cuda.empty_cache()
                todo = deque(smaller for rest in (host, *todo) for smaller in self.micro_batches.split(rest))
                continue
            self.micro_batches.succeeded(len(host.token_ids))
            sampled += [] if found is None else [(begun, found)]
            begun += host.sampling.count_chosen_rows(len(host.sampled_rows))
            padded += padding
            modes.append(mode)
        tokens = _concatenate([one.tokens for _, one in sampled])
        self._keep(_concatenate(kept), tokens, plan, whole)
        if tokens is not None:
            self.device_tokens.tokens = tokens
        return _Ran(sampled, tokens, padded, modes)

    def _further_steps(self, first: HostBatch, plan: StepPlan, repeats: Ints) -> Iterator[_Ran]:
        size, replays = self.layout.block_size, self._replays(repeats)
        for step in range(1, plan.steps):
            ahead = np.minimum(step, repeats - 1)
            ran = None if replays is None else self._replay(replays, step, first.sampling.later(ahead))
            if ran is None:
                replays, ran = None, self._step(first.later(ahead, size), plan)
            yield ran

    def _replays(self, repeats: Ints) -> RepeatedReplays | None:
        if self.graphs is None:
            return None
        try:
            with out_of_memory_errors():
                return self.graphs.replays(repeats)
        except torch.OutOfMemoryError:
            self.graphs.interrupt()
            return None

    def _replay(self, replays: RepeatedReplays, step: int, sampling: SamplingPlan) -> _Ran | None:
        assert self.device_tokens.tokens is not None, "the previous step has sampled"
        try:
            with out_of_memory_errors():
                ran = replays.run(step, self.device_tokens.tokens)
                found = self.next_tokens(ran.sampled, sampling, self.device_tokens)
        except torch.OutOfMemoryError:
            assert self.graphs is not None, "its graph was replayed"
            self.graphs.interrupt()
            return None
        self.device_tokens.tokens = found.tokens
        return _Ran([(0, found)], found.tokens, ran.padded, ["full_graph"])

    def _keep(self, states: Tensor | None, tokens: Tensor | None, plan: StepPlan, whole: HostBatch) -> None:
        if whole.tree is not None and tokens is not None:
            order = move_accepted_nodes(whole, tokens, self._moved)
            states = None if states is None else states.index_select(0, order)
        if self.kept is not None and states is not None:
            self.kept.take(states, plan, whole)

    @property
    def _moved(self) -> list[list[Tensor]]:
        found: list[dict[int, Tensor]] = [{} for _ in self.layout.groups]
        for cache in self.caches:
            found[cache.group] |= {one.data_ptr(): one for pair in cache.copied for one in pair}
        if isinstance(self.model, TappedModel):
            states = self.model.kept.as_cache
            found[self.model.group][states.data_ptr()] = states
        return [[*own.values()] for own in found]

    def _launched(
        self,
        sampled: list[tuple[int, SamplingResult]],
        tokens: Tensor,
        padded: int,
        launch: StepLaunch,
        plan: StepPlan,
    ) -> LaunchedStep:
        logprobs = [(first, s.logprobs) for first, s in sampled if s.logprobs is not None]
        masked = [(first, s.masked) for first, s in sampled if s.masked is not None]
        stated = [s.states for _, s in sampled if s.states is not None]
        scored = [s.scores for _, s in sampled if s.scores is not None]
        other = [
            *(tensor for _, found in logprobs for tensor in found.tensors),
            *(one.states for one in stated),
            *(one.barred for _, one in masked),
            *(tensor for one in scored for tensor in one.tensors),
        ]
        found = (logprobs, masked, stated, len(scored))
        return DeviceRun(Download(tokens, *other), padded, launch, plan, *found)

    def forward(self, plan: StepPlan) -> tuple[Tensor, SamplingPlan, int]:
        """Launch the forward pass of a step without sampling.

        Args:
            plan: The plan of the step.

        Returns:
            (hidden, sampling, padded): the hidden states from which tokens are sampled, [n, hidden]; how the tokens
            are sampled; the number of padding tokens.
        """
        host = self.state.batch(plan, self.layout)
        hidden, padded, _ = self._forward(host)
        return hidden, host.sampling, padded

    def _run(self, host: HostBatch, kept: list[Tensor]) -> tuple[SamplingResult | None, int, LaunchMode]:
        hidden, padded, mode = self._forward(host)
        if not len(host.sampled_rows) or not self.stage_io.is_last:
            return None, padded, mode
        # A copy, because the next replay overwrites the tensor
        states = None if self.kept is None else hidden.clone()
        found = self.next_tokens(hidden, host.sampling, self.device_tokens)
        kept += [] if states is None else [states]
        return found, padded, mode

    def _forward(self, host: HostBatch) -> tuple[Tensor, int, LaunchMode]:
        tokens = len(host.token_ids)
        self.stage_io.receive(tokens)
        ran, mode = self._layers(host)
        self.stage_io.send(ran.hidden[:tokens])
        return ran.sampled, ran.padded, mode

    def _layers(self, host: HostBatch) -> tuple[RanStep, LaunchMode]:
        self.tables.refresh(self.state.tables, self.device)
        # Piecewise graphs do not support adapters
        plain = host.adapters is None
        in_pieces = plain and self.mixed is not None and self.mixed.covers(len(host.token_ids))
        if self.graphs is not None and self.graphs.covers(host):
            try:
                ran = self.graphs.run(host, self.tables, partial(self._fill_in, host), in_pieces)
                if ran is not None:
                    return ran, "full_graph" if self.graphs.replayed else "eager"
            except (torch.OutOfMemoryError, NotCaptured):
                if self.in_group:  # all ranks must capture the same steps
                    raise
                _log.debug("a step could not be captured; it is launched without a graph")
        if self.graphs is not None:
            self.graphs.interrupt()
        if self.mixed is not None and in_pieces:
            run = self.mixed.run(host, self.tables, partial(self._fill_in, host), self.plan_attention)
            return run, "piecewise_graph"
        return self._by_operators(host), "eager"

    def _by_operators(self, host: HostBatch) -> RanStep:
        adapted = () if host.adapters is None else (host.adapters,)
        arrays = (
            host.token_ids, host.sampled_rows, host.table_rows, host.positions, *host.slots, *host.parts, *adapted
        )  # fmt: skip
        token_ids, sampled, rows, positions, *placed = upload(arrays, self.device)
        adapters = placed.pop() if adapted else None
        slots, parts = placed[: len(host.slots)], placed[len(host.slots) :]
        self._fill_in(host, token_ids)
        tables = self.tables.of(host.tables, rows)
        inputs = host.inputs(tables, positions, slots, parts, adapters=adapters)
        plans = self.plan_attention(inputs)
        hidden = self.model.forward(token_ids, inputs, self.caches, plans)
        return RanStep(hidden, hidden.index_select(0, sampled), plans[0].padded_tokens)

    def _fill_in(self, host: HostBatch, token_ids: Tensor) -> None:
        if host.awaited is None or not self.stage_io.is_first:
            return
        places, sampled = host.awaited
        tokens = self.device_tokens.of(sampled, self.device)
        if places is None:
            token_ids[: len(tokens)].copy_(tokens)  # the tensor may end with padding rows
        elif places[-1] - places[0] == len(places) - 1:
            token_ids[places[0] : places[-1] + 1].copy_(tokens)
        else:
            (index,) = upload([places.astype(np.int64)], self.device)
            token_ids.index_copy_(0, index, tokens)


def _concatenate(parts: list[Tensor]) -> Tensor | None:
    return (torch.cat(parts) if len(parts) > 1 else parts[0]) if parts else None
