"""What a checkpoint says about its model: config.json and the EOS ids of generation_config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from batchinfer.models.config_fields import Fields, load_json_object, shown, wrong_checkpoint
from batchinfer.models.rope_config import RopeConfig, parse_rope
from batchinfer_kernels.cost import DecoderShape

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
ActivationName = Literal["silu", "gelu", "gelu_tanh"]
DtypeName = Literal["float32", "bfloat16", "float16"]

FAMILIES: tuple[str, ...] = get_args(Family)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
ACTIVATIONS: dict[str, ActivationName] = {
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-like decoder, as far as running it needs. Sizes are counts of values."""

    family: Family
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rms_eps: float
    activation: ActivationName
    tied: bool  # the head is the embedding table, unless the checkpoint brings a different one
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: how many keys a query sees, its own included; None: all
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: DtypeName | None  # as stated in config.json

    def decoder_shape(self, itemsize: int, weight_itemsize: int) -> DecoderShape:
        """The sizes that costs depend on. itemsize: bytes of an activation; weight_itemsize: of a weight."""
        return DecoderShape(
            layers=self.layers,
            hidden=self.hidden,
            intermediate=self.intermediate,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            itemsize=itemsize,
            weight_itemsize=weight_itemsize,
        )


def load_config(folder: Path) -> ModelConfig:
    """Parse config.json and, where there is one, generation_config.json. JobFileError lists all mistakes."""
    generation = folder / "generation_config.json"
    return parse_config(
        load_json_object(folder / "config.json"),
        load_json_object(generation) if generation.is_file() else {},
        folder / "config.json",
    )


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> ModelConfig:
    """The model that these JSON objects describe; `path` is config.json's, for messages. Raises JobFileError."""
    mistakes: list[str] = []
    family = _family(raw, mistakes)
    if raw.get("quantization_config"):
        mistakes.append(
            "config.json: a quantized checkpoint (quantization_config); only float weights are supported"
        )
    if mistakes:  # what follows depends on the family
        raise wrong_checkpoint(path, *mistakes)
    config = _parse(family, raw, generation, mistakes)
    if not mistakes:
        mistakes.extend(_contradictions(config))
    if mistakes:
        raise wrong_checkpoint(path, *mistakes)
    return config


def _family(raw: Mapping[str, Any], mistakes: list[str]) -> Family:
    kind, architectures = raw.get("model_type"), raw.get("architectures")
    if kind not in FAMILIES:
        mistakes.append(f"config.json: model_type {shown(kind)} is not supported; {', '.join(FAMILIES)} are")
    elif architectures and architectures not in [[name] for name in ARCHITECTURES[kind]]:
        mistakes.append(
            f"config.json: architectures {shown(architectures)} is not supported; "
            f"for {kind} [{ARCHITECTURES[kind][0]!r}] is"
        )
    return cast(Family, kind)


def _parse(
    family: Family, raw: Mapping[str, Any], generation: Mapping[str, Any], mistakes: list[str]
) -> ModelConfig:
    fields = Fields(raw, "config.json", mistakes)
    q_heads, layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers", high=10_000)
    max_positions = fields.integer("max_position_embeddings", high=2**31 - 1)
    bias = family in ("llama", "qwen3") and fields.boolean("attention_bias", False)
    return ModelConfig(
        family=family,
        hidden=fields.integer("hidden_size"),
        intermediate=fields.integer("intermediate_size"),
        layers=layers,
        q_heads=q_heads,
        kv_heads=_kv_heads(family, fields, q_heads),
        head_dim=_head_dim(family, fields, q_heads),
        vocab=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields),
        tied=fields.boolean("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        max_positions=max_positions,
        rope=parse_rope(raw, max_positions, mistakes),
        windows=_windows(family, fields, layers),
        eos_token_ids=_eos_token_ids(family, fields, Fields(generation, "generation_config.json", mistakes)),
        bos_token_id=fields.optional_integer("bos_token_id", low=0),
        dtype=_dtype(raw),
    )


def _kv_heads(family: Family, fields: Fields, q_heads: int) -> int:
    """null means all heads; absent means what transformers assumes for the family."""
    absent = {"llama": q_heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
    return fields.integer("num_key_value_heads", q_heads if "num_key_value_heads" in fields.raw else absent)


def _head_dim(family: Family, fields: Fields, q_heads: int) -> int:
    """Stated, or hidden / heads; Qwen3's default is 128 whatever its hidden size."""
    if family == "qwen3" and "head_dim" not in fields.raw:
        return 128
    stated = fields.optional_integer("head_dim", high=2**16)
    if stated is not None:
        return stated
    hidden = fields.raw.get("hidden_size")
    return hidden // q_heads if isinstance(hidden, int) and hidden > 0 else 2


def _activation(fields: Fields) -> ActivationName:
    name = fields.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        fields.mistakes.append(
            f"{fields.name}: hidden_act {shown(name)} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    return ACTIVATIONS.get(name, "silu")


def _windows(family: Family, fields: Fields, layers: int) -> tuple[int | None, ...]:
    if family == "llama":
        return (None,) * layers
    kinds = _layer_types(fields, layers)
    if family == "mistral":
        absent = 4096 if "sliding_window" not in fields.raw else None
        window = fields.optional_integer("sliding_window") or absent
        if window is not None and kinds and "full_attention" in kinds:
            fields.mistakes.append(
                f"{fields.name}: a Mistral with layer_types is not supported; one window is"
            )
        return (window,) * layers
    return _qwen_windows(fields, layers, kinds)


def _qwen_windows(fields: Fields, layers: int, kinds: list[str] | None) -> tuple[int | None, ...]:
    used = fields.boolean("use_sliding_window", False)
    absent = 4096 if "sliding_window" not in fields.raw else None
    window = (fields.optional_integer("sliding_window") or absent) if used else None
    if kinds is None:
        first = fields.integer("max_window_layers", 28, low=0)
        return tuple(window if i >= first else None for i in range(layers))
    if window is None and "sliding_attention" in kinds:
        fields.mistakes.append(
            f"{fields.name}: layer_types names sliding_attention, but use_sliding_window is off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        fields.mistakes.append(
            f"{fields.name}: layer_types is {shown(kinds)}; wanted {layers} times one of {', '.join(known)}"
        )
        return None
    return kinds


def _eos_token_ids(family: Family, fields: Fields, generation: Fields) -> tuple[int, ...]:
    """All of generation_config.json's; else config.json's; else what the family's configuration assumes."""
    found = generation.token_ids("eos_token_id")
    if found is None:
        found = fields.token_ids("eos_token_id")
    if found is None and "eos_token_id" not in fields.raw and family in ("llama", "mistral"):
        found = (2,)
    return tuple(dict.fromkeys(found or ()))


def _dtype(raw: Mapping[str, Any]) -> DtypeName | None:
    stated = raw.get("dtype") or raw.get("torch_dtype")
    name = stated.removeprefix("torch.") if isinstance(stated, str) else None
    return cast(DtypeName, name) if name in get_args(DtypeName) else None


def _contradictions(config: ModelConfig) -> list[str]:
    """What is wrong although every single value is possible."""
    found = []
    if config.head_dim % 2:
        found.append(f"config.json: head_dim is {config.head_dim}; rotary embedding needs an even one")
    if config.q_heads % config.kv_heads:
        found.append(
            f"config.json: num_attention_heads {config.q_heads} is no multiple of "
            f"num_key_value_heads {config.kv_heads}"
        )
    return found
