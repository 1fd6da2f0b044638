"""The parts of transformers that run a model: its classes for a config.json, and its attention interface.

transformers looks attention up by a name, and hands the function the module that called it. What the function writes
to and reads is the module's own: `attach` gives every module of a model the same object, so that two models in one
process do not meet. Nothing of the checkpoint's folder is run or looked up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from batchinfer.models.files.config_fields import shown
from batchinfer.models.foreign.spec import CannotRun

ATTENTION_NAME = "batchinfer_paged"
_ATTRIBUTE = "batchinfer_attention"
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


@contextmanager
def quiet() -> Iterator[None]:
    """transformers warns of much that is no business of a job's."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Attending(Protocol):
    """The receiver of a model's calls of attention."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, **more: Any
    ) -> Tensor:
        """(1, heads, T, D) each → (1, T, q_heads, v_dim)"""

    def mask(self, **of: Any) -> Any:
        """Return the mask that the layers get."""


def attach(model: Any, attending: Attending) -> None:
    """Send the attention of all layers of `model`, and its masks, to `attending`."""
    for module in model.modules():
        setattr(module, _ATTRIBUTE, attending)
    setattr(model.config, _ATTRIBUTE, attending)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: object = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    attending: Attending = getattr(module, _ATTRIBUTE)
    return attending.attend(module, query, key, value, attention_mask, scaling, **more), None


def _mask(**of: Any) -> Any:
    attending: Attending = getattr(of["config"], _ATTRIBUTE)
    return attending.mask(**of)


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)


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
        raise CannotRun("it has several parts, not only a decoder")
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


class Given(nn.Module):
    """Stands in for a decoder whose hidden states are known: the model around it then computes their logits alone.

    They are handed in as `inputs_embeds`. `kind`: the class of what the decoder returns.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """The hidden states, as the decoder would return them."""
        return self._kind(last_hidden_state=inputs_embeds)
