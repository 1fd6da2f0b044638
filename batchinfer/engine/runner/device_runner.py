"""Launches steps on a GPU without waiting for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from batchinfer.core.request import TokenLogprobs
from batchinfer.core.samples import LAUNCH_MODES, LaunchMode
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs
from batchinfer.engine.graphs.graph_capture import GraphRecorder
from batchinfer.engine.graphs.piecewise_graphs import PiecewiseGraphs
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.runner import Launched, StepLaunch
from batchinfer.engine.runner.sampled import DeviceTokens, Masked, Sampled, by_sequence
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.batch import HostBatch, host_batch
from batchinfer.engine.tensors.device_memory import lack_of_memory
from batchinfer.engine.tensors.device_tables import DeviceTables
from batchinfer.engine.tensors.staging import Download, upload

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """The tokens and log-probabilities of a launched step, which are on their way to the host."""

    download: Download | None  # tokens, then what `asking` says; None: nothing was sampled
    padded_tokens: int
    launch: StepLaunch
    asking: list[list[Sequence]] = field(default_factory=list)  # of each batch that has log-probabilities
    # Of each batch that has masked rows; last in the download
    masked: list[Masked] = field(default_factory=list)

    def tokens(self) -> list[list[int]]:
        """Wait for the step; the next token of each chunk that samples."""
        if self.download is None:
            return []
        arrays = self.download.arrays()
        for masked, barred in zip(self.masked, arrays[len(arrays) - len(self.masked) :], strict=True):
            masked.note(barred)
        return [[token] for token in arrays[0].tolist()]

    def logprobs(self) -> Mapping[Sequence, TokenLogprobs]:
        """Wait for the step; the log-probabilities of each sequence that asks."""
        if self.download is None or not self.asking:
            return {}
        found: dict[Sequence, TokenLogprobs] = {}
        arrays = iter(self.download.arrays()[1:])
        for sequences in self.asking:
            found |= by_sequence(sequences, next(arrays), next(arrays), next(arrays))
        return found


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
    def launch(self, chunks: list[Chunk], copies: Seq[Copy] = ()) -> Launched:
        """Launch a step. Raises torch.OutOfMemoryError when there is no memory for a single token."""
        captured_s, graph_bytes = self.capture_s, self.graph_bytes
        starts = {copy.sequence: copy.sequence.computed for copy in copies}
        sampled: list[Sampled] = []
        sampling: list[Sequence] = []
        padded, todo = 0, deque(self.micro_batches.split(chunks))
        modes: list[LaunchMode] = []
        while todo:
            batch, failed = todo.popleft(), False
            try:
                own = _begun(batch, copies, starts) if copies else []  # seldom: it passes over every row
                host = host_batch(batch, self.layout, self.rows, own)
                with lack_of_memory():
                    found, padding, mode = self._run(host)
            except torch.OutOfMemoryError:
                if sum(c.length for c in batch) == 1:
                    raise
                failed = True
            if failed:  # by now the error, whose traceback kept what the step held, is gone
                self.micro_batches.shrink(batch)
                torch.cuda.empty_cache()
                todo = deque(smaller for rest in (batch, *todo) for smaller in self.micro_batches.split(rest))
                continue
            self.micro_batches.succeeded(len(host.token_ids))
            sampled += [] if found is None else [found]
            sampling += host.sampling
            padded += padding
            modes.append(mode)
        launch = StepLaunch(
            mode=max(modes, key=LAUNCH_MODES.index),
            capture_s=self.capture_s - captured_s,
            graph_bytes=self.graph_bytes - graph_bytes,
        )
        return self._launched(sampling, sampled, padded, launch)

    def _launched(
        self, sampling: list[Sequence], sampled: list[Sampled], padded: int, launch: StepLaunch
    ) -> Launched:
        if not sampled:
            return DeviceRun(None, padded, launch)
        tokens = sampled[0].tokens if len(sampled) == 1 else torch.cat([s.tokens for s in sampled])
        self.device_tokens.keep(tokens, sampling)
        logprobs = [s.logprobs for s in sampled if s.logprobs is not None]
        masked = [s.masked for s in sampled if s.masked is not None]
        beside = [
            *(tensor for found in logprobs for tensor in found.tensors),
            *(one.barred for one in masked),
        ]
        download = Download(tokens, *beside)
        return DeviceRun(download, padded, launch, [found.sequences for found in logprobs], masked)

    def _run(self, host: HostBatch) -> tuple[Sampled | None, int, LaunchMode]:
        """Run a step: (what was sampled, if anything was, padded tokens, and how it was launched)."""
        hidden, padded, mode = self._forward(host)
        return (
            (self.next_tokens(hidden, host.sampling, self.device_tokens) if host.sampling else None),
            padded,
            mode,
        )

    def _forward(self, host: HostBatch) -> tuple[Tensor, int, LaunchMode]:
        """Run the model: (hidden states of the rows to sample from, padded tokens, and how the step was launched)."""
        self.tables.refresh(self.rows, self.device)
        in_pieces = self.mixed is not None and self.mixed.covers(len(host.token_ids))
        if self.graphs is not None and self.graphs.covers(host):
            try:
                ran = self.graphs.run(host, self.tables, partial(self._fill_in, host), in_pieces)
                if ran is not None:
                    return *ran, "full_graph" if self.graphs.replayed else "eager"
            except torch.OutOfMemoryError:
                _log.debug("a step that could not be captured is launched as it is")
        if self.graphs is not None:
            self.graphs.interrupt()
        if self.mixed is not None and in_pieces:
            run = self.mixed.run(host, self.tables, partial(self._fill_in, host), self.plan_attention)
            return *run, "piecewise_graph"
        arrays = (
            host.token_ids,
            host.sampled_rows,
            host.table_rows,
            host.positions,
            *host.slots,
            *host.parts,
        )
        token_ids, sampled, rows, positions, *placed = upload(arrays, self.device)
        slots, parts = placed[: len(host.slots)], placed[len(host.slots) :]
        self._fill_in(host, token_ids)
        inputs = host.inputs(self.tables.of(host.tables, rows), positions, slots, parts)
        plans = self.plan_attention(inputs)
        hidden = self.model.forward(token_ids, inputs, self.caches, plans)
        return hidden.index_select(0, sampled), plans[0].padded_tokens, "eager"

    def _fill_in(self, host: HostBatch, token_ids: Tensor) -> None:
        """Write the tokens that are awaited of the step before."""
        waits = [sequence.placeholders > 0 for sequence in host.sampling]
        if True not in waits:
            return
        waiting, places = host.sampling, host.sampled_rows
        if False in waits:  # seldom: a list of bools takes long as an index
            waiting, places = list(compress(waiting, waits)), places[waits]
        tokens = self.device_tokens.of(waiting, self.device)
        if places[-1] - places[0] == len(places) - 1:  # a step of single tokens
            token_ids[places[0] : places[-1] + 1].copy_(tokens)
        else:
            (index,) = upload([places], self.device)
            token_ids.index_copy_(0, index, tokens)


def _begun(batch: list[Chunk], copies: Seq[Copy], starts: Mapping[Sequence, int]) -> list[Copy]:
    """The copies of the sequences that begin with this batch: what they copy is there by now."""
    begun = {sequence for sequence, start, _ in batch if starts.get(sequence) == start}
    return [copy for copy in copies if copy.sequence in begun]
