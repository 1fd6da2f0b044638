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
    """The location of a parameter that is only a part of a checkpoint's module: a range of its outputs.

    Args:
        module: The name of the module.
        start: The first output of the range.
        stop: The end of the range (exclusive).
        every: If set, the module's outputs consist of groups of this size, and the range is taken from each group.
        transposed: If True, the module's weight is stored as (inputs, outputs).
        index: The index of the matrix, if the module's tensor stores several, such as one per expert.
        weight: Suffix of the name of the module's weight.
        bias: Suffix of the name of the module's bias.
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
    """The location of a parameter whose rows are the weights of separate modules of a checkpoint.

    Args:
        modules: The name of the module of each row, in order.
    """

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
    """Return, by parameter name, the modules that store a layer's parameters in Llama's checkpoints."""
    return LLAMA_MODULES


@dataclass(frozen=True, slots=True)
class ClassifierNames:
    """The names of the modules of an encoder's classification head in checkpoints of a family.

    Args:
        dense: The first linear layer.
        out: The last linear layer, which computes logits.
        norm: The norm between the two linear layers. Empty if there is none.
        dense_in_base: If True, the name of `dense` has the prefix of the base model. No other name has it.
    """

    dense: str
    out: str
    norm: str = ""
    dense_in_base: bool = False


@dataclass(frozen=True, slots=True)
class TableNames:
    """The names of the modules outside of layers, such as the embedding, in checkpoints of a family.

    Args:
        base: Prefix of all names except that of `head`. Names in checkpoints of only the base model lack it.
        embedding: The token embedding.
        positions: The embedding of learned positions.
        layers: The module list of all layers.
        final_norm: The norm after the last layer.
        head: The output layer (lm_head).
        ignored: Suffixes of the names of tensors that are not read, as they can be computed.
        unread: Prefixes of the names (after `base`) of heads on top of an encoder, which are not read. Modules of
            `classifier` are read nevertheless.
        embedding_norm: The norm of the sum of an encoder's embeddings.
        token_types: The embedding of an encoder's token types.
        distances: The learned bias of attention scores by distance (MPNet).
        classifier: The classification head of an encoder. None: the family has none.
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
    """The prefixes of the names of a checkpoint's tensors.

    Args:
        base: Prefix of the tensors of the base model: embedding, layers and final norm.
        head: Prefix of the tensors of the output layer, or of a classification head.
    """

    base: str = ""
    head: str = ""


@dataclass(frozen=True, slots=True)
class ConfigFiles:
    """A checkpoint's configuration files. A message about each invalid value that is read is appended to `mistakes`.

    Args:
        config: The fields of config.json.
        generation: The fields of generation_config.json; none if there is no such file.
    """

    config: Fields
    generation: Fields

    @property
    def mistakes(self) -> list[str]:
        """Return the common list of messages about invalid values in both files. Callers may append to it."""
        return self.config.mistakes


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models with the same `model_type`: how config.json is read, and how tensors are named.

    Args:
        model_type: The `model_type` in config.json.
        architectures: The supported classes of transformers. The first one is the language model.
        parse: Returns the spec of a model. Appends messages about invalid values to `mistakes` of its argument.
        modules: Returns the module that stores each parameter of a layer in checkpoints, by parameter name.
        names: The names of the modules outside of layers.
        mtp_layers_key: The key of config.json with the number of MTP layers, which follow the last layer and are not
            run. Empty if the family has none.
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
    """Return the spec of grouped-query attention from config.json, whose keys have the same names as Llama's.

    Args:
        fields: The fields of config.json.
        absent_kv_heads: The number of KV heads if num_key_value_heads is missing. None: the number of query heads.
        absent_head_dim: The head size if head_dim is missing. None: hidden_size / query heads.
        qkv_bias: True if q, k and v have biases.
        o_bias: True if the output projection has a bias.
        qk_norm: The norm of each head of q and k, of any width. None: there is no norm.
        rotation: Reads the rotary embedding from config.json. None: whole heads are rotated.
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
    """Return the rotary embedding in config.json, for models that rotate all values of a head.

    Args:
        fields: The fields of config.json.
        head_dim: The number of values of a head.
    """
    return Rotation(parse_rope(fields.raw, max_positions(fields), fields.mistakes), head_dim)


def partial_rotation(absent: float = 1.0) -> RotationOf:
    """Return a function that reads a rotary embedding for only a part of each head from config.json.

    Args:
        absent: The rotated share of a head if config.json has no `partial_rotary_factor`.
    """

    def parsed(fields: Fields, head_dim: int) -> Rotation:
        rope = parse_rope(fields.raw, max_positions(fields), fields.mistakes, partial=True)
        return Rotation(rope, rotary_part(fields.raw, head_dim, fields.mistakes, absent))

    return parsed


def no_rotation(_: Fields, head_dim: int) -> Rotation:
    """Return a rotation by an angle of 0, for models with learned positions and for layers without positions."""
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
    """Return the spec of a gated feed-forward half from config.json, whose keys have the same names as Llama's.

    Args:
        fields: The fields of config.json.
        biased: True if all its products have biases.
    """
    return FeedForwardSpec(fields.integer("intermediate_size"), activation(fields), biased)


def routing(
    fields: Fields, key: str, absent: int, absent_chosen: int, *, normalised: bool, **more: Any
) -> Routing:
    """Return the rule by which a router chooses experts for a token, from config.json.

    Args:
        fields: The fields of config.json.
        key: The key with the number of experts.
        absent: The default number of experts.
        absent_chosen: The default of num_experts_per_tok.
        normalised: True if the weights of a token's chosen experts are divided by their sum.
        more: Further fields of Routing.
    """
    experts = fields.integer(key, absent, high=2**16)
    chosen = fields.integer("num_experts_per_tok", absent_chosen, high=2**16)
    if chosen > experts:
        fields.mistakes.append(f"{fields.name}: num_experts_per_tok is {chosen}, and {key} {experts}")
    return Routing(experts, min(chosen, experts), normalised=normalised, **more)


def expert_modules(layer: LayerSpec, start: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the module that stores each weight of each expert of a layer, by weights such as "expert.3.gate".

    Returns {} if the layer has no experts.

    Args:
        layer: The layer.
        start: The name of the module that contains all experts.
        names: The names of the modules in an expert for "gate", "up" and "down".
    """
    fed = layer.feed_forward
    if not isinstance(fed, ExpertsSpec):
        return {}
    numbers = range(fed.routing.experts)
    return {f"expert.{e}.{part}": f"{start}.{e}.{name}" for e in numbers for part, name in names.items()}


def activation(fields: Fields, key: str = "hidden_act", absent: str = "silu") -> Activation:
    """Return the activation that a key of config.json names.

    Args:
        fields: The fields of config.json.
        key: The key.
        absent: Its default value.
    """
    name = fields.text(key, absent)
    if name not in ACTIVATIONS:
        fields.mistakes.append(
            f"{fields.name}: {key} {shown(name)} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    return ACTIVATIONS.get(name, "silu")


def rms_eps(fields: Fields, absent: float = 1e-6) -> float:
    """Return `rms_norm_eps` of config.json, the epsilon of all RMSNorms.

    Args:
        fields: The fields of config.json.
        absent: The default.
    """
    return fields.number("rms_norm_eps", absent)


def max_positions(fields: Fields) -> int:
    """Return `max_position_embeddings` of config.json, the maximum length of a sequence in tokens."""
    return fields.integer("max_position_embeddings", high=2**31 - 1)


def layer_count(fields: Fields) -> int:
    """Return `num_hidden_layers` of config.json."""
    return fields.integer("num_hidden_layers", high=10_000)


def hidden_size(fields: Fields) -> int:
    """Return `hidden_size` of config.json."""
    return fields.integer("hidden_size")


def kinds_of_layers(fields: Fields, layers: int, pattern: int) -> list[LayerKind]:
    """Return for each layer whether it has full or sliding-window attention, from `layer_types` of config.json.

    If `layer_types` is missing, every n-th layer has full attention, with n = `sliding_window_pattern`.

    Args:
        fields: The fields of config.json.
        layers: The number of layers.
        pattern: The value of n if config.json has no `sliding_window_pattern`.
    """
    every = fields.integer("sliding_window_pattern", pattern)
    usual: list[LayerKind] = [LOCAL if (index + 1) % every else FULL for index in range(layers)]
    return layer_kinds(fields, layers) or usual


def sliding_window(fields: Fields, absent: int = 4096) -> int | None:
    """Return `sliding_window` of config.json, in tokens: None if it is null, `absent` if it is missing."""
    return fields.optional_integer("sliding_window") if "sliding_window" in fields.raw else absent


def layer_kinds(fields: Fields, layers: int) -> list[LayerKind] | None:
    """Return `layer_types` of config.json; None if it is missing or invalid.

    Args:
        fields: The fields of config.json.
        layers: The number of layers. A list with another length is invalid.
    """
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
    """Return the spec of a model from its layers and from config.json, whose keys have the same names as Llama's.

    Args:
        family: The model_type.
        files: The configuration.
        layers: The layers.
        norm: The final norm. None: an RMSNorm with `rms_norm_eps`.
        absent_eos: The default EOS ids.
        absent_tied: The default of tie_word_embeddings.
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
    """Return the distinct EOS ids of generation_config.json, or else of config.json.

    Args:
        files: The configuration files.
        absent: The default if neither file has the key.
    """
    found = files.generation.token_ids("eos_token_id")
    if found is None:
        found = files.config.token_ids("eos_token_id")
    if found is None and "eos_token_id" not in files.config.raw:
        found = absent
    return tuple(dict.fromkeys(found or ()))


def stated_dtype(fields: Fields) -> Dtype | None:
    """Return `dtype` (or `torch_dtype`) of config.json; None if it is missing or not supported."""
    stated = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    name = stated.removeprefix("torch.") if isinstance(stated, str) else None
    return cast(Dtype, name) if name in get_args(Dtype) else None
