"""The classes of transformers that stand for a config.json. Nothing of the checkpoint's folder is run or looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from batchinfer.models.files.config_fields import shown
from batchinfer.models.foreign.refusal import CannotRun

# How a run goes is ours to say: which attention, what is returned, which files are read
OURS = (
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pruned_heads",
    "return_dict",
    "torchscript",
    "transformers_weights",
    "use_cache",
)
# Angles that depend on the longest sequence of the batch: then an answer would, too. Those of `dynamic` do so beyond
# max_position_embeddings only, where no row goes.
UNSTEADY_ROPES = ("longrope",)


def config_of(raw: Mapping[str, Any]) -> Any:
    """Make transformers' configuration. Raises CannotRun for a model type without one, and for wrong values."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CannotRun("transformers knows no model of this type")
    if rope := next(iter(_unsteady(raw)), None):
        raise CannotRun("the angles of its rotary embedding depend on the longest row of a batch", rope)
    kept = [key for key in raw if key not in OURS and not key.startswith("_")]
    try:
        config = CONFIG_MAPPING[kind].from_dict({key: _decoded(raw[key]) for key in kept})
    except Exception as error:
        raise CannotRun("transformers does not accept config.json", shown(str(error))) from error
    config.output_router_logits = False
    return config


def class_of(config: Any, raw: Mapping[str, Any]) -> Any:
    """transformers' class of the decoder with its head. Raises CannotRun where the checkpoint holds something else."""
    if config.is_encoder_decoder:
        raise CannotRun("it is an encoder and a decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CannotRun("transformers has no decoder of this type")
    if config.get_text_config(decoder=True) is not config:
        raise CannotRun("it is a model of several parts, of which a decoder is one")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    stated = raw.get("architectures")
    if stated and stated not in ([found.__name__], [_base_name(found)]):
        raise CannotRun(
            "architectures names another class", f"{shown(stated)}; [{found.__name__!r}] would run"
        )
    return found


def _base_name(causal: Any) -> str:
    """Return the name of the class without a head: GPT2LMHeadModel → GPT2Model."""
    name: str = causal.__name__
    for ending in ("ForCausalLM", "LMHeadModel"):
        name = name.removesuffix(ending)
    return f"{name}Model"


def _decoded(value: Any) -> Any:
    """transformers writes an infinity, which JSON does not have, as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _unsteady(value: object) -> Iterator[str]:
    """The types of rotary embedding, anywhere in a configuration, that this engine cannot batch."""
    if isinstance(value, Mapping):
        for key in ("rope_type", "type"):
            if value.get(key) in UNSTEADY_ROPES:
                yield value[key]
        for inner in value.values():
            yield from _unsteady(inner)
