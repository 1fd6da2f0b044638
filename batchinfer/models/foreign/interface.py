"""The parts of transformers that run a model: its classes for a config.json, and its attention interface.

transformers looks up an attention function by name, and passes it the module that called it. The function passes the
call on to the receiver in the module's attribute, so several models can run in one process. Code from the checkpoint's
folder is never run.
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
# Keys of config.json that are ignored, since the engine decides on attention, outputs and files
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
# Their angles depend on the longest sequence of the batch, so answers would too. `dynamic` is supported: its angles do
# so only after max_position_embeddings, and no row is that long.
UNSTEADY_ROPES = ("longrope",)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Return a context manager that suppresses transformers' warnings, log messages and progress bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class AttentionBackend(Protocol):
    """Computes the attention of a model in place of transformers.

    A forward pass of the model calls `mask` first, and then `attend` for each layer.
    """

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, **more: Any
    ) -> Tensor:
        """Compute the attention of a layer for the tokens of a step.

        Args:
            module: The layer's attention module.
            q: Queries (1, query heads, T, head size), for T tokens.
            k: Keys (1, KV heads, T, head size).
            v: Values (1, KV heads, T, size of a value).
            mask: What `mask` returned. A layer may also pass a mask of its own.
            scale: The factor of scores, or None for the default.
            more: Other keyword arguments that the layer passes to transformers' attention interface.

        Returns:
            (1, T, query heads, size of a value).
        """

    def mask(self, **of: Any) -> Any:
        """Return the mask that layers then pass to `attend`.

        Args:
            of: The keyword arguments of transformers' mask interface, such as `mask_function`.
        """


def attach(model: Any, attending: AttentionBackend) -> None:
    """Redirect the attention and mask calls of all layers of a transformers model to an object.

    Args:
        model: The model. It must use the attention implementation ATTENTION_NAME.
        attending: The object that receives the calls.
    """
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
    attending: AttentionBackend = getattr(module, _ATTRIBUTE)
    return attending.attend(module, query, key, value, attention_mask, scaling, **more), None


def _mask(**of: Any) -> Any:
    attending: AttentionBackend = getattr(of["config"], _ATTRIBUTE)
    return attending.mask(**of)


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def config_of(raw: Mapping[str, Any]) -> Any:
    """Return transformers' configuration object for a config.json.

    Args:
        raw: The contents of config.json.

    Raises:
        CannotRun: Transformers does not know the model type or rejects a value, or the rotary embedding depends on the
            longest row of a batch (LongRoPE).
    """
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
    """Return transformers' class of a language model: the decoder with its output layer.

    Args:
        config: Transformers' configuration object.
        raw: The contents of config.json.

    Raises:
        CannotRun: The model is not a plain decoder, or `architectures` in config.json names another class.
    """
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
    name: str = causal.__name__
    for ending in ("ForCausalLM", "LMHeadModel"):
        name = name.removesuffix(ending)
    return f"{name}Model"


def _decoded(value: Any) -> Any:
    # transformers writes infinities as {"__float__": "Infinity"}
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _unsteady(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key in ("rope_type", "type"):
            if value.get(key) in UNSTEADY_ROPES:
                yield value[key]
        for inner in value.values():
            yield from _unsteady(inner)


class DecoderStub(nn.Module):
    """Replaces the decoder inside a transformers model, so that the model only computes logits from hidden states.

    The hidden states are passed to the model as `inputs_embeds`. The constructor gets the class of the decoder's
    output.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """Return `inputs_embeds`, which are hidden states, in the form of a decoder's output.

        Other arguments are ignored.
        """
        return self._kind(last_hidden_state=inputs_embeds)
