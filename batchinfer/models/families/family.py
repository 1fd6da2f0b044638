"""A family of models, and the fields that most of their config.json files have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.spec.rope_config import parse_rope, rotary_part
from batchinfer.models.spec.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)
from batchinfer_kernels.arithmetic import Activation, Dtype
from batchinfer_kernels.routing import Routing

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# (config.json, values of a head) → how heads are rotated
RotationOf = Callable[[Fields, int], Rotation]
LayerKind = Literal["full_attention", "sliding_attention"]
FULL: LayerKind = "full_attention"
LOCAL: LayerKind = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter that is some outputs, [start, stop), of a module's weight and bias; with `every`, those of each
    stretch of that many outputs. `transposed`: the weight is stored as (inputs, outputs). `index`: which of several
    matrices in one tensor it is. `weight` and `bias` end the names of the tensors."""

    module: str
    start: int
    stop: int
    every: int | None = None
    transposed: bool = False
    index: int | None = None
    weight: str = ".weight"
    bias: str = ".bias"


@dataclass(frozen=True, slots=True)
class Rows:
    """A parameter each of whose rows is the weight of a module of its own."""

    modules: tuple[str, ...]


# What most checkpoints call the products of a gated half, of an expert, too
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# Parameters (see spec.py) and the modules that hold them, within a layer
Modules = Mapping[str, str | Part | Rows]
LLAMA_MODULES: Modules = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    **{part: f"mlp.{name}" for part, name in PROJECTIONS.items()},
}


def llama_modules(_: LayerSpec) -> Modules:
    """Every parameter in a module of its own, named as Llama names it."""
    return LLAMA_MODULES


@dataclass(frozen=True, slots=True)
class ClassifierNames:
    """The names of the modules of a classification head. No base stands before them, but before `dense` where that is
    `dense_in_base`."""

    dense: str
    out: str
    norm: str = ""
    dense_in_base: bool = False


@dataclass(frozen=True, slots=True)
class TableNames:
    """The names that a family's checkpoints have for the modules around the layers. `base` stands before all names but
    the head's, unless only the base model was saved. Tensors whose names end with one of `ignored` are computed, not
    read; those that begin with one of `unread`, behind the base, belong to what is put on top of an encoder, and are
    read where that is its `classifier`."""

    base: str = "model."
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    layers: str = "layers"
    final_norm: str = "norm"
    head: str = "lm_head"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    unread: tuple[str, ...] = ()
    embedding_norm: str = "embeddings.LayerNorm"
    token_types: str = "embeddings.token_type_embeddings"
    distances: str = "encoder.relative_attention_bias"
    classifier: ClassifierNames | None = None


@dataclass(frozen=True, slots=True)
class NamePrefixes:
    """The prefixes of the names of a checkpoint's tensors: of the base model's, and of the head's."""

    base: str = ""
    head: str = ""


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """A checkpoint's config.json and generation_config.json; what is wrong in them goes to one list."""

    config: Fields
    generation: Fields

    @property
    def mistakes(self) -> list[str]:
        return self.config.mistakes


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type`: its `architectures`, the causal model's first, how its configuration is read, and the names of
    its tensors: `modules` maps the parameters of a layer to the modules that hold them, `names` are those around.
    `mtp_layers_key`: what config.json calls the number of layers behind the last one, which are not run: they guess
    further tokens."""

    model_type: str
    architectures: tuple[str, ...]
    parse: Callable[[ConfigFiles], ModelSpec]
    modules: Callable[[LayerSpec], Modules] = llama_modules
    names: TableNames = TableNames()
    mtp_layers_key: str = ""


def attention(
    fields: Fields,
    *,
    absent_kv_heads: int | None = None,
    absent_head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: NormSpec | None = None,
    rotation: RotationOf | None = None,
) -> AttentionSpec:
    """Make the spec of attention from sizes named as Llama's. Null KV heads mean all heads, absent ones
    `absent_kv_heads` (None: all, too); a head is as wide as stated, or as `absent_head_dim`, or hidden / heads.
    `qk_norm` is each head's, its width the head's; `rotation` is of whole heads if not given."""
    q_heads = fields.integer("num_attention_heads")
    stated = "num_key_value_heads" in fields.raw or absent_kv_heads is None
    kv_heads = fields.integer("num_key_value_heads", q_heads if stated else absent_kv_heads)
    head_dim = _head_dim(fields, q_heads, absent_head_dim)
    norm = replace(qk_norm, width=head_dim) if qk_norm else None
    return AttentionSpec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotation=(rotation or full_rotation)(fields, head_dim),
        q_norm=norm,
        k_norm=norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
    )


def full_rotation(fields: Fields, head_dim: int) -> Rotation:
    """The rotation of all of a head."""
    return Rotation(parse_rope(fields.raw, max_positions(fields), fields.mistakes), head_dim)


def partial_rotation(absent: float = 1.0) -> RotationOf:
    """The rotation of the part of a head that `partial_rotary_factor` states, or of `absent` of it."""

    def parsed(fields: Fields, head_dim: int) -> Rotation:
        rope = parse_rope(fields.raw, max_positions(fields), fields.mistakes, partial=True)
        return Rotation(rope, rotary_part(fields.raw, head_dim, fields.mistakes, absent))

    return parsed


def no_rotation(_: Fields, head_dim: int) -> Rotation:
    """Positions are learned, or not known to the layer."""
    return Rotation(None, head_dim)


def _head_dim(fields: Fields, q_heads: int, absent: int | None) -> int:
    if absent is not None and "head_dim" not in fields.raw:
        return absent
    stated = fields.optional_integer("head_dim", high=2**16)
    if stated is not None:
        return stated
    hidden = fields.raw.get("hidden_size")
    return max(1, hidden // q_heads) if isinstance(hidden, int) else 1


def gated_feed_forward(fields: Fields, biased: bool = False) -> FeedForwardSpec:
    """Read a gated feed-forward half with the names that Llama has."""
    return FeedForwardSpec(fields.integer("intermediate_size"), activation(fields), biased)


def routing(
    fields: Fields, key: str, absent: int, absent_chosen: int, *, normalised: bool, **more: Any
) -> Routing:
    """Make the routing of `key` experts, of which a token uses `num_experts_per_tok`; `absent…`: what transformers
    assumes."""
    experts = fields.integer(key, absent, high=2**16)
    chosen = fields.integer("num_experts_per_tok", absent_chosen, high=2**16)
    if chosen > experts:
        fields.mistakes.append(f"{fields.name}: num_experts_per_tok is {chosen}, and {key} {experts}")
    return Routing(experts, min(chosen, experts), normalised=normalised, **more)


def expert_modules(layer: LayerSpec, start: str, names: Mapping[str, str]) -> dict[str, str]:
    """Every expert's parameters in modules of their own, as `names` calls them."""
    fed = layer.feed_forward
    if not isinstance(fed, ExpertsSpec):
        return {}
    numbers = range(fed.routing.experts)
    return {f"expert.{e}.{part}": f"{start}.{e}.{name}" for e in numbers for part, name in names.items()}


def activation(fields: Fields, key: str = "hidden_act", absent: str = "silu") -> Activation:
    """Read the activation of the feed-forward half."""
    name = fields.text(key, absent)
    if name not in ACTIVATIONS:
        fields.mistakes.append(
            f"{fields.name}: {key} {shown(name)} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    return ACTIVATIONS.get(name, "silu")


def rms_eps(fields: Fields, absent: float = 1e-6) -> float:
    """Read the epsilon of every RMSNorm."""
    return fields.number("rms_norm_eps", absent)


def max_positions(fields: Fields) -> int:
    """The longest context that the model was made for."""
    return fields.integer("max_position_embeddings", high=2**31 - 1)


def layer_count(fields: Fields) -> int:
    """How many layers there are."""
    return fields.integer("num_hidden_layers", high=10_000)


def hidden_size(fields: Fields) -> int:
    """Values of a token between two layers."""
    return fields.integer("hidden_size")


def kinds_of_layers(fields: Fields, layers: int, pattern: int) -> list[LayerKind]:
    """As `layer_types` says; else every `pattern`-th layer sees everything, a number that `sliding_window_pattern` may
    state."""
    every = fields.integer("sliding_window_pattern", pattern)
    usual: list[LayerKind] = [LOCAL if (index + 1) % every else FULL for index in range(layers)]
    return layer_kinds(fields, layers) or usual


def sliding_window(fields: Fields, absent: int = 4096) -> int | None:
    """`sliding_window`, null: none."""
    return fields.optional_integer("sliding_window") if "sliding_window" in fields.raw else absent


def layer_kinds(fields: Fields, layers: int) -> list[LayerKind] | None:
    """`layer_types`, checked; None where there are none, or wrong ones."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return None
    known = get_args(LayerKind)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        fields.mistakes.append(
            f"{fields.name}: layer_types is {shown(kinds)}; wanted {layers} times one of {', '.join(known)}"
        )
        return None
    return kinds


def model(
    family: str,
    files: ConfigFiles,
    layers: tuple[LayerSpec, ...],
    *,
    norm: NormSpec | None = None,
    absent_eos: tuple[int, ...] = (),
    absent_tied: bool = False,
    **special: Any,
) -> ModelSpec:
    """Make the spec of a model around its layers. `norm` is the last one, an RMSNorm if not given; `absent_…`: what
    transformers assumes where nothing is stated; `special`: fields of the spec that most families leave at their
    defaults."""
    fields = files.config
    hidden = hidden_size(fields)
    return ModelSpec(
        family=family,
        hidden=hidden,
        vocab=fields.integer("vocab_size"),
        layers=layers,
        final_norm=norm or NormSpec(hidden, rms_eps(fields)),
        tied=fields.boolean("tie_word_embeddings", absent_tied),
        max_positions=max_positions(fields),
        eos_token_ids=eos_token_ids(files, absent_eos),
        bos_token_id=fields.optional_integer("bos_token_id", low=0),
        dtype=stated_dtype(fields),
        **special,
    )


def eos_token_ids(files: ConfigFiles, absent: tuple[int, ...]) -> tuple[int, ...]:
    """All of generation_config.json's; else config.json's; else what the family's configuration assumes."""
    found = files.generation.token_ids("eos_token_id")
    if found is None:
        found = files.config.token_ids("eos_token_id")
    if found is None and "eos_token_id" not in files.config.raw:
        found = absent
    return tuple(dict.fromkeys(found or ()))


def stated_dtype(fields: Fields) -> Dtype | None:
    """As config.json states it; None where it does not, or where it is one that nothing runs in."""
    stated = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    name = stated.removeprefix("torch.") if isinstance(stated, str) else None
    return cast(Dtype, name) if name in get_args(Dtype) else None
