"""Operators for a GPU: Triton kernels, and the vendor's matrix products."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchinfer.models.ops.attention import (
    AttentionInputs,
    AttentionPlan,
    FixedPlan,
    HeadTurn,
    LayerCache,
    Windows,
)
from batchinfer.models.ops.contests import LibraryChoice
from batchinfer.models.ops.gpu_experts import CodedExperts, TritonExperts, TritonHeads, choose
from batchinfer.models.ops.gpu_latents import LatentPlan, plain_weights
from batchinfer.models.ops.gpu_linear import (
    Fp8Head,
    Fp8Linear,
    Int8Head,
    Int8Linear,
    InvariantExact,
    InvariantHead,
    InvariantLinear,
    LibraryExact,
    LibraryHead,
    LibraryLinear,
    TritonAdapters,
    WeightPanel,
    WidenedLinear,
)
from batchinfer.models.ops.gpu_sparse import sparse_linear
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import (
    AdapterRoom,
    Adapters,
    CodedWeight,
    Experts,
    ExpertWeights,
    Factors,
    Head,
    HeadsLinear,
    LatentHeads,
    Linear,
    SparseWeight,
    Weight,
    values_of,
)
from batchinfer.models.ops.library_products import ChosenGated, LibraryFp8, LibraryGated, LibraryGrouped
from batchinfer.models.ops.prompts.prefill import AnyPrefill
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.advance_rows import StepRows
from batchinfer_kernels.arithmetic import WeightCodes
from batchinfer_kernels.cost import Peaks
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu import attention_plan
from batchinfer_kernels.gpu.advance_rows import advance_rows
from batchinfer_kernels.gpu.attention_launch import MAX_GROUP, MAX_HEAD_DIM
from batchinfer_kernels.gpu.attention_plan import AttentionShape, Room
from batchinfer_kernels.gpu.combine import combine
from batchinfer_kernels.gpu.copy_parts import copy_parts
from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.latent_attention import MAX_LATENT, latent_attention
from batchinfer_kernels.gpu.log_probabilities import log_probabilities
from batchinfer_kernels.gpu.mask import mask
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.penalties import penalise
from batchinfer_kernels.gpu.rms_norm import rms_norm
from batchinfer_kernels.gpu.rope_store import rope as rotate
from batchinfer_kernels.gpu.rope_store import rope_store
from batchinfer_kernels.gpu.sample import sample
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.penalties import Penalties
from batchinfer_kernels.prefix_groups import Ints
from batchinfer_kernels.routing import Routing
from batchinfer_kernels.sample import RowSampling

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Peaks of GPUs without a known datasheet: an H100's peaks in 16-bit floats (NVIDIA's datasheet)
USUAL_PEAKS = Peaks(989e12, 3.35e12)


class TritonPlan(FixedPlan):
    """The attention plan of a step for Triton kernels, with the step's block tables.

    Attributes:
        plan: The launches of batchinfer's kernels for all rows.
        tables: The block tables, (sequences, maximum blocks) int32.
        pages: The plan of a library that computes the chunks of prompts; see `PromptPrefill.plan`. None: there is none.
        singles: The launches without the chunks that the library computes.
        shares: True if the plan may share work between sequences with a common prefix.
    """

    padded_tokens = 0

    def __init__(
        self,
        plan: attention_plan.LaunchPlan,
        inputs: AttentionInputs,
        pages: object | None = None,
    ) -> None:
        """Create the plan.

        Args:
            plan: The launches of batchinfer's kernels.
            inputs: The inputs of the step.
            pages: The plan of a library that computes the chunks of prompts. None: there is none.
        """
        self.plan, self.tables, self.pages = plan, inputs.block_tables, pages
        self.singles = plan if pages is None else plan.without_chunks()
        self.shares = inputs.keeps_all

    @property
    def sizes(self) -> tuple[object, ...]:
        """Return the sizes on which attention's kernel launches depend; see `FixedPlan.sizes`."""
        return self.plan.sizes

    @property
    def contexts(self) -> Tensor:
        """Return the tensor of context lengths that attention reads, (rows,) int32; see `FixedPlan.contexts`."""
        return self.plan.contexts

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Return True if later decode steps of the same sequences can use this plan by updating only `contexts`.

        Args:
            context_lens: The maximum context length of each sequence in these steps.
        """
        return self.plan.serves(context_lens)

    def place(self) -> None:
        """Copy the plan to the device, before a CUDA graph that reads it is captured."""
        self.plan.place()

    def refill(self, other: FixedPlan) -> None:
        """Copy another step's plan, except block tables, into this plan's tensors, which a CUDA graph reads.

        The owner of the graph updates the block tables.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(other, TritonPlan):
            raise TypeError(f"{type(other).__name__} was not made by these operators")
        self.plan = self.plan.refilled(other.plan)


class TritonOps(Ops):
    """Operators for a GPU. In deterministic mode, the results of a row depend only on that row, bit by bit."""

    name = "triton"

    def __init__(self, shape: AttentionShape, peaks: Peaks = USUAL_PEAKS) -> None:
        """Create the operators of a model on a GPU.

        Args:
            shape: The properties of the model's attention. If `shape.deterministic`, no result depends on the batch.
            peaks: The peak FLOP/s and bandwidth of the GPU, which determine how weights of 4 bits are multiplied.
        """
        self._shape, self._peaks = shape, peaks
        self._panel = WeightPanel()
        self._prefill: AnyPrefill | None = None
        # Weak references, so that layers of a calibration can be freed
        self._library_layers: list[weakref.ref[LibraryChoice]] = []

    @property
    def shape(self) -> AttentionShape:
        """Return the properties of the model's attention, such as its dtype and numbers of heads."""
        return self._shape

    @property
    def library_layers(self) -> Sequence[LibraryChoice] | None:
        """Return the packed layers that a library can also compute; None in deterministic mode."""
        if self._shape.deterministic:
            return None
        return [layer for known in self._library_layers if (layer := known()) is not None]

    def with_prefill(self, prefill: AnyPrefill) -> TritonOps:
        """Return a copy of these operators with another implementation of the attention of prompts.

        Args:
            prefill: The implementation.
        """
        made = TritonOps(self._shape, self._peaks)
        made._prefill, made.name = prefill, f"{self.name}+{prefill.extra}"
        return made

    @staticmethod
    def can_run(dtype: torch.dtype, group: int, head_dim: int, latent: bool = False) -> bool:
        """Return True if batchinfer's GPU kernels support a model.

        Args:
            dtype: The dtype of activations.
            group: The number of query heads per KV head.
            head_dim: The size of a head, or of a latent.
            latent: True if the KV cache stores latents.
        """
        if latent:
            return dtype in DTYPES and head_dim <= MAX_LATENT
        return dtype in DTYPES and group <= MAX_GROUP and head_dim <= MAX_HEAD_DIM

    def supports_cache(self, cache: CacheSpec) -> bool:
        """Return True for all caches except quantised latents."""
        return cache.dtype is None or not cache.latent

    def linear(self, codes: WeightCodes | None) -> str:
        """Return the name of the method that computes linear layers, for the report.

        Args:
            codes: The quantised type of most weights, which is the result. None: they are floats, and the result is
                "library" or, in deterministic mode, "triton".
        """
        if codes is not None:
            return codes
        return "triton" if self._shape.deterministic else "library"

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a linear layer for a weight: for one of batchinfer's kernels, or for the vendor's library.

        Args:
            weight: (outputs, inputs), in floats, sparse or quantised.
            bias: (outputs,). None: there is none.
        """
        if isinstance(weight, SparseWeight) and not self._shape.deterministic:
            return sparse_linear(weight.values, bias)
        return self._pack(weight, bias, None) or LibraryLinear(values_of(weight, self.name), bias)

    def pack_gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a layer act(gate) * up, which is computed by one kernel if possible; see `Ops.pack_gated`."""
        made = self._pack(weight, bias, activation)
        return self._gated(weight, bias, activation) if made is None else made

    def pack_head(self, weight: Weight) -> Head:
        """Return the output layer, which computes float32 logits (tokens, vocab) from its weight (vocab, inputs)."""
        if isinstance(weight, CodedWeight):
            int8 = weight.codes.dtype == torch.int8
            return Int8Head(weight) if int8 else Fp8Head(weight, self._shape.deterministic)
        values = values_of(weight, self.name)
        return InvariantHead(values) if self._shape.deterministic else LibraryHead(values)

    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a linear layer with float32 results and an unquantised weight (outputs, inputs), such as a router."""
        kind = InvariantExact if self._shape.deterministic else LibraryExact
        return kind(weight, bias)

    def choose_experts(self, logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
        """Choose the experts of each token, by one kernel if it supports the routing.

        Args:
            logits: (tokens, experts) float32, the output of the router.
            routing: The rule by which experts are chosen.
            correction: (experts,), numbers to add to scores for the choice only. None: there are none.
        """
        return choose(logits, routing, correction)

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        """Return the experts of a layer, which are computed by grouped matrix products; see `Ops.pack_experts`."""
        fixed = self._shape.deterministic
        if gate_up.mxfp4 or gate_up.int4:
            return CodedExperts(gate_up, down, activation, fixed, self._shape.dtype)
        library = None if fixed else LibraryGrouped.of(gate_up, down, activation)
        made = TritonExperts(gate_up, down, activation, fixed, library)
        if library is not None:
            self._library_layers.append(weakref.ref(made))
        return made

    def combine(self, made: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's expert results, (tokens, N), for ranks that hold different experts.

        Args:
            made: (tokens * chosen, N), the results of the experts that the router chose for each token, in the router's
                order.
            weights: (tokens, chosen) float32, the weights of these results.
        """
        return combine(made, torch.arange(len(made), device=made.device), weights)

    def _pack(self, weight: Weight, bias: Tensor | None, activation: Activation | None) -> Linear | None:
        fixed = self._shape.deterministic
        if isinstance(weight, CodedWeight):
            if weight.group:
                panel = None if fixed else self._panel
                return WidenedLinear(weight, bias, activation, self._shape.dtype, panel, self._peaks)
            if weight.codes.dtype == torch.int8:
                return Int8Linear(weight, bias, activation)
            return self._pack_fp8(weight, bias, activation)
        return InvariantLinear(values_of(weight, self.name), bias, activation) if fixed else None

    def _gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        fused = LibraryGated.of(weight, bias, activation) if isinstance(weight, Tensor) else None
        if fused is None:
            return super().pack_gated(weight, bias, activation)
        made = ChosenGated(self, self.pack_linear(weight, bias), activation, fused)
        self._library_layers.append(weakref.ref(made))
        return made

    def _pack_fp8(self, weight: CodedWeight, bias: Tensor | None, activation: Activation | None) -> Fp8Linear:
        fixed = self._shape.deterministic
        library = None if fixed else LibraryFp8.of(weight, bias, self._shape.dtype)
        made = Fp8Linear(weight, bias, activation, fixed, library)
        if library is not None:
            self._library_layers.append(weakref.ref(made))
        return made

    def spare_bytes(self, rows: int, longest: int, device: torch.device, queries: int = 1) -> int:
        """Return how many more bytes attention may need in any step than in a step of rows with full contexts.

        Other steps may split the attention of a row into parts, whose partial results need memory.

        Args:
            rows: The number of queries in the step.
            longest: The maximum context length in tokens.
            device: The device.
            queries: The maximum number of queries per sequence.
        """
        return self._shape.spare_part_bytes(rows, longest, device, queries)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (RMSNorm of x + residual, x + residual), each like x.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            eps: A number to add to the mean square.
            residual: (..., hidden), which is added to x before the norm. None: it is 0.
            offset: A number to add to the weight, such as Gemma's 1.
        """
        return rms_norm(x, weight, eps, residual, offset)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        """Norm and rotate q and k as `turn` states, write k and v to the cache, and return the rotated q.

        q, k and v are (tokens, heads, head size).
        """
        return rope_store(
            q,
            k,
            v,
            turn.rope.cos,
            turn.rope.sin,
            cache.k,
            cache.v,
            inputs.slots,
            turn.q_norm,
            turn.k_norm,
            turn.eps,
            inputs.positions,
            offset=turn.offset,
            interleaved=turn.rope.interleaved,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )

    def rope(self, q: Tensor, turn: HeadTurn, inputs: AttentionInputs) -> Tensor:
        """Return normed and rotated q, (tokens, query heads, head size), without writing to a cache; see `Ops.rope`."""
        return rotate(
            q,
            turn.rope.cos,
            turn.rope.sin,
            turn.q_norm,
            turn.eps,
            inputs.positions,
            offset=turn.offset,
            interleaved=turn.rope.interleaved,
        )

    def advance_rows(
        self, tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
    ) -> None:
        """Write the inputs of the next decode step to `kept` on the device.

        Args:
            tokens: (n,) int64, the tokens that the previous step sampled.
            step: The number of the step within multi-step decoding, from 0.
            firsts: (n,) int32, the context length of each row in step 0.
            repeats: (n,) int32, the number of steps of multi-step decoding in which each row decodes a token.
            kept: The input tensors, which are changed in place.
        """
        advance_rows(tokens, step, firsts, repeats, kept)

    def copy_parts(self, cache: LayerCache, parts: Tensor) -> None:
        """Copy K and V of tokens from one block of the cache to the same offsets of another block.

        Args:
            cache: The cache of the layer.
            parts: (n, 4) int64, one copy per row: source block, target block, first offset, end offset.
        """
        for k, v in cache.copied:
            copy_parts(k, v, parts)

    @property
    def chunks_need_more_memory(self) -> bool:
        """Return True if a later chunk of a prompt may need more memory than a whole prompt of as many tokens.

        This is so if the cache stores latents, except in deterministic mode.
        """
        return self._shape.latent and not self._shape.deterministic

    @property
    def follows_trees(self) -> bool:
        """Return True if steps may contain draft trees: unless the cache stores latents."""
        return not self._shape.latent

    def plan_attention(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: Windows,
        other_group: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Plan the launches of a step's attention, for all layers of a cache group; see `Ops.plan_attention`."""
        self.check_tree(inputs, windows)
        if self._shape.latent and not self._shape.deterministic:
            return LatentPlan(inputs, block_size, self._plan_latents)
        library = None if inputs.tree is not None else self._prefill  # no library supports masks of trees
        pages = None if library is None else library.plan(inputs, windows)
        if isinstance(other_group, TritonPlan) and not (inputs.keeps_all or other_group.shares):
            return TritonPlan(other_group.plan.with_windows(windows), inputs, pages)
        (queries, contexts), device = _lengths(inputs), inputs.block_tables.device
        shared = self._shared(inputs, queries, contexts, block_size)
        plan = attention_plan.plan_attention(
            queries, contexts, self._shape, device, shared, windows=windows, tree=inputs.tree
        )
        return TritonPlan(plan, inputs, pages)

    def _plan_latents(self, inputs: AttentionInputs) -> TritonPlan:
        (queries, contexts), device = _lengths(inputs), inputs.block_tables.device
        return TritonPlan(attention_plan.plan_attention(queries, contexts, self._shape, device), inputs)

    def plan_captured(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: Windows,
        longest: int,
        other_group: AttentionPlan | None = None,
        before: FixedPlan | None = None,
        queries: int = 1,
    ) -> FixedPlan:
        """Return a plan of attention for a CUDA graph, which stays valid while contexts grow up to `longest` tokens.

        Args:
            inputs: The inputs of the step.
            block_size: The number of tokens in a block.
            windows: The sliding windows of the layers; None for a layer without a window.
            longest: The maximum context length.
            other_group: The plan of another cache group for the same step. None: there is none.
            before: The plan of the previous decode step, which is extended, if the step had the same sequences in the
                same order. None: it had others.
            queries: The maximum number of queries per sequence.
        """
        self.check_tree(inputs, windows)
        alike = other_group.plan if isinstance(other_group, TritonPlan) else None
        if isinstance(before, TritonPlan):
            return TritonPlan(before.plan.grown(inputs.context_lens, alike), inputs)
        if isinstance(other_group, TritonPlan) and not (inputs.keeps_all or other_group.shares):
            return TritonPlan(other_group.plan.with_windows(windows), inputs)
        (lens, contexts), device = _lengths(inputs), inputs.block_tables.device
        shared = self._shared(inputs, lens, contexts, block_size, queries)
        room = Room(longest, sharing=None, queries=queries)
        plan = attention_plan.plan_attention(
            lens, contexts, self._shape, device, shared, room, windows, inputs.tree
        )
        return TritonPlan(plan, inputs)

    def _shared(
        self, inputs: AttentionInputs, lens: Ints, contexts: Ints, block_size: int, queries: int = 1
    ) -> list[attention_plan.SharedPrefix]:
        # Tables of a window do not show shared prefixes: entries before the window are equal in all tables
        tables = inputs.host_tables
        if tables is None or not inputs.keeps_all or self._shape.latent:
            return []
        return attention_plan.find_shared(lens, contexts, tables, block_size, self._shape.unit, queries)

    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, rules: ScoreRules, out: Tensor | None = None
    ) -> Tensor:
        """Return the result of attention over cached K and V, (tokens, query heads, head size); see `Ops.attention`.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(plan, TritonPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        todo, prefill = plan.plan, self._prefill
        if prefill is not None and plan.pages is not None and prefill.covers(cache, rules):
            out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
            prefill.run(plan.pages, q, cache, rules, out)
            todo = plan.singles
        return paged_attention(
            q,
            cache.k,
            cache.v,
            plan.tables,
            todo,
            rules,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            out=out,
        )

    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        """Return A and B of LoRA adapters, packed for one matrix product.

        Args:
            factors: A and B of each adapter, or None for an adapter that does not change the product.
            room: How many adapters the device holds at the same time. `Adapters.place` must copy them there. None: all
                adapters are on the device from the start.
        """
        return TritonAdapters(factors, self._shape.deterministic, room)

    def pack_heads(self, weights: ExpertWeights) -> HeadsLinear:
        """Return a linear layer with a matrix of its own for each attention head.

        Args:
            weights: The matrices (heads, outputs, inputs).
        """
        return TritonHeads(weights, self._shape.deterministic)

    def latent_attention(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        heads: LatentHeads,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the result of attention over cached latents, (tokens, heads, size of a value).

        A `LatentPlan` decides for which sequences K and V are computed from latents. See `Ops.latent_attention` for the
        arguments.
        """
        if not isinstance(plan, LatentPlan):
            return super().latent_attention(q, cache, plan, heads, scale, out)
        work, absorbed = plan.work(q, heads), super().latent_attention
        if not work.decompressed and work.absorbed is not None:
            return absorbed(q, cache, work.absorbed, heads, scale, out)
        out = q.new_empty(*q.shape[:2], plain_weights(heads)[1].shape[1]) if out is None else out
        for group in work.decompressed:
            group.attend(q, cache, heads, scale, out)
        if work.absorbed is not None and work.rows is not None:
            own = q.index_select(0, work.rows)
            out.index_copy_(0, work.rows, absorbed(own, cache, work.absorbed, heads, scale))
        return out

    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        """Return the attention-weighted sums of cached latents, (tokens, heads, rank).

        Args:
            q: (tokens, heads, rank + R), queries multiplied by the weights of K, and R rotated values.
            cache: The layer's cache.
            plan: The result of `plan_attention`.
            scale: The factor of scores.
            rank: The number of values of a latent.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(plan, TritonPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        return latent_attention(q, cache.k, plan.tables, plan.plan, scale, rank)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return act(gate) * up, (tokens, size).

        Args:
            gate_up: (tokens, 2 * size), gate before up.
            activation: The activation of gate.
        """
        return gated_activation(gate_up, activation)

    def sample(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        """Sample a token from each row of logits (n, vocab), (n,) int64, by a Triton kernel; see `Ops.sample`."""
        return sample(logits, sampling)

    def log_probabilities(self, logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of the chosen tokens, and log-probabilities and ids of the most likely tokens.

        Args:
            logits: (n, vocab).
            chosen: (n,) int64, token ids.
            most: The number of most likely tokens per row.
        """
        return log_probabilities(logits, chosen, most)

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """Apply penalties and bans of tokens to logits (n, vocab), in place, by a Triton kernel; see `Ops.penalise`."""
        penalise(logits, penalties)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: (any, vocab).
            rows: (n,) int32, the rows to mask.
            bits: (n, ceil(vocab / 32)) int32, a bit per token, 1 if it is allowed.
        """
        mask(logits, rows, bits)


def _lengths(inputs: AttentionInputs) -> tuple[Ints, Ints]:
    # Converted only once per step
    return np.array(inputs.query_lens, np.int64), np.array(inputs.context_lens, np.int64)
