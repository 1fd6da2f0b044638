"""The interface of the operators that a decoder consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from batchinfer.models.ops.attention import (
    AttentionInputs,
    AttentionPlan,
    HeadTurn,
    LayerCache,
    RopeTable,
    Windows,
)
from batchinfer.models.ops.layers import (
    ActivatedLinear,
    AdapterRoom,
    Adapters,
    CodedWeight,
    DecoderLayer,
    Experts,
    ExpertWeights,
    Factors,
    Head,
    HeadsLinear,
    LatentHeads,
    LayerParts,
    Linear,
    RoundedWeight,
    Weight,
    finite_argmax,
    write_result,
)
from batchinfer.models.spec.parameters import BIAS
from batchinfer.models.spec.spec import CacheSpec, LayerSpec, NormSpec
from batchinfer_kernels.advance_rows import StepRows, advance_rows_reference
from batchinfer_kernels.arithmetic import WeightCodes, WeightForm
from batchinfer_kernels.copy_parts import copy_parts_reference
from batchinfer_kernels.draft_tree import move_slots_reference
from batchinfer_kernels.experts import Choice, choose_experts, combine_reference
from batchinfer_kernels.fp8_matmul import quantize_rows_fp8
from batchinfer_kernels.gated_activation import Activation, activation_reference
from batchinfer_kernels.int4_linear import quantize_groups
from batchinfer_kernels.latent_attention import latent_store_reference
from batchinfer_kernels.layer_norm import layer_norm_reference
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.mask import is_excluded, mask_reference
from batchinfer_kernels.paged_attention import CODES, ScoreRules
from batchinfer_kernels.penalties import Penalties, penalise_reference
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.routing import Routing
from batchinfer_kernels.sample import NO_TOKEN as NO_TOKEN
from batchinfer_kernels.sample import RowSampling, sample_reference


class Ops(ABC):
    """An implementation of all operators of a decoder, such as matrix products, norms and attention.

    Attributes:
        name: The name of the implementation, for the report.
    """

    name: str

    def linear(self, codes: WeightCodes | None) -> str:
        """Return the name of the method that computes linear layers, for the report.

        Args:
            codes: The quantised type of most weights. None: they are floats.
        """
        return self.name if codes is None else codes

    def round_weight(self, weight: Tensor, form: WeightForm) -> tuple[Tensor, Tensor]:
        """Quantise a float weight, bitwise equal to the form's reference implementation.

        Args:
            weight: (N outputs, K inputs).
            form: The type of the quantised values, and which values share a scale.

        Returns:
            The quantised values (N, K), and float32 scales (N,), or (N, groups) for int4.
        """
        if form.codes == "int4":
            return quantize_groups(weight, form.group)
        return quantize_weight(weight, form.hadamard) if form.codes == "int8" else quantize_rows_fp8(weight)

    def quantize(self, weight: Tensor, form: WeightForm) -> CodedWeight | RoundedWeight:
        """Quantise a float weight (outputs, inputs), or note the form, so that `pack_linear` quantises it.

        Args:
            weight: The weight.
            form: The form of the result.

        Returns:
            A CodedWeight with quantised values, or a RoundedWeight, which `pack_linear` quantises to the same values.
        """
        return CodedWeight(*self.round_weight(weight, form), group=form.group, hadamard=form.hadamard)

    def quantize_experts(self, weights: ExpertWeights, form: WeightForm) -> ExpertWeights:
        """Quantise the float weights of experts, or return them with `form` set, so that `pack_experts` quantises them.

        Args:
            weights: The weights of one matrix product of all experts.
            form: The form of the quantised weights.
        """
        count, outputs, inputs = weights.weight.shape
        codes, scales = self.round_weight(weights.weight.view(-1, inputs), form)
        scales = scales.view(count, outputs, *scales.shape[1:])
        codes = codes.view(count, outputs, inputs)
        return replace(weights, weight=codes, scales=scales, group=form.group, hadamard=form.hadamard)

    def convert_weight(self, weight: Tensor, form: WeightForm | None) -> Weight:
        """Return a float weight (outputs, inputs) unchanged if `form` is None, or else the result of `quantize`.

        Args:
            weight: The weight.
            form: The form of the quantised weight. None: the weight is not quantised.
        """
        return weight if form is None else self.quantize(weight, form)

    def convert_heads(self, weight: Tensor, form: WeightForm | None) -> ExpertWeights:
        """Return the float weights of attention heads, quantised if `form` is given.

        Args:
            weight: (heads, outputs, inputs).
            form: The form of the quantised weights. None: they stay floats.
        """
        if form is None:
            return ExpertWeights(weight)
        coded = [self.round_weight(matrix, form) for matrix in weight]
        # As bytes, since some versions of torch cannot stack float8_e4m3fn
        codes = torch.stack([codes.view(torch.uint8) for codes, _ in coded]).view(coded[0][0].dtype)
        scales = torch.stack([scales for _, scales in coded])
        return ExpertWeights(codes, scales=scales, hadamard=form.hadamard)

    @abstractmethod
    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a linear layer with this weight, packed for its matrix product.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.

        Raises:
            TypeError: These operators do not support the type of quantised values.
        """

    def pack_gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a layer that computes act(gate) * up, (tokens, outputs / 2), from one weight of gate and up.

        Args:
            weight: (outputs, inputs), with the rows of gate before the rows of up.
            bias: (outputs,). None: there is none.
            activation: The activation of the gate.
        """
        inner = self.pack_linear(weight, bias)
        return ActivatedLinear(inner, inner.out_features // 2, self.gated_activation, activation)

    def pack_activated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a linear layer with an activation of its results, (tokens, outputs).

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.
            activation: The activation of the results.
        """
        inner = self.pack_linear(weight, bias)
        return ActivatedLinear(inner, inner.out_features, self.activation, activation)

    @abstractmethod
    def pack_head(self, weight: Weight) -> Head:
        """Return the output layer, which computes float32 logits (tokens, vocab) from its weight (vocab, inputs).

        Logits are never rounded to bfloat16, whose values near 100 are 0.5 apart.
        """

    @abstractmethod
    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer with float32 results whose weight is never quantised, such as the router of experts.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.
        """

    @abstractmethod
    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        """Return the experts of a layer, each a gated feed-forward network.

        Args:
            gate_up: The weights of each expert's first product, with the rows of gate before the rows of up.
            down: The weights of each expert's second product.
            activation: The activation of the gate.
        """

    def combine(self, made: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's expert results, (tokens, N), for ranks that hold different experts.

        It is bitwise equal to the sum that `Experts` of these operators compute on a single rank.

        Args:
            made: (tokens * chosen, N), the results of the experts that the router chose for each token, in the router's
                order.
            weights: (tokens, chosen) float32, the weights of these results.
        """
        return combine_reference(made, torch.arange(len(made), device=made.device), weights)

    @abstractmethod
    def pack_heads(self, weights: ExpertWeights) -> HeadsLinear:
        """Return a linear layer with a matrix of its own for each attention head.

        Args:
            weights: The matrices (heads, outputs, inputs).
        """

    @abstractmethod
    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        """Return A and B of LoRA adapters, packed for one matrix product.

        Args:
            factors: A and B of each adapter, or None for an adapter that does not change the product.
            room: How many adapters the device holds at the same time. `Adapters.place` selects them; at first there are
                none. None: the device holds all adapters.
        """

    def choose_experts(self, logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
        """Choose the experts of each token, without a host synchronisation.

        Args:
            logits: (tokens, experts) float32, the output of the router.
            routing: The rule by which experts are chosen.
            correction: (experts,), numbers that are added to scores for the choice only, as in DeepSeek-V3. None: the
                rule has none.
        """
        return choose_experts(logits, routing, correction)

    def fuse(self, spec: LayerSpec, parts: LayerParts) -> DecoderLayer | None:
        """Return a decoder layer that is computed by one fused operator; None if these operators cannot fuse the layer.

        Args:
            spec: The specification of the layer.
            parts: Its packed weights.
        """
        return None

    def cache_shape(self, cache: CacheSpec, block_size: int) -> tuple[int, int, int]:
        """Return the shape of one block of K or V in one layer, (heads, block_size, dim). Sizes may be rounded up.

        Args:
            cache: The sizes of the layer's cache.
            block_size: The number of tokens in a block.
        """
        return cache.heads, block_size, cache.dim

    def supports_cache(self, cache: CacheSpec) -> bool:
        """Return True if these operators can read and write a KV cache with this dtype and these sizes."""
        return cache.dtype is None

    def block_bytes(self, caches: Iterable[CacheSpec], block_size: int, itemsize: int) -> int:
        """Return the bytes of one block in the caches of all layers together, padding included.

        Args:
            caches: The sizes of each layer's cache.
            block_size: The number of tokens in a block.
            itemsize: The bytes of a value in the run's dtype.
        """
        found = 0
        for cache in caches:
            heads, size, dim = self.cache_shape(cache, block_size)
            found += cache.tensors * heads * size * cache.head_bytes(dim, itemsize)
        return found

    def spare_bytes(self, rows: int, longest: int, device: torch.device, queries: int = 1) -> int:
        """Return how many more bytes attention may need in any step than in a uniform step.

        In a uniform step, all rows have contexts of `longest` tokens and share no prefix. Other steps may split the
        attention of a row into parts, whose partial results need memory.

        Args:
            rows: The number of queries in the step.
            longest: The maximum context length in tokens.
            device: The device.
            queries: The maximum number of queries per sequence.
        """
        return 0

    def allocate_cache(
        self,
        cache: CacheSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LayerCache:
        """Return a zero-filled cache of one layer.

        Args:
            cache: The sizes of the layer's cache.
            blocks: The number of blocks.
            block_size: The number of tokens in a block.
            dtype: The dtype of the run, and of a cache that is not quantised.
            device: The device of the cache.

        Raises:
            ValueError: These operators do not support the cache.
        """
        if not self.supports_cache(cache):
            raise ValueError(f"{self.name} operators do not support a KV cache in {cache.dtype}")
        shape = (blocks, *self.cache_shape(cache, block_size))
        kept = dtype if cache.dtype is None else CODES[cache.dtype]
        made = [self.zeros(shape, kept, device) for _ in range(cache.tensors)]
        if cache.dtype is None:
            return LayerCache(made[0], made[-1], block_size)
        scales = [self.zeros(shape[:3], torch.float32, device) for _ in made]
        return LayerCache(made[0], made[-1], block_size, k_scale=scales[0], v_scale=scales[-1])

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Allocate a zero-filled tensor of a cache."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings of tokens, (tokens, hidden).

        Args:
            token_ids: (tokens,) int64.
            table: (vocab, hidden).
        """
        return embedding(token_ids, table)

    def norm(
        self,
        spec: NormSpec,
        parameters: Mapping[str, Tensor],
        name: str,
        x: Tensor,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual), each (tokens, hidden). The norm is an RMSNorm or a LayerNorm.

        Args:
            spec: The kind of norm, and its epsilon.
            parameters: The weights and biases of norms.
            name: The name of the norm in `parameters`.
            x: (tokens, hidden).
            residual: (tokens, hidden), which is added to x before the norm. None: it is 0.
        """
        weight, bias = parameters[name], parameters.get(name + BIAS)
        if spec.kind == "layer":
            return self.layer_norm(x, weight, bias, spec.eps, residual)
        return self.rms_norm(x, weight, spec.eps, residual, spec.offset)

    @abstractmethod
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (RMSNorm of x + residual, x + residual), each like x; see batchinfer_kernels.rms_norm.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            eps: A number to add to the mean square.
            residual: (..., hidden), which is added to x before the norm. None: it is 0.
            offset: A number to add to the weight, such as Gemma's 1.
        """

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (LayerNorm of x + residual, x + residual), each like x; see batchinfer_kernels.layer_norm.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            bias: (hidden,). None: there is none.
            eps: A number to add to the variance.
            residual: (..., hidden), which is added to x before the norm. None: it is 0.
        """
        return layer_norm_reference(x, weight, bias, eps, residual)

    @abstractmethod
    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        """Norm q and k (if `turn` has norms) and rotate them, write k and v to the cache, and return rotated q.

        See batchinfer_kernels.rope_store.

        Args:
            q: (tokens, query heads, head size).
            k: (tokens, KV heads, head size).
            v: (tokens, KV heads, head size).
            turn: The rotation, and the norms of q and k.
            inputs: The positions and slots of the tokens.
            cache: The layer's cache.
        """

    @abstractmethod
    def rope(self, q: Tensor, turn: HeadTurn, inputs: AttentionInputs) -> Tensor:
        """Return rotated q, bitwise equal to the result of `rope_store`, for a layer that reads another layer's cache.

        Args:
            q: (tokens, query heads, head size).
            turn: The rotation and the norm of q.
            inputs: The positions of the tokens.
        """

    def store(self, k: Tensor, v: Tensor, inputs: AttentionInputs, cache: LayerCache) -> None:
        """Write k and v to the cache unchanged, for models whose own code rotates k.

        It calls `rope_store` with angles of 0.

        Args:
            k: (tokens, KV heads, head size).
            v: (tokens, KV heads, head size).
            inputs: The slots of the tokens.
            cache: The layer's cache.
        """
        heads, ones = k.shape[1], torch.ones(1, 1, device=k.device)
        still = HeadTurn(RopeTable(ones, torch.zeros_like(ones)))
        both = torch.cat((k, v), dim=1)  # rope_store requires rows of equal stride
        at_zero = replace(inputs, positions=torch.zeros_like(inputs.positions))
        self.rope_store(both[:, :heads], both[:, :heads], both[:, heads:], still, at_zero, cache)

    def copy_parts(self, cache: LayerCache, parts: Tensor) -> None:
        """Copy K and V of tokens from one block of the cache to the same offsets of another block.

        Args:
            cache: The layer's cache.
            parts: (n, 4) int64, one copy per row: source block, target block, first offset, end offset.
        """
        for k, v in cache.copied:
            copy_parts_reference(k, v, parts)

    @property
    def chunks_need_more_memory(self) -> bool:
        """Return True if a later chunk of a prompt may need more memory than a whole prompt of as many tokens."""
        return False

    @property
    def follows_trees(self) -> bool:
        """Return True if these operators support draft trees in models without sliding windows."""
        return False

    def check_tree(self, inputs: AttentionInputs, windows: Windows) -> None:
        """Check that these operators support the draft tree of a step, if the step has one.

        Args:
            inputs: The inputs of the step.
            windows: The sliding windows of the layers.

        Raises:
            TypeError: They do not support it, or a layer has a window.
        """
        if inputs.tree is not None and not (self.follows_trees and windows == {None}):
            raise TypeError(f"{self.name} operators do not support draft trees with windows {set(windows)}")

    def advance_rows(
        self, tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
    ) -> None:
        """Write the inputs of the next decode step to `kept` on the device; see batchinfer_kernels.advance_rows.

        Args:
            tokens: (n,) int64, the tokens that the previous step sampled.
            step: The number of the step within multi-step decoding, from 0.
            firsts: (n,) int32, the context length of each row in step 0.
            repeats: (n,) int32, the number of steps of multi-step decoding in which each row decodes a token.
            kept: The input tensors, which are changed in place.
        """
        advance_rows_reference(tokens, step, firsts, repeats, kept)

    def move_slots(self, cache: LayerCache, moves: Tensor) -> None:
        """Move K and V of tokens within the cache.

        Args:
            cache: The layer's cache.
            moves: (n, 2) int64, source and target slot of each token.
        """
        for k, v in cache.copied:
            move_slots_reference(k, v, moves)

    @abstractmethod
    def plan_attention(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: Windows,
        other_group: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Return the plan of a step's attention, which all layers of a cache group read.

        Args:
            inputs: The inputs of the step.
            block_size: The number of tokens in a block.
            windows: The sliding windows of the group's layers; None for a layer without a window.
            other_group: The plan of another cache group for the same step. Its work items or buffers may be reused.
                None: there is none.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, rules: ScoreRules, out: Tensor | None = None
    ) -> Tensor:
        """Return the result of attention over cached K and V, (tokens, query heads, head size).

        See batchinfer_kernels.paged_attention.

        Args:
            q: (tokens, query heads, head size).
            cache: The layer's cache.
            plan: The result of `plan_attention`.
            rules: The scale, window, soft cap, sinks and bias of scores.
            out: Receives the result. None: the result is a new tensor.
        """

    def latent_store(
        self,
        q: Tensor,
        latent: Tensor,
        k: Tensor,
        rope: RopeTable,
        inputs: AttentionInputs,
        cache: LayerCache,
    ) -> Tensor:
        """Rotate q and k, write the latent and the rotated k of each token to the cache, and return rotated q.

        See batchinfer_kernels.latent_attention.

        Args:
            q: (tokens, heads, R), the R values of each query to rotate.
            latent: (tokens, rank), the normed latents.
            k: (tokens, R), the rotated part of keys, which all heads share.
            rope: Cosines and sines of the rotation.
            inputs: The positions and slots of the tokens.
            cache: The layer's cache.
        """
        cos, sin = rope.cos[inputs.positions], rope.sin[inputs.positions]
        return latent_store_reference(
            q, latent, k, cos, sin, cache.k, inputs.slots, interleaved=rope.interleaved
        )

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

        K and V are not computed from latents. Instead, their weights are applied to queries and results ("absorbed").

        Args:
            q: (tokens, heads, plain + R), the queries. Their last R values are rotated.
            cache: The layer's cache.
            plan: The result of `plan_attention`.
            heads: The weights that compute K and V from latents, and the size `plain`.
            scale: The factor of scores.
            out: Receives the result. None: the result is a new tensor.
        """
        plain, turned = q[..., : heads.plain], q[..., heads.plain :]
        absorbed = torch.cat((heads.k(plain), turned), -1)
        return write_result(heads.v(self.absorbed_attention(absorbed, cache, plan, scale, heads.rank)), out)

    @abstractmethod
    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        """Return the attention-weighted sums of cached latents, (tokens, heads, rank).

        See batchinfer_kernels.latent_attention.

        Args:
            q: (tokens, heads, rank + R), queries that were multiplied by the weights of K, and R rotated values.
            cache: The layer's cache.
            plan: The result of `plan_attention`.
            scale: The factor of scores.
            rank: The number of values of a latent.
        """

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(logits / cap).

        Args:
            logits: (n, vocab) float32, which may be changed in place.
            cap: The soft cap.
        """
        return (logits / cap).tanh_().mul_(cap)

    def sample(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        """Sample a token from each row, (n,) int64; see batchinfer_kernels.sample.

        Args:
            logits: (n, vocab) float32.
            sampling: The sampling parameters of the rows.
        """
        return sample_reference(logits, sampling)

    def log_probabilities(self, logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities of chosen and most likely tokens; see batchinfer_kernels.log_probabilities.

        Args:
            logits: (n, vocab).
            chosen: (n,) int64, token ids.
            most: The number of most likely tokens.

        Returns:
            Log-probabilities of the chosen tokens (n,), and log-probabilities and ids of the most likely tokens (n,
                most).
        """
        return log_probabilities_reference(logits, chosen, most)

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """Apply penalties and bans of tokens to logits, in place; see batchinfer_kernels.penalties.

        Args:
            logits: (n, vocab) float32.
            penalties: The penalties and bans of the rows.
        """
        penalise_reference(logits, penalties)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: (any, vocab).
            rows: (n,) int32, the rows to mask.
            bits: (n, ceil(vocab / 32)) int32, a bit per token, 1 if it is allowed.
        """
        mask_reference(logits, rows, bits)

    def masked_argmax(self, logits: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's allowed token with the largest logit, and whether the row's most likely token is forbidden.

        Ties, and logits that are not finite, are handled as in finite_argmax.

        Args:
            logits: (n, vocab), which may be changed.
            bits: (n, ceil(vocab / 32)) int32, a bit per token, 1 if it is allowed.

        Returns:
            Tokens (n,) int64, and (n,) bool: True if the token with the largest logit of all is forbidden.
        """
        rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        barred = is_excluded(bits, logits.argmax(-1))
        self.mask(logits, rows, bits)
        return finite_argmax(logits), barred

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return act(gate) * up, (tokens, size).

        Args:
            gate_up: (tokens, 2 * size), gate before up.
            activation: The activation of gate.
        """

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of each value of x (tokens, size)."""
        return activation_reference(x, activation)
