"""A family of models, and readers for the fields that most config.json files share."""

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
# Reads a rotation from config.json, given the number of values of a head
RotationOf = Callable[[Fields, int], Rotation]
LayerKind = Literal["full_attention", "sliding_attention"]
FULL: LayerKind = "full_attention"
LOCAL: LayerKind = "sliding_attention"


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter that is a part of the outputs of a stored module: the range [start, stop).

    Args:
        module: The module that stores the parameter.
        start: The first output.
        stop: The output after the last one.
        every: If set, the outputs repeat in groups of this size, and the range applies to each group.
        transposed: If True, the weight is stored as (inputs, outputs).
        index: The index of the matrix, if one tensor stores several.
        weight: Suffix of the name of the weight.
        bias: Suffix of the name of the bias.
    """

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
    """A parameter whose rows are the weights of separate modules."""

    modules: tuple[str, ...]


# Names of the products of a gated half, or of an expert, in most checkpoints
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# Parameter (see spec.py) → the module that stores it, within a layer
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
    """Return Llama's modules, one per parameter."""
    return LLAMA_MODULES


@dataclass(frozen=True, slots=True)
class ClassifierNames:
    """The names of the modules of a classification head.

    They have no prefix, except `dense` if `dense_in_base`: then it has the base model's.
    """

    dense: str
    out: str
    norm: str = ""
    dense_in_base: bool = False


@dataclass(frozen=True, slots=True)
class TableNames:
    """The names of the modules before and after the layers in checkpoints of a family.

    Args:
        base: Prefix of all names except the head's; it is missing if only the base model was saved.
        ignored: Suffixes of tensors that are computed instead of read.
        unread: Prefixes, after `base`, of heads on top of an encoder. They are only read as its `classifier`.
    """

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
    """The prefixes of a checkpoint's tensors: of the base model, and of the head."""

    base: str = ""
    head: str = ""


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """A checkpoint's config.json and generation_config.json, with one list of mistakes."""

    config: Fields
    generation: Fields

    @property
    def mistakes(self) -> list[str]:
        """Return the mistakes found in both files so far."""
        return self.config.mistakes


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type`: how its configuration is read, and how its tensors are named.

    Args:
        architectures: The classes that are supported, the causal model first.
        parse: Returns the spec of a configuration.
        modules: Returns the modules that store the parameters of a layer.
        names: The names of the modules before and after the layers.
        mtp_layers_key: The key of config.json with the number of MTP layers, which follow the last layer and are not
            run.
    """

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
    """Return the spec of attention, from fields with Llama's names.

    Args:
        fields: config.json.
        absent_kv_heads: The KV heads if num_key_value_heads is missing. None, or null in the file: the number of query
            heads.
        absent_head_dim: The values of a head if head_dim is missing. None: hidden_size / heads.
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether the output projection has a bias.
        qk_norm: The norm of each head of q and k; its width is set here.
        rotation: Reads the rotation. None: whole heads are rotated.
    """
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
    """Return the rotation of whole heads."""
    return Rotation(parse_rope(fields.raw, max_positions(fields), fields.mistakes), head_dim)


def partial_rotation(absent: float = 1.0) -> RotationOf:
    """Return a reader for rotations of a part of each head: `partial_rotary_factor`, or else `absent`."""

    def parsed(fields: Fields, head_dim: int) -> Rotation:
        rope = parse_rope(fields.raw, max_positions(fields), fields.mistakes, partial=True)
        return Rotation(rope, rotary_part(fields.raw, head_dim, fields.mistakes, absent))

    return parsed


def no_rotation(_: Fields, head_dim: int) -> Rotation:
    """Return no rotation, for positions that are learned or that layers do not use."""
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
    """Return the spec of a gated feed-forward half, from fields with Llama's names."""
    return FeedForwardSpec(fields.integer("intermediate_size"), activation(fields), biased)


def routing(
    fields: Fields, key: str, absent: int, absent_chosen: int, *, normalised: bool, **more: Any
) -> Routing:
    """Return the routing of a mixture of experts.

    Args:
        fields: config.json.
        key: The field with the number of experts.
        absent: The number of experts that transformers assumes if the field is missing.
        absent_chosen: The same for num_experts_per_tok.
        normalised: Whether the weights of the chosen experts are normalised.
        more: Further fields of Routing.
    """
    experts = fields.integer(key, absent, high=2**16)
    chosen = fields.integer("num_experts_per_tok", absent_chosen, high=2**16)
    if chosen > experts:
        fields.mistakes.append(f"{fields.name}: num_experts_per_tok is {chosen}, and {key} {experts}")
    return Routing(experts, min(chosen, experts), normalised=normalised, **more)


def expert_modules(layer: LayerSpec, start: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the modules of all experts, each parameter in a module of its own.

    Args:
        layer: The layer.
        start: Prefix of the modules.
        names: Parts of an expert ("gate", "up", "down") → their modules.
    """
    fed = layer.feed_forward
    if not isinstance(fed, ExpertsSpec):
        return {}
    numbers = range(fed.routing.experts)
    return {f"expert.{e}.{part}": f"{start}.{e}.{name}" for e in numbers for part, name in names.items()}


def activation(fields: Fields, key: str = "hidden_act", absent: str = "silu") -> Activation:
    """Return the activation of the feed-forward half."""
    name = fields.text(key, absent)
    if name not in ACTIVATIONS:
        fields.mistakes.append(
            f"{fields.name}: {key} {shown(name)} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    return ACTIVATIONS.get(name, "silu")


def rms_eps(fields: Fields, absent: float = 1e-6) -> float:
    """Return the epsilon of every RMSNorm."""
    return fields.number("rms_norm_eps", absent)


def max_positions(fields: Fields) -> int:
    """Return the maximum length of a sequence."""
    return fields.integer("max_position_embeddings", high=2**31 - 1)


def layer_count(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.integer("num_hidden_layers", high=10_000)


def hidden_size(fields: Fields) -> int:
    """Return the values of a hidden state."""
    return fields.integer("hidden_size")


def kinds_of_layers(fields: Fields, layers: int, pattern: int) -> list[LayerKind]:
    """Return the kind of each layer: `layer_types`, or else full attention in every n-th layer.

    n is `sliding_window_pattern`, or else `pattern`.
    """
    every = fields.integer("sliding_window_pattern", pattern)
    usual: list[LayerKind] = [LOCAL if (index + 1) % every else FULL for index in range(layers)]
    return layer_kinds(fields, layers) or usual


def sliding_window(fields: Fields, absent: int = 4096) -> int | None:
    """Return `sliding_window`: None if it is null, `absent` if it is missing."""
    return fields.optional_integer("sliding_window") if "sliding_window" in fields.raw else absent


def layer_kinds(fields: Fields, layers: int) -> list[LayerKind] | None:
    """Return `layer_types`; None if it is missing or invalid."""
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
    """Return the spec of a model.

    Args:
        family: Its model_type.
        files: Its configuration.
        layers: Its layers.
        norm: The final norm. None: an RMSNorm.
        absent_eos: The EOS ids that transformers assumes if none are stated.
        absent_tied: The same for tie_word_embeddings.
        special: Further fields of ModelSpec.
    """
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
    """Return the EOS ids of generation_config.json, or else of config.json, or else `absent`."""
    found = files.generation.token_ids("eos_token_id")
    if found is None:
        found = files.config.token_ids("eos_token_id")
    if found is None and "eos_token_id" not in files.config.raw:
        found = absent
    return tuple(dict.fromkeys(found or ()))


def stated_dtype(fields: Fields) -> Dtype | None:
    """Return the dtype of config.json; None if it is missing or not supported."""
    stated = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    name = stated.removeprefix("torch.") if isinstance(stated, str) else None
    return cast(Dtype, name) if name in get_args(Dtype) else None
