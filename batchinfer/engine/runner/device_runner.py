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
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.runner.sampled import (
    DeviceTokens,
    Masked,
    RowLogprobs,
    RowStates,
    Sampled,
    barred_of_chunks,
    logprobs_of_chunks,
    rows_of_chunks,
    states_of_chunks,
    tokens_of_chunks,
)
from batchinfer.engine.runner.tree_moves import move_right_nodes
from batchinfer.engine.runner.watched_model import WatchedModel
from batchinfer.engine.schedule.step_plan import Ints, SamplingPlan, States, StepPlan, TokenScores
from batchinfer.engine.tensors.batch import HostBatch, RanStep
from batchinfer.engine.tensors.device_memory import lack_of_memory
from batchinfer.engine.tensors.device_tables import DeviceTables
from batchinfer.engine.tensors.staging import Download, upload
from batchinfer.engine.tensors.step_state import StepState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """The tokens and log-probabilities of a launched step, which are on their way to the host."""

    # tokens, log-probabilities, hidden states, masks, scores; None: nothing was sampled
    download: Download | None
    padded_tokens: int
    launch: StepLaunch
    plan: StepPlan
    # Of each micro-batch that has any, with the number of its first sampled row
    asking: list[tuple[int, RowLogprobs]] = field(default_factory=list)
    masked: list[tuple[int, Masked]] = field(default_factory=list)
    stated: list[RowStates] = field(default_factory=list)  # of each that has any
    scored: int = 0  # micro-batches that have scores
    collective_s: None = None  # the host does not wait for them

    def tokens(self) -> list[list[int]]:
        """Wait for the step; the next tokens of each chunk that samples."""
        if self.download is None:
            return []
        tokens: list[int] = self.download.arrays()[0].tolist()
        return tokens_of_chunks(tokens, self.plan, rows_of_chunks(tokens, self.plan))

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Wait for the step; the log-probabilities of each chunk that asks."""
        if self.download is None or not self.asking:
            return {}
        found: dict[int, TokenLogprobs] = {}
        arrays = iter(self.download.arrays()[1:])
        for first, rows in self.asking:
            found |= rows.of_rows(next(arrays), next(arrays), next(arrays), first)
        return logprobs_of_chunks(found, self._rows())

    def states(self) -> Mapping[int, States]:
        """Wait for the step; the hidden states that each chunk asks for."""
        if self.download is None or not self.stated:
            return {}
        arrays = self.download.arrays()[1 + 3 * len(self.asking) :]
        stated = zip(self.stated, arrays[: len(self.stated)], strict=True)
        return states_of_chunks((rows.of_chunks(states) for rows, states in stated), self.plan)

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Wait for the step; which tokens of chunks that have a mask it gave in the place of the most likely ones."""
        if self.download is None or not self.masked:
            return {}
        arrays = self.download.arrays()
        found: dict[int, bool] = {}
        begun = 1 + 3 * len(self.asking) + len(self.stated)
        for (first, rows), barred in zip(self.masked, arrays[begun : begun + len(self.masked)], strict=True):
            found |= rows.of_rows(barred, first)
        return barred_of_chunks(found, self._rows())

    def _rows(self) -> list[Sequence[int]] | None:
        assert self.download is not None
        return rows_of_chunks(self.download.arrays()[0].tolist(), self.plan)

    def scores(self) -> TokenScores:
        """Wait for the step; the log-probabilities of the tokens that the plan names."""
        if self.download is None or not self.scored:
            return TokenScores.joined([])
        arrays = self.download.arrays()[-4 * self.scored :]
        return TokenScores.joined(arrays[at : at + 4] for at in range(0, len(arrays), 4))


@dataclass(frozen=True, slots=True)
class RepeatedRun:
    """The tokens of steps that were launched at once, which are on their way to the host. Nothing else was asked."""

    download: Download  # the tokens of each step, one behind the other
    padded_tokens: int  # of all steps
    launch: StepLaunch
    repeats: Ints  # of each row, how many of the steps are its own
    collective_s: None = None

    def tokens(self) -> list[list[int]]:
        """Wait for the steps; the tokens of each row, in the order of the steps."""
        rows: list[list[int]] = self.download.arrays()[0].reshape(-1, len(self.repeats)).T.tolist()
        for place in np.flatnonzero(self.repeats < len(rows[0])).tolist():
            del rows[place][self.repeats[place] :]
        return rows

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Return those that were asked for: none."""
        return {}

    def states(self) -> Mapping[int, States]:
        """Return those that were asked for: none."""
        return {}

    def barred(self) -> Mapping[int, Sequence[bool]]:
        """Return what masks did: there are none."""
        return {}

    def scores(self) -> TokenScores:
        """Return those that were asked for: none."""
        return TokenScores.joined([])


@dataclass(frozen=True, slots=True)
class _Ran:
    """A step that was launched."""

    # Of each micro-batch that has any, with the number of its first sampled row
    sampled: list[tuple[int, Sampled]]
    tokens: Tensor | None  # those of all of them; None: nothing was sampled
    padded: int
    modes: list[LaunchMode]  # of the micro-batches

    @property
    def given(self) -> Tensor:
        assert self.tokens is not None, "a step that decodes samples"
        return self.tokens


@dataclass(frozen=True, slots=True)
class DeviceRunner(ModelRunner):
    """Launches each step behind the one before: sampled tokens are passed on inside the device.

    A step for which there is no memory is run in micro-batches, one after the other, and so are later steps until
    larger ones are tried again.

    A step may be scheduled while the one before is running, and take blocks that one reads: of what a window has left,
    of a sequence that has ended. It writes them only when the one before is done, as both are in one stream.
    """

    graphs: DecodeGraphs | None = None
    mixed: PiecewiseGraphs | None = None  # of steps that no decode graph covers
    recorder: GraphRecorder | None = None  # has captured the graphs
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    device_tokens: DeviceTokens = field(default_factory=DeviceTokens)
    tables: DeviceTables = field(default_factory=DeviceTables)

    def in_turn(self, first_block: int) -> DeviceRunner:
        """Return a runner of the steps of another engine. It has tables and pending tokens of its own, and all graphs
        in common: these read the whole cache, and what they read besides is written before each replay."""
        own = StepState(first_block, adapters=self.state.adapters)
        return replace(self, state=own, device_tokens=DeviceTokens(), tables=DeviceTables())

    @property
    def looks_ahead(self) -> bool:
        return True

    @property
    def most_tokens(self) -> int | None:
        return self.micro_batches.most_tokens

    @property
    def capture_s(self) -> float:
        """Seconds that capturing graphs has taken so far."""
        return sum(graphs.capture_s for graphs in (self.graphs, self.mixed) if graphs is not None)

    @property
    def graph_bytes(self) -> int:
        return 0 if self.recorder is None else self.recorder.taken_bytes

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Launch the steps of a plan. Raises torch.OutOfMemoryError when there is no memory for a single
        token, and in a group when there is none for the step as a whole, or for its graph."""
        captured_s, graph_bytes = self.capture_s, self.graph_bytes
        whole = self.state.batch(plan, self.layout)
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
            return RepeatedRun(Download(torch.cat([one.given for one in ran])), padded, launch, plan.repeats)
        (only,) = ran
        if only.tokens is None:
            return DeviceRun(None, padded, launch, plan)
        return self._launched(only.sampled, only.tokens, padded, launch, plan)

    def _step(self, whole: HostBatch, plan: StepPlan) -> _Ran:
        """Run a step, in micro-batches where there is no memory to run it at once. Raises as `launch` does."""
        sampled: list[tuple[int, Sampled]] = []
        padded, begun, modes, kept = 0, 0, list[LaunchMode](), list[Tensor]()
        todo = deque(self.micro_batches.split(whole))
        while todo:
            host, failed = todo.popleft(), False
            try:
                with lack_of_memory():
                    found, padding, mode = self._run(host, kept)
            except torch.OutOfMemoryError:
                # Other ranks would not know of micro-batches
                if self.in_group or self.micro_batches.is_least(host):
                    raise
                failed = True
            if failed:  # by now the error, whose traceback kept what the step held, is gone
                self.micro_batches.shrink(len(host.token_ids), len(host.query_lens))
                torch.cuda.empty_cache()
                todo = deque(smaller for rest in (host, *todo) for smaller in self.micro_batches.split(rest))
                continue
            self.micro_batches.succeeded(len(host.token_ids))
            sampled += [] if found is None else [(begun, found)]
            begun += host.sampling.choosing(len(host.sampled_rows))
            padded += padding
            modes.append(mode)
        tokens = _joined([one.tokens for _, one in sampled])
        self._keep(_joined(kept), tokens, plan, whole)
        if tokens is not None:
            self.device_tokens.tokens = tokens
        return _Ran(sampled, tokens, padded, modes)

    def _further_steps(self, first: HostBatch, plan: StepPlan, repeats: Ints) -> Iterator[_Ran]:
        """Run the steps behind the first one of a plan, each with the tokens that the one before has sampled."""
        size, replays = self.layout.block_size, self._replays(repeats)
        for step in range(1, plan.steps):
            ahead = np.minimum(step, repeats - 1)
            ran = None if replays is None else self._replay(replays, step, first.sampling.later(ahead))
            if ran is None:
                replays, ran = None, self._step(first.later(ahead, size), plan)
            yield ran

    def _replays(self, repeats: Ints) -> RepeatedReplays | None:
        """Return what replays the steps behind the first one; None where nothing does, or there is no memory for it."""
        if self.graphs is None:
            return None
        try:
            with lack_of_memory():
                return self.graphs.replays(repeats)
        except torch.OutOfMemoryError:
            self.graphs.interrupt()
            return None

    def _replay(self, replays: RepeatedReplays, step: int, sampling: SamplingPlan) -> _Ran | None:
        """Run a further step as the first one was; None if there was no memory for it."""
        assert self.device_tokens.tokens is not None, "the step before has sampled"
        try:
            with lack_of_memory():
                ran = replays.run(step, self.device_tokens.tokens)
                found = self.next_tokens(ran.sampled, sampling, self.device_tokens)
        except torch.OutOfMemoryError:
            assert self.graphs is not None, "its graph was replayed"
            self.graphs.interrupt()
            return None
        self.device_tokens.tokens = found.tokens
        return _Ran([(0, found)], found.tokens, ran.padded, ["full_graph"])

    def _keep(self, states: Tensor | None, tokens: Tensor | None, plan: StepPlan, whole: HostBatch) -> None:
        """Keep what a step has made of the nodes of trees that are right; and the `states` of its rows, if somebody
        needs them. `tokens`: those that were sampled."""
        if whole.tree is not None and tokens is not None:
            order = move_right_nodes(whole, tokens, self._moved)
            states = None if states is None else states.index_select(0, order)
        if self.kept is not None and states is not None:
            self.kept.take(states, plan, whole)

    @property
    def _moved(self) -> list[list[Tensor]]:
        """Return what lies in the slots of each cache group. Layers that read the K and V of another one have its
        cache."""
        found: list[dict[int, Tensor]] = [{} for _ in self.layout.groups]
        for cache in self.caches:
            found[cache.group] |= {one.data_ptr(): one for pair in cache.copied for one in pair}
        if isinstance(self.model, WatchedModel):
            states = self.model.kept.places
            found[self.model.group][states.data_ptr()] = states
        return [[*own.values()] for own in found]

    def _launched(
        self,
        sampled: list[tuple[int, Sampled]],
        tokens: Tensor,
        padded: int,
        launch: StepLaunch,
        plan: StepPlan,
    ) -> Launched:
        logprobs = [(first, s.logprobs) for first, s in sampled if s.logprobs is not None]
        masked = [(first, s.masked) for first, s in sampled if s.masked is not None]
        stated = [s.states for _, s in sampled if s.states is not None]
        scored = [s.scores for _, s in sampled if s.scores is not None]
        beside = [
            *(tensor for _, found in logprobs for tensor in found.tensors),
            *(one.states for one in stated),
            *(one.barred for _, one in masked),
            *(tensor for one in scored for tensor in one.tensors),
        ]
        found = (logprobs, masked, stated, len(scored))
        return DeviceRun(Download(tokens, *beside), padded, launch, plan, *found)

    def forward(self, plan: StepPlan) -> tuple[Tensor, SamplingPlan, int]:
        """Launch the chunks: (hidden states of the rows that the plan names, how these are sampled, padded tokens)."""
        host = self.state.batch(plan, self.layout)
        hidden, padded, _ = self._forward(host)
        return hidden, host.sampling, padded

    def _run(self, host: HostBatch, kept: list[Tensor]) -> tuple[Sampled | None, int, LaunchMode]:
        """Run a step: (what was sampled, if anything was, padded tokens, and how it was launched). The states of the
        rows to sample from are `kept`, if somebody needs them."""
        hidden, padded, mode = self._forward(host)
        if not len(host.sampled_rows) or not self.borders.ends:
            return None, padded, mode
        # The next replay writes to the same tensor
        states = None if self.kept is None else hidden.clone()
        found = self.next_tokens(hidden, host.sampling, self.device_tokens)
        kept += [] if states is None else [states]
        return found, padded, mode

    def _forward(self, host: HostBatch) -> tuple[Tensor, int, LaunchMode]:
        """Run the model: (hidden states of the rows to sample from, padded tokens, and how the step was launched)."""
        tokens = len(host.token_ids)
        self.borders.receive(tokens)
        ran, mode = self._layers(host)
        self.borders.hand_on(ran.hidden[:tokens])
        return ran.sampled, ran.padded, mode

    def _layers(self, host: HostBatch) -> tuple[RanStep, LaunchMode]:
        """Run the layers, and say how they were launched."""
        self.tables.refresh(self.state.tables, self.device)
        # The pieces' captures have no adapters
        plain = host.adapters is None
        in_pieces = plain and self.mixed is not None and self.mixed.covers(len(host.token_ids))
        if self.graphs is not None and self.graphs.covers(host):
            try:
                ran = self.graphs.run(host, self.tables, partial(self._fill_in, host), in_pieces)
                if ran is not None:
                    return ran, "full_graph" if self.graphs.replayed else "eager"
            except (torch.OutOfMemoryError, NotCaptured):
                if self.in_group:  # other ranks have captured it, or wait for this one
                    raise
                _log.debug("a step that could not be captured is launched as it is")
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
        """Write the tokens that are awaited of the step before. Layers behind a stage read none."""
        if host.awaited is None or not self.borders.begins:
            return
        places, sampled = host.awaited
        tokens = self.device_tokens.of(sampled, self.device)
        if places is None:
            token_ids[: len(tokens)].copy_(tokens)  # a graph's tensors have padding rows behind them
        elif places[-1] - places[0] == len(places) - 1:
            token_ids[places[0] : places[-1] + 1].copy_(tokens)
        else:
            (index,) = upload([places.astype(np.int64)], self.device)
            token_ids.index_copy_(0, index, tokens)


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Return the rows of micro-batches, one behind the other; None: there are none."""
    return (torch.cat(parts) if len(parts) > 1 else parts[0]) if parts else None
