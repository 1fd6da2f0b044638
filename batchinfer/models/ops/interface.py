"""The operators that a decoder is made of."""

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
    """One implementation of every operator; `name` goes into the report."""

    name: str

    def linear(self, codes: WeightCodes | None) -> str:
        """Return how linear layers are computed, for the report; `codes`: of most of their weights."""
        return self.name if codes is None else codes

    def round_weight(self, weight: Tensor, form: WeightForm) -> tuple[Tensor, Tensor]:
        """weight: (N, K) of floats → codes (N, K), and scales (N,) float32 or (N, groups), as the form's reference
        makes them, bit by bit."""
        if form.codes == "int4":
            return quantize_groups(weight, form.group)
        return quantize_weight(weight) if form.codes == "int8" else quantize_rows_fp8(weight)

    def quantize(self, weight: Tensor, form: WeightForm) -> CodedWeight | RoundedWeight:
        """Quantise a weight (out, in) of floats as `round_weight` does, or have that done while it is packed."""
        return CodedWeight(*self.round_weight(weight, form), group=form.group)

    def quantize_experts(self, weights: ExpertWeights, form: WeightForm) -> ExpertWeights:
        """Quantise the experts' weights, which are in floats, as `quantize` does each."""
        count, outputs, inputs = weights.weight.shape
        codes, scales = self.round_weight(weights.weight.view(-1, inputs), form)
        scales = scales.view(count, outputs, *scales.shape[1:])
        return replace(weights, weight=codes.view(count, outputs, inputs), scales=scales, group=form.group)

    def convert_weight(self, weight: Tensor, form: WeightForm | None) -> Weight:
        """Return a weight (out, in) in its form; None: as it is."""
        return weight if form is None else self.quantize(weight, form)

    def convert_heads(self, weight: Tensor, form: WeightForm | None) -> ExpertWeights:
        """Return the weights (heads, out, in) in their form; None: as they are."""
        if form is None:
            return ExpertWeights(weight)
        coded = [self.round_weight(matrix, form) for matrix in weight]
        # As bytes: torch does not stack float8_e4m3fn everywhere
        codes = torch.stack([codes.view(torch.uint8) for codes, _ in coded]).view(coded[0][0].dtype)
        return ExpertWeights(codes, scales=torch.stack([scales for _, scales in coded]))

    @abstractmethod
    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a layer with this weight (out, in), packed once.

        Raises:
            TypeError: If these operators do not support the quantised values.
        """

    def pack_gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a layer act(gate) * up, (T, in) → (T, out / 2). The weight has the rows of gate before those of up."""
        inner = self.pack_linear(weight, bias)
        return ActivatedLinear(inner, inner.out_features // 2, self.gated_activation, activation)

    def pack_activated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a layer with an activation, (T, in) → (T, out)."""
        inner = self.pack_linear(weight, bias)
        return ActivatedLinear(inner, inner.out_features, self.activation, activation)

    @abstractmethod
    def pack_head(self, weight: Weight) -> Head:
        """Return the layer that computes logits, (T, in) → (T, out) float32.

        Logits are never rounded to bfloat16, whose values near 100 are 0.5 apart.
        """

    @abstractmethod
    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer with float32 results whose weight is never quantised, such as the router of experts."""

    @abstractmethod
    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        """Return experts with gated feed-forward layers, with the rows of gate before those of up."""

    def combine(self, made: Tensor, weights: Tensor) -> Tensor:
        """made: (T × chosen, N), the results of a token's experts in the order of its choice; weights: (T, chosen)
        float32 → (T, N), with the bits that experts of these operators have. torch's own has them on every CPU: no
        implementation contracts products and sums."""
        return combine_reference(made, torch.arange(len(made), device=made.device), weights)

    @abstractmethod
    def pack_heads(self, weights: ExpertWeights) -> HeadsLinear:
        """Prepare the weights of heads, (heads, out, in)."""

    @abstractmethod
    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        """Return the packed factors of adapters for a product.

        Args:
            factors: The factors of each adapter, or None for an adapter that does not change the product.
            room: The places for factors on the device, which are empty at first. None if all factors stay there.
        """

    def choose_experts(self, logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
        """logits: (T, experts) float32. See batchinfer_kernels.experts; the host waits for nothing."""
        return choose_experts(logits, routing, correction)

    def fuse(self, spec: LayerSpec, parts: LayerParts) -> DecoderLayer | None:
        """Return a layer that runs in one call, or None if these operators have none for it."""
        return None

    def cache_shape(self, cache: CacheSpec, block_size: int) -> tuple[int, int, int]:
        """Return the shape of one block of K or V in one layer, (heads, block_size, dim), perhaps rounded up."""
        return cache.heads, block_size, cache.dim

    def supports_cache(self, cache: CacheSpec) -> bool:
        """Return True if these operators read and write such a cache."""
        return cache.dtype is None

    def block_bytes(self, caches: Iterable[CacheSpec], block_size: int, itemsize: int) -> int:
        """Return the bytes of one block of all these layers, padding included.

        Args:
            caches: The cache of each layer.
            block_size: The number of tokens in a block.
            itemsize: The bytes of a value in the run's dtype.
        """
        found = 0
        for cache in caches:
            heads, size, dim = self.cache_shape(cache, block_size)
            found += cache.tensors * heads * size * cache.head_bytes(dim, itemsize)
        return found

    def spare_bytes(self, rows: int, longest: int, device: torch.device, queries: int = 1) -> int:
        """Return the bytes that attention of `rows` queries takes at most while a step runs, beyond what it takes where
        every row has a context of `longest` tokens and shares none: which steps those are depends on the operators.
        `queries`: the most of a sequence."""
        return 0

    def allocate_cache(
        self,
        cache: CacheSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> LayerCache:
        """Return a zero-filled cache of one layer, for a run in `dtype`.

        Raises:
            ValueError: If these operators do not support the cache.
        """
        if not self.supports_cache(cache):
            raise ValueError(f"{self.name} operators keep no {cache.dtype}")
        shape = (blocks, *self.cache_shape(cache, block_size))
        kept = dtype if cache.dtype is None else CODES[cache.dtype]
        made = [self.zeros(shape, kept, device) for _ in range(cache.tensors)]
        if cache.dtype is None:
            return LayerCache(made[0], made[-1], block_size)
        scales = [self.zeros(shape[:3], torch.float32, device) for _ in made]
        return LayerCache(made[0], made[-1], block_size, k_scale=scales[0], v_scale=scales[-1])

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Allocate a tensor of a cache, filled with zeros."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids: (T,) int64; table: (vocab, hidden) → (T, hidden)."""
        return embedding(token_ids, table)

    def norm(
        self,
        spec: NormSpec,
        parameters: Mapping[str, Tensor],
        name: str,
        x: Tensor,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), with the parameters of this name."""
        weight, bias = parameters[name], parameters.get(name + BIAS)
        if spec.kind == "layer":
            return self.layer_norm(x, weight, bias, spec.eps, residual)
        return self.rms_norm(x, weight, spec.eps, residual, spec.offset)

    @abstractmethod
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(normalised, x + residual); see batchinfer_kernels.rms_norm."""

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normalised, x + residual); see batchinfer_kernels.layer_norm. torch's own serves every device: it takes each
        row by itself."""
        return layer_norm_reference(x, weight, bias, eps, residual)

    @abstractmethod
    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        """Rotated q (T, q_heads, D); k and v (T, kv_heads, D) go to the cache. See batchinfer_kernels.rope_store."""

    @abstractmethod
    def rope(self, q: Tensor, turn: HeadTurn, inputs: AttentionInputs) -> Tensor:
        """Return rotated q (T, q_heads, D), bitwise equal to `rope_store`, for a layer that reads another's cache."""

    def store(self, k: Tensor, v: Tensor, inputs: AttentionInputs, cache: LayerCache) -> None:
        """k and v (T, kv_heads, D), rotated or not, go to the cache as they are: one pair of each head is turned by an
        angle of 0. For models whose own code rotates; a family of ours uses `rope_store`."""
        heads, ones = k.shape[1], torch.ones(1, 1, device=k.device)
        still = HeadTurn(RopeTable(ones, torch.zeros_like(ones)))
        both = torch.cat((k, v), dim=1)  # in rows of equal stride, as rope_store takes them
        at_zero = replace(inputs, positions=torch.zeros_like(inputs.positions))
        self.rope_store(both[:, :heads], both[:, :heads], both[:, heads:], still, at_zero, cache)

    def copy_parts(self, cache: LayerCache, parts: Tensor) -> None:
        """Copy K and V between blocks; parts are (n, 4) int64. See batchinfer_kernels.copy_parts."""
        for k, v in cache.copied:
            copy_parts_reference(k, v, parts)

    @property
    def chunks_need_more_memory(self) -> bool:
        """Return True if a chunk after cached tokens may need more memory than a whole prompt of the same length."""
        return False

    @property
    def follows_trees(self) -> bool:
        """Return True if a step may contain draft trees in models without windows, and slots can be moved later."""
        return False

    def check_tree(self, inputs: AttentionInputs, windows: Windows) -> None:
        """Check that these operators support the step's draft tree, if it has one.

        Raises:
            TypeError: If they do not, or if a layer has a window.
        """
        if inputs.tree is not None and not (self.follows_trees and windows == {None}):
            raise TypeError(f"{self.name} operators have no trees of drafts for windows {set(windows)}")

    def advance_rows(
        self, tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
    ) -> None:
        """Move the rows of a decode step on by a token; see batchinfer_kernels.advance_rows."""
        advance_rows_reference(tokens, step, firsts, repeats, kept)

    def move_slots(self, cache: LayerCache, moves: Tensor) -> None:
        """Move tokens within the cache; moves are (n, 2) int64. See batchinfer_kernels.draft_tree."""
        for k, v in cache.copied:
            move_slots_reference(k, v, moves)

    @abstractmethod
    def plan_attention(
        self, inputs: AttentionInputs, block_size: int, windows: Windows, beside: AttentionPlan | None = None
    ) -> AttentionPlan:
        """Prepare attention for one step of the layers of a cache group; `windows` are the sliding windows that they
        use. `beside`: the plan of another group for the same step, to share with it what does not depend on tables."""

    @abstractmethod
    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, rules: ScoreRules, out: Tensor | None = None
    ) -> Tensor:
        """(T, q_heads, D) → (T, q_heads, D), which is written to `out` if given. See
        batchinfer_kernels.paged_attention."""

    def latent_store(
        self,
        q: Tensor,
        latent: Tensor,
        k: Tensor,
        rope: RopeTable,
        inputs: AttentionInputs,
        cache: LayerCache,
    ) -> Tensor:
        """Rotated q (T, heads, R); latent (T, rank) and rotated k (T, R) go to the cache next to one another. See
        batchinfer_kernels.latent_attention. torch's own serves every device: it takes each row by itself."""
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
        """Return the results (T, heads, V) for q (T, heads, plain + R), written to `out` if given.

        K and V are not decompressed: their projections are applied to queries and results instead ("absorbed").
        """
        plain, turned = q[..., : heads.plain], q[..., heads.plain :]
        absorbed = torch.cat((heads.k(plain), turned), -1)
        return write_result(heads.v(self.absorbed_attention(absorbed, cache, plan, scale, heads.rank)), out)

    @abstractmethod
    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        """(T, heads, rank + R) → (T, heads, rank). See batchinfer_kernels.latent_attention."""

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        """cap × tanh(logits / cap) of (n, vocab) float32, perhaps in place."""
        return (logits / cap).tanh_().mul_(cap)

    def sample(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        """(n, vocab) → (n,) int64. See batchinfer_kernels.sample."""
        return sample_reference(logits, sampling)

    def log_probabilities(self, logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probabilities of the chosen tokens (n,), and of the `most` most likely ones with their ids.
        See batchinfer_kernels.log_probabilities."""
        return log_probabilities_reference(logits, chosen, most)

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """Changes logits (n, vocab). See batchinfer_kernels.penalties."""
        penalise_reference(logits, penalties)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Changes logits (n, vocab). See batchinfer_kernels.mask."""
        mask_reference(logits, rows, bits)

    def masked_argmax(self, logits: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's best allowed token (n,) int64, and whether its bits bar the best token, (n,) bool.

        Ties, and logits that are not finite, are handled as in finite_argmax.

        Args:
            logits: The logits (n, vocab), which may be changed.
            bits: A bit per token, 1 if it is allowed, (n, ceil(vocab / 32)) int32.
        """
        rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        barred = is_excluded(bits, logits.argmax(-1))
        self.mask(logits, rows, bits)
        return finite_argmax(logits), barred

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """(T, 2 × intermediate) → (T, intermediate). See batchinfer_kernels.gated_activation."""

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply the activation to each value of (T, intermediate). torch's own serves every device."""
        return activation_reference(x, activation)
