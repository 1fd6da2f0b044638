"""CUDA graphs of the pieces of a step between one layer's attention and the next one's.

What a piece launches depends on the number of the step's tokens alone, not on whose they are and on what they attend
to. So a step that no decode graph covers, because it reads prompts, is padded to one of a few numbers of tokens, and
its pieces are replayed; between two of them the host launches attention with the step's own plan. Padding tokens are
attended to by nobody: their keys go to a block that no sequence uses, and what their rows hold is never sampled.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.graphs.graph_capture import GraphRecorder, NotCaptured, Replay
from batchinfer.engine.tensors.batch import HostBatch, RanStep
from batchinfer.engine.tensors.device_tables import DeviceTables
from batchinfer.engine.tensors.graph_inputs import grown
from batchinfer.engine.tensors.staging import Upload, upload
from batchinfer.models.decoder.attention import AttentionBoundary, AttentionHalf, StaticBuffers
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache

_log = logging.getLogger(__name__)

# Numbers of tokens: powers of two up to EVEN, as so few take a GPU hardly less time than reading the weights does, then
# PARTS sizes before each power of two: a step is padded by a quarter at most, by a tenth on average.
FEWEST, EVEN, PARTS = 64, 256, 4

# The bytes that a graph of a piece takes in addition to its tensors. Not measured here: vLLM reports 0.59 GiB for 67
# sizes of a model of 28 layers, 29 pieces each, tensors included (https://github.com/vllm-project/vllm/pull/21146).
GRAPH_BYTES = 320 << 10

Planned = Callable[[list[AttentionInputs]], list[AttentionPlan]]


@runtime_checkable
class SplitModel(Protocol):
    """A decoder whose attention another can launch; `batchinfer.models.decoder.decoder` has it."""

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Seq[AttentionInputs], caches: Seq[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a forward pass that yields before each attention, and is sent its result."""

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the buffers of steps of up to `tokens` tokens."""


def token_sizes(most: int) -> list[int]:
    """64, 128, 256, 320, 384, 448, 512, 640, … and `most`, ascending; none for `most` 0."""
    sizes, size = [], FEWEST
    while size < most:
        sizes.append(size)
        below = 1 << size.bit_length() - 1  # the power of two
        size += below if size < EVEN else below // PARTS
    return [*sizes, most] if most else []


def graph_bytes(tokens: int, layers: int) -> int:
    """Count the bytes that graphs of all sizes up to `tokens` take in addition to their tensors. `layers`: those with
    attention."""
    return len(token_sizes(tokens)) * (layers + 1) * GRAPH_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class _AttentionCall:
    """The attention that follows a piece, and how its tensors lie in the static buffers."""

    attention: AttentionHalf
    cache: LayerCache
    shapes: tuple[tuple[int, int], tuple[int, int]]  # of a token's queries, and of what is attended

    @classmethod
    def of(cls, boundary: AttentionBoundary) -> _AttentionCall:
        """Leave out the queries themselves, whose memory later pieces use."""
        heads, dim = boundary.queries.shape[1:]
        attended = boundary.attention.widths[1] // heads
        return cls(boundary.attention, boundary.cache, ((heads, dim), (heads, attended)))


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The graphs of a number of tokens."""

    lines: Upload  # that they read: token ids, positions, and the slots of each cache group
    replays: list[Replay]  # one more than there are layers with attention
    attention: list[_AttentionCall]


class PiecewiseGraphs:
    """Captures the pieces of steps of up to `buffers.tokens` tokens, and replays them.

    `groups`: how many cache groups there are; `padding_slot`: where padding tokens write K and V to;
    `in_group`: other ranks capture the same, and wait for this one; `behind`: is called behind the pieces of a step,
    with its inputs.
    """

    def __init__(
        self,
        model: SplitModel,
        caches: list[LayerCache],
        groups: int,
        padding_slot: int,
        buffers: StaticBuffers,
        recorder: GraphRecorder,
        in_group: bool = False,
        behind: Callable[[list[AttentionInputs]], None] | None = None,
    ) -> None:
        self._in_group, self._behind = in_group, behind
        self._model, self._caches, self._groups = model, caches, groups
        self._padding_slot, self._buffers, self._recorder = padding_slot, buffers, recorder
        self._pieces: dict[int, _Pieces] = {}
        self.sizes: list[int] = []  # numbers of tokens that were captured, ascending
        self.capture_s = 0.0  # seconds that capturing them took

    @property
    def captured(self) -> int:
        """How many graphs were captured."""
        return sum(len(pieces.replays) for pieces in self._pieces.values())

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first: the smaller ones find room in what it has taken. Sizes for which there
        is no memory are left out; what the attempt has taken is there for the smaller ones. In a group other ranks
        would not know: torch.OutOfMemoryError is raised. The same is so of NotCaptured, after which none are tried."""
        began = time.perf_counter()
        refused: list[int] = []
        for size in reversed(token_sizes(self._buffers.tokens)):
            try:
                self._pieces[size] = self._captured(size)
            except torch.OutOfMemoryError:
                if self._in_group:
                    raise
                refused.insert(0, size)
            except NotCaptured as error:
                if self._in_group:
                    raise
                _log.warning(
                    "steps that read prompts cannot be captured as graphs, and run slower: %s", error
                )
                break
            else:
                self.sizes.insert(0, size)
        self.capture_s += time.perf_counter() - began
        if refused:
            _log.warning(
                "too little GPU memory to capture steps of %s tokens as graphs: they are padded to a larger size that "
                "was captured, or run without a graph, which is slower; lower engine.kv_memory to leave room",
                ", ".join(map(str, refused)),
            )
        _log.info(
            "%d graphs of steps of %d sizes took %.1f s to capture",
            self.captured,
            len(self.sizes),
            self.capture_s,
        )

    def covers(self, tokens: int) -> bool:
        """Whether a step of this many tokens can be run here."""
        return bool(self.sizes) and tokens <= self.sizes[-1]

    def run(
        self, batch: HostBatch, tables: DeviceTables, fill_in: Callable[[Tensor], None], plan: Planned
    ) -> RanStep:
        """Run a step that is covered.

        `tables`: brought up to date. `fill_in` writes token ids that only the device knows; `plan` plans the step's
        attention.
        """
        tokens = len(batch.token_ids)
        size = self.sizes[bisect_left(self.sizes, tokens)]
        pieces = self._pieces[size]
        pieces.lines.refill(_padded(batch, size, self._padding_slot))
        token_ids, positions, *slots = [line[:tokens] for line in pieces.lines.tensors]
        arrays: list[NDArray[Any]] = [batch.sampled_rows, batch.table_rows, *batch.parts]
        sampled, rows, *parts = upload(arrays, token_ids.device)
        fill_in(token_ids)
        inputs = batch.inputs(tables.of(batch.tables, rows), positions, slots, parts)
        plans = plan(inputs)
        views = {own.shapes: self._views(own, tokens) for own in pieces.attention}
        *before, last = pieces.replays
        for replay, own in zip(before, pieces.attention, strict=True):
            replay()
            (queries, attended), group = views[own.shapes], own.cache.group
            own.attention.attend(queries, inputs[group], own.cache, plans[group], attended)
        last()
        if self._behind is not None:
            self._behind(inputs)
        hidden, padded = self._buffers.hidden, size - tokens + plans[0].padded_tokens
        return RanStep(hidden, hidden.index_select(0, sampled), padded)

    def _captured(self, size: int) -> _Pieces:
        device = self._buffers.hidden.device
        zeros, slots = np.zeros(size, np.int64), np.full(size, self._padding_slot)
        lines = Upload([zeros, zeros, *[slots] * self._groups], device)
        self._recorder.warm_up(lambda: self._driven(lines, lambda piece: piece()))
        replays: list[Replay] = []

        def recorded(piece: Callable[[], _AttentionCall | None]) -> _AttentionCall | None:
            own, replay = self._recorder.record(piece)
            replays.append(replay)
            return own

        attention = self._driven(lines, recorded)
        return _Pieces(lines, replays, attention)

    def _driven(
        self, lines: Upload, run: Callable[[Callable[[], _AttentionCall | None]], _AttentionCall | None]
    ) -> list[_AttentionCall]:
        """Pass through the model a piece at a time, with whatever the buffers hold in attention's place."""
        token_ids, positions, *slots = lines.tensors
        # No piece reads a block table
        nobody = torch.zeros((0, 0), dtype=torch.int32, device=token_ids.device)
        inputs = [AttentionInputs(positions, own, nobody, [], [], None, self._padding_slot) for own in slots]
        forward = self._model.forward_split_at_attention(token_ids, inputs, self._caches)
        found: list[_AttentionCall] = []
        sent: Tensor | None = None
        while (own := run(partial(self._piece, forward, sent, len(token_ids)))) is not None:
            found.append(own)
            sent = self._views(own, len(token_ids))[1]
        return found

    def _piece(
        self, forward: Generator[AttentionBoundary, Tensor | None, Tensor], sent: Tensor | None, size: int
    ) -> _AttentionCall | None:
        """Run on to the next attention, and return it; None: the pass has ended."""
        try:
            boundary = forward.send(sent)
        except StopIteration as end:
            self._buffers.hidden[:size].copy_(end.value)
            return None
        own = _AttentionCall.of(boundary)
        self._views(own, size)[0].copy_(boundary.queries)
        return own

    def _views(self, own: _AttentionCall, tokens: int) -> tuple[Tensor, Tensor]:
        """Return (queries, results of attention) of this many tokens."""
        (heads, dim), (_, attended) = own.shapes
        return (
            self._buffers.queries[: tokens * heads * dim].view(tokens, heads, dim),
            self._buffers.attended[: tokens * heads * attended].view(tokens, heads, attended),
        )


def _padded(batch: HostBatch, size: int, padding_slot: int) -> list[NDArray[Any]]:
    slots = (grown(own, (size,), padding_slot) for own in batch.slots)
    return [grown(batch.token_ids, (size,)), grown(batch.positions, (size,)), *slots]
