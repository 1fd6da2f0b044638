"""The operators that a decoder is made of, and the tensors of a step that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from batchinfer.models.spec.parameters import BIAS
from batchinfer.models.spec.spec import CacheSpec, LayerSpec, NormSpec
from batchinfer_kernels.advance_rows import StepRows, advance_rows_reference
from batchinfer_kernels.arithmetic import WeightCodes, WeightForm
from batchinfer_kernels.copy_parts import copy_parts_reference
from batchinfer_kernels.draft_tree import TreeMask, move_slots_reference
from batchinfer_kernels.experts import Choice, choose_experts, combine_reference
from batchinfer_kernels.fp8_matmul import quantize_rows_fp8
from batchinfer_kernels.gated_activation import Activation, activation_reference
from batchinfer_kernels.int4_linear import quantize_groups
from batchinfer_kernels.latent_attention import latent_store_reference
from batchinfer_kernels.layer_norm import layer_norm_reference
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.low_rank import AdaptedRows
from batchinfer_kernels.mask import bars, mask_reference
from batchinfer_kernels.paged_attention import CODES
from batchinfer_kernels.penalties import Penalties, penalise_reference
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.routing import Routing
from batchinfer_kernels.sample import NO_TOKEN as NO_TOKEN
from batchinfer_kernels.sample import RowSampling, sample_reference
from batchinfer_kernels.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer, (blocks, kv_heads, block_size, head_dim) each; how values lie within a block is the
    business of the operators that allocated it, which may round its two inner sizes up. Where the layer keeps latents,
    (blocks, 1, block_size, dim), both are the same tensor. Quantised values have scales, (blocks, kv_heads,
    block_size) float32."""

    k: Tensor
    v: Tensor
    block_size: int
    group: int = 0  # which of the step's block tables say where its blocks are
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """The scales of quantised K and V; None: they are not quantised."""
        return None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

    @property
    def copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All that a copied token consists of, K and V, as caches of four dimensions."""
        yield self.k, self.v
        if self.scales is not None:
            k_scale, v_scale = self.scales
            yield k_scale[..., None], v_scale[..., None]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Positions and cache slots of a step's tokens: T tokens of S sequences, one chunk a sequence, in order; for the
    layers of one cache group.

    Lengths are plain ints: the host made them, and no operator should have to ask the device for them.
    """

    positions: Tensor  # (T,) int64: position of each token in its sequence
    slots: Tensor  # (T,) int64: where its K and V go, block * block_size + offset
    block_tables: Tensor  # (S, max blocks) int32, padded with 0
    query_lens: list[int]  # (S,) tokens of the sequence in this step
    context_lens: list[int]  # (S,) cached tokens of the sequence, this step's included
    host_tables: StepTables | None = None  # the block tables where the host can read them
    # Where padding rows write to, which are nobody's tokens; None: there are none
    padding_slot: int | None = None
    # False: of blocks that a window has left the tables say nothing, and no operator reads them
    whole: bool = True
    # Of blocks that are copied once K and V are stored; see batchinfer_kernels.copy_parts
    parts: Tensor | None = None
    token_types: Tensor | None = None  # (T,) int64, of an encoder; None: all are 0
    # (T,) int64: the number of each token's adapter, from 1 on; 0: it has none. None: no token has one
    adapters: Tensor | None = None
    adapted: AdaptedRows | None = None  # the same, sorted: the decoder sets it for its layers
    # Which keys tokens see, where some are in trees of drafts; None: all up to their own
    tree: TreeMask | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The factors of an adapter for a product, to which it adds B A x. a: (rank, in), b: (out, rank), scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AddedValues:
    """The values that adapters add to the results of a product: (n, out), for the last n tokens of `rows.order`, in
    that order; nothing for the others."""

    values: Tensor
    rows: AdaptedRows

    def spread(self) -> Tensor:
        """Return them in the order of the tokens, (T, out), 0 for tokens that get nothing."""
        missing = len(self.rows.order) - len(self.values)
        whole = torch.nn.functional.pad(self.values, (0, 0, missing, 0)) if missing else self.values
        return whole[self.rows.places]

    def onto(self, results: Tensor) -> Tensor:
        """Add them to the results (T, out) of a product."""
        return (results.float() + self.spread()).to(results.dtype)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Room for the factors of `places` adapters at a time on a device; the others wait in the host's memory."""

    places: int
    device: torch.device


class Adapters(ABC):
    """The factors of adapters for one product, packed as the operators like best: of all, or those that stand in
    places."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """x: (T, in), what the product reads."""

    @abstractmethod
    def place(self, number: int, place: int) -> None:
        """Put the factors of the adapter with this number, from 1 on, into a place, from 1 on. What was launched before
        still reads what stood there."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin per position, (max positions, pairs) float32, any attention scaling multiplied in. A pair of a head's
    values is (i, i + pairs), or (2i, 2i + 1) where it is `interleaved`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMSNorms that heads pass before they are rotated: weights of q and of k (D,), or None for no norm."""

    q: Tensor | None = None
    k: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0  # is added to the weights


NO_NORMS = HeadNorms()


class Linear(ABC):
    """y = x W^T + b with the weight in whatever layout its implementation likes best."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in_features) → (T, out_features)."""

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """y = x W^T + b + what adapters add. Layers with an activation put it behind."""
        return added.onto(self(x))


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight whose values are quantised: `codes` (out, in), int8 or float8_e4m3fn, and scales (out,) float32, or
    (blocks, groups of inputs) of which `lines` (out,) int32 say which an output has; see
    batchinfer_kernels.block_fp8_matmul. With a `group` codes are int4, in int8, and scales and maybe zeros (out, groups
    of so many inputs) float32; see batchinfer_kernels.int4_linear. Or they are MXFP4, (out, in / 2) uint8, and scales
    exponents, (out, in / 32) uint8; see batchinfer_kernels.mxfp4."""

    codes: Tensor
    scales: Tensor
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None

    @property
    def mxfp4(self) -> bool:
        """Whether the weight is in MXFP4."""
        return self.scales.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        outputs, held = self.codes.shape
        return torch.Size((outputs, 2 * held)) if self.mxfp4 else self.codes.shape


@dataclass(frozen=True, slots=True, eq=False)
class SparseWeight:
    """A weight (out, in) of which each four inputs, next to one another, have two zeros, as the checkpoint says."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        return self.values.shape


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A weight (out, in) in floats that is quantised to a form while it is packed, by operators that can."""

    values: Tensor
    form: WeightForm

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        return self.values.shape


# What a product multiplies with: values of the run's dtype, those of a sparse weight, or quantised ones
Weight: TypeAlias = Tensor | SparseWeight | CodedWeight | RoundedWeight


def values_of(weight: Weight, name: str) -> Tensor:
    """Return a weight that is not quantised, zeros included, for operators of this name that multiply no others. Raises
    TypeError for one that is."""
    if isinstance(weight, SparseWeight):
        return weight.values
    if isinstance(weight, CodedWeight):
        raise TypeError(f"{name} operators have no products of {weight.codes.dtype}")
    if isinstance(weight, RoundedWeight):
        raise TypeError(f"{name} operators do not round weights to {weight.form.codes} while they pack them")
    return weight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One matrix product of each expert: weight (experts, out, in), bias (experts, out). With scales, each expert's,
    the weight holds quantised values, as a CodedWeight's; the lines are those of every expert, and group and zeros are
    int4's. Or it is in MXFP4, and scales are exponents: see batchinfer_kernels.mxfp4. In floats with a `form` it is
    quantised to that while it is packed, as a RoundedWeight."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None
    form: WeightForm | None = None

    @property
    def mxfp4(self) -> bool:
        """Whether the weight is in MXFP4."""
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def int4(self) -> bool:
        """Whether the weight is in int4."""
        return self.group > 0 and not self.mxfp4


class Head(Linear):
    """The layer that makes logits, float32."""

    def argmax(self, x: Tensor) -> Tensor:
        """(T,) int64: the token with the greatest logit, the lowest of equals; NO_TOKEN where that is not finite or a
        logit is no number."""
        return finite_argmax(self(x))


def finite_argmax(logits: Tensor) -> Tensor:
    """(n, vocab) → (n,) int64: the greatest, the lowest of equals; NO_TOKEN where it is not finite or one is NaN."""
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def placed(result: Tensor, out: Tensor | None) -> Tensor:
    """The result where it is wanted."""
    return result if out is None else out.copy_(result)


class HeadsLinear(ABC):
    """A matrix product for each head."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, heads, in) → (T, heads, out)."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The products that take queries to the latent of K, and results from the latent of V, head by head: of `rank`
    values, and of the `plain` ones of a query that are not rotated."""

    k: HeadsLinear
    v: HeadsLinear
    rank: int
    plain: int


class Experts(ABC):
    """The experts of a layer, with their weights in whatever layout the implementation likes best. `loads` (experts,)
    int64 counts, in place, the tokens that each was given so far. Where it `skips`, the number behind the last expert
    is that of none: such rows are not computed and add nothing, and the host need not know which they are.
    """

    loads: Tensor
    skips: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """x: (T, hidden) → (T, hidden); see batchinfer_kernels.experts. `counted` (T,) bool: the tokens that count as
        load, all if not given."""


class AttentionPlan(ABC):
    """Prepared by an implementation once a step, and read in every layer."""

    padded_tokens: int  # query positions computed only as padding


class FixedPlan(AttentionPlan):
    """A plan whose launches are the same for every step with the same `sizes`, so that a graph can replay them."""

    @property
    @abstractmethod
    def sizes(self) -> Hashable:
        """Return the sizes that launches depend on, besides the number of rows and the bound of the contexts."""

    def place(self) -> None:
        """Put on the device what a graph reads, before its launches are captured."""

    @abstractmethod
    def refill(self, other: FixedPlan) -> None:
        """Take over another step's values; its sizes are the same. Plans of one step are refilled together."""

    @property
    def contexts(self) -> Tensor | None:
        """Return where launches read how many keys each sequence has, (rows,) int32; None: they do not."""
        return None

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Whether launches are right for the same sequences one token further and so on up to these contexts, with what
        the plan holds now, `contexts` apart. `context_lens`: of all rows."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer's weights as the operators want them, by the names that its spec gives them."""

    linears: Mapping[str, Linear]
    norms: Mapping[str, Tensor]
    rope: RopeTable | None  # None: it has no attention
    experts: Experts | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    latent_heads: LatentHeads | None = None
    # (query heads, 2 x positions) float32, of the model: what a key adds to its score by its distance
    distances: Tensor | None = None
    adapters: Mapping[str, Adapters] = field(
        default_factory=dict
    )  # of those linears that any adapter changes

    def product(self, name: str, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Compute the linear of that name, with the adapters of the step's tokens."""
        linear, adapters = self.linears[name], self.adapters.get(name)
        if adapters is None or inputs.adapted is None:
            return linear(x)
        return linear.adapted(x, adapters(x, inputs.adapted))


class DecoderLayer(ABC):
    """A layer of a decoder."""

    loads: Tensor | None = None  # where it has experts: `Experts.loads`

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache | None,
        plan: AttentionPlan | None,
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: (T, hidden), to be added, None for nothing, as in the first layer → the next layer's. Writes K
        and V of the step's tokens to `cache`, unless that is an earlier layer's. A layer without attention has neither
        cache nor plan, and the inputs of any group. What is given, and what a layer before it returned, may be
        overwritten."""


class Ops(ABC):
    """One implementation of every operator; `name` goes into the report."""

    name: str

    def linear(self, codes: WeightCodes | None) -> str:
        """Return how linear layers are computed, for the report; `codes`: of most of their weights."""
        return self.name if codes is None else codes

    def rounded(self, weight: Tensor, form: WeightForm) -> tuple[Tensor, Tensor]:
        """weight: (N, K) of floats → codes (N, K), and scales (N,) float32 or (N, groups), as the form's reference
        makes them, bit by bit."""
        if form.codes == "int4":
            return quantize_groups(weight, form.group)
        return quantize_weight(weight) if form.codes == "int8" else quantize_rows_fp8(weight)

    def quantized(self, weight: Tensor, form: WeightForm) -> CodedWeight | RoundedWeight:
        """Quantise a weight (out, in) of floats as `rounded` does, or have that done while it is packed."""
        return CodedWeight(*self.rounded(weight, form), group=form.group)

    def quantized_experts(self, weights: ExpertWeights, form: WeightForm) -> ExpertWeights:
        """Quantise the experts' weights, which are in floats, as `quantized` does each."""
        count, outputs, inputs = weights.weight.shape
        codes, scales = self.rounded(weights.weight.view(-1, inputs), form)
        scales = scales.view(count, outputs, *scales.shape[1:])
        return replace(weights, weight=codes.view(count, outputs, inputs), scales=scales, group=form.group)

    def in_form(self, weight: Tensor, form: WeightForm | None) -> Weight:
        """Return a weight (out, in) in its form; None: as it is."""
        return weight if form is None else self.quantized(weight, form)

    def heads_in_form(self, weight: Tensor, form: WeightForm | None) -> ExpertWeights:
        """Return the weights (heads, out, in) in their form; None: as they are."""
        if form is None:
            return ExpertWeights(weight)
        coded = [self.rounded(matrix, form) for matrix in weight]
        # As bytes: torch does not stack float8_e4m3fn everywhere
        codes = torch.stack([codes.view(torch.uint8) for codes, _ in coded]).view(coded[0][0].dtype)
        return ExpertWeights(codes, scales=torch.stack([scales for _, scales in coded]))

    @abstractmethod
    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Prepare a weight (out, in) once, at load. Raises TypeError for quantised values that these operators do not
        multiply: who chooses operators has asked before."""

    def pack_gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """A gated layer, gate above up: (T, in) → (T, out / 2), act(gate) * up."""
        return GatedLinear(self, self.pack_linear(weight, bias), activation)

    def pack_activated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """A layer with an activation behind it: (T, in) → (T, out)."""
        return ActivatedLinear(self, self.pack_linear(weight, bias), activation)

    @abstractmethod
    def pack_head(self, weight: Weight) -> Head:
        """The layer that makes logits: (T, in) → (T, out) float32, never rounded to the weight's dtype: among logits of
        magnitude 100 bfloat16 tells no two apart that differ by less than a half."""

    @abstractmethod
    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A layer whose results are float32, and whose weight is never quantised: the router of experts."""

    @abstractmethod
    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        """Experts of gated feed-forward halves, gate above up."""

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
        """Prepare what adapters add to a product; None for an adapter that adds nothing to it. `room`: the factors are
        in the host's memory, and nothing stands in any place yet; None: each adapter has a place for ever."""

    def choose_experts(self, logits: Tensor, routing: Routing, correction: Tensor | None = None) -> Choice:
        """logits: (T, experts) float32. See batchinfer_kernels.experts; the host waits for nothing."""
        return choose_experts(logits, routing, correction)

    def fuse(self, spec: LayerSpec, parts: LayerParts) -> DecoderLayer | None:
        """A whole layer, of linear layers that were packed here, as one call; None: these operators do not offer it."""
        return None

    def cache_shape(self, cache: CacheSpec, block_size: int) -> tuple[int, int, int]:
        """Values that one block of K takes, or of V, in one layer: (heads, block_size, dim), maybe rounded up."""
        return cache.heads, block_size, cache.dim

    def holds(self, cache: CacheSpec) -> bool:
        """Whether they read and write such a cache."""
        return cache.dtype is None

    def block_bytes(self, caches: Iterable[CacheSpec], block_size: int, itemsize: int) -> int:
        """Bytes of one block of all these layers, with what is rounded up. `itemsize`: of a value of the run."""
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
        """A zero-filled cache of one layer, which they hold; `dtype`: of the run."""
        shape = (blocks, *self.cache_shape(cache, block_size))
        kept = dtype if cache.dtype is None else CODES[cache.dtype]
        made = [torch.zeros(shape, dtype=kept, device=device) for _ in range(cache.tensors)]
        if cache.dtype is None:
            return LayerCache(made[0], made[-1], block_size)
        scales = [torch.zeros(shape[:3], device=device) for _ in made]
        return LayerCache(made[0], made[-1], block_size, k_scale=scales[0], v_scale=scales[-1])

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids: (T,) int64; table: (vocab, hidden) → (T, hidden)."""

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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTable,
        inputs: AttentionInputs,
        cache: LayerCache,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:
        """Rotated q (T, q_heads, D); k and v (T, kv_heads, D) go to the cache. See batchinfer_kernels.rope_store."""

    @abstractmethod
    def rope(
        self, q: Tensor, rope: RopeTable, inputs: AttentionInputs, norms: HeadNorms = NO_NORMS
    ) -> Tensor:
        """Rotated q (T, q_heads, D) alone, for a layer that reads the K and V of another. The bits are those of
        `rope_store`."""

    def store(self, k: Tensor, v: Tensor, inputs: AttentionInputs, cache: LayerCache) -> None:
        """k and v (T, kv_heads, D), rotated or not, go to the cache as they are: one pair of each head is turned by an
        angle of 0. For models whose own code rotates; a family of ours uses `rope_store`."""
        heads, ones = k.shape[1], torch.ones(1, 1, device=k.device)
        still = RopeTable(ones, torch.zeros_like(ones))
        both = torch.cat((k, v), dim=1)  # in rows of equal stride, as rope_store takes them
        at_zero = replace(inputs, positions=torch.zeros_like(inputs.positions))
        self.rope_store(both[:, :heads], both[:, :heads], both[:, heads:], still, at_zero, cache)

    def copy_parts(self, cache: LayerCache, parts: Tensor) -> None:
        """Copy K and V between blocks; parts are (n, 4) int64. See batchinfer_kernels.copy_parts."""
        for k, v in cache.copied:
            copy_parts_reference(k, v, parts)

    @property
    def parts_take_more(self) -> bool:
        """Whether a part of a long prompt, behind what is cached of it, may take more memory than a whole prompt of as
        many tokens."""
        return False

    @property
    def follows_trees(self) -> bool:
        """Whether a step's tokens may be trees of drafts, where no layer has a window, and be moved behind that."""
        return False

    def check_tree(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> None:
        """Raises TypeError for a step with trees of drafts, where these operators follow none or layers have
        windows."""
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
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: frozenset[int | None],
        beside: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Prepare attention for one step of the layers of a cache group; `windows` are the sliding windows that they
        use. `beside`: the plan of another group for the same step, to share with it what does not depend on tables."""

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """(T, q_heads, D) → (T, q_heads, D), which is written to `out` if given. See
        batchinfer_kernels.paged_attention."""

    def biased_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, bias: Tensor
    ) -> Tensor:
        """(T, q_heads, D) → (T, q_heads, D) with scores that depend on distances, too: bias is (q_heads, 2 x positions)
        float32; see batchinfer_kernels.paged_attention. Raises TypeError where these operators have no such attention:
        who chooses operators has asked before."""
        raise TypeError(f"{self.name} operators have no attention with a bias")

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
        """(T, heads, plain + R) → (T, heads, V), which is written to `out` if given. K and V stay latent: what would
        make them of it is multiplied into the queries and the results instead, which is called absorbed."""
        plain, turned = q[..., : heads.plain], q[..., heads.plain :]
        absorbed = torch.cat((heads.k(plain), turned), -1)
        return placed(heads.v(self.absorbed_attention(absorbed, cache, plan, scale, heads.rank)), out)

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
        """(n,) int64: the greatest of each row's logits whose bit is 1, the lowest of equals; NO_TOKEN where it is not
        finite or one of them is no number. (n,) bool: whether its bits bar the token with the greatest logit of all.

        logits: (n, vocab), perhaps changed; bits: (n, ceil(vocab / 32)) int32.
        """
        rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        barred = bars(bits, logits.argmax(-1))
        self.mask(logits, rows, bits)
        return finite_argmax(logits), barred

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """(T, 2 × intermediate) → (T, intermediate). See batchinfer_kernels.gated_activation."""

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Apply the activation to each value of (T, intermediate). torch's own serves every device."""
        return activation_reference(x, activation)


class GatedLinear(Linear):
    """act(gate) * up as two operators."""

    def __init__(self, ops: Ops, inner: Linear, activation: Activation) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features // 2
        self._ops, self._inner, self._activation = ops, inner, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gated_activation(self._inner(x), self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        return self._ops.gated_activation(self._inner.adapted(x, added), self._activation)


class ActivatedLinear(Linear):
    """act(x W^T + b) as two operators."""

    def __init__(self, ops: Ops, inner: Linear, activation: Activation) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._ops, self._inner, self._activation = ops, inner, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.activation(self._inner(x), self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        return self._ops.activation(self._inner.adapted(x, added), self._activation)
