"""The folder of an EAGLE-3 head (Li et al., 2025, arXiv:2503.01840), checked against its model.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.hub import PICKLE_SUFFIXES, WEIGHT_INDEX, WEIGHTS
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.families.family import attention, gated_feed_forward, hidden_size, rms_eps
from batchinfer.models.families.llama import llama_layer
from batchinfer.models.files.config_fields import Fields, load_json_object, shown
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.weight_files import NAMED, StoredTensor, listed, read_weight_files
from batchinfer.models.heads.stored_heads import CONFIG, StoredLayer, heads_error, tensor_mistakes
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import Shape
from batchinfer.models.spec.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec
from batchinfer_kernels.cost import ModelCost, OperatorCost, linear_cost

READ_STATES = 3  # hidden states per token that a head reads: of a low, a middle and a high layer
_LAYERS = (
    "midlayer.",
    "layers.0.",
)  # prefixes of the tensors of the layer, as written by SafeAILab and by vLLM
EMBEDDING, HEAD, OFFSETS, USED_TOKENS = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_STATED = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"  # key of the sizes of the layer in files of vLLM's speculators


@dataclass(frozen=True, slots=True)
class StoredEagle(StoredLayer):
    """The folder of an EAGLE-3 draft head, checked to fit its target model but not loaded.

    Args:
        weights: The files of the head's weights.
        layer: The head as the spec of a model with one layer. Its vocabulary has the tokens that the head can propose.
        states: The numbers of the target model's layers whose inputs the head reads, ascending.
        model_hidden: The hidden size of the target model.
        model_vocab: The vocabulary size of the target model.
        start: Prefix of the names of the layer's tensors.
        offsets: If True, the tensor d2t maps the tokens of the head to tokens of the target model.
        embedding: If True, the head has its own embedding, otherwise it uses the target model's.
        head: If True, the head has its own output layer, otherwise it uses the target model's.
        norms_residual: If True, the layer's residual connection adds the normed state, otherwise the state itself.
    """

    weights: tuple[Path, ...]
    layer: ModelSpec
    states: tuple[int, ...]
    model_hidden: int
    model_vocab: int
    start: str
    offsets: bool
    embedding: bool
    head: bool
    norms_residual: bool = False

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files of the head's weights."""
        return self.weights

    @property
    def spec(self) -> ModelSpec:
        """Return the draft head as the spec of a model with one layer.

        Its vocabulary has the tokens that the head can propose.
        """
        return self.layer

    @property
    def tapped(self) -> tuple[int, ...]:
        """Return the numbers of the target model's layers whose inputs the head reads, ascending."""
        return self.states

    @property
    def attention(self) -> AttentionSpec:
        """Return the attention of the head's layer."""
        found = self.layer.attention
        assert isinstance(found, AttentionSpec), "an EAGLE-3 head has no latents"
        return found

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the loaded weights, with `itemsize` bytes per value."""
        return itemsize * sum(map(math.prod, self.shapes().values()))

    def cost(self, itemsize: int) -> ModelCost:
        """Return the FLOPs and memory traffic of the draft head's operators, per step, token and sampled row.

        Args:
            itemsize: Bytes of a value.
        """
        # The inputs of q, k and v are twice as wide as in other layers, as they include an embedding
        found, hidden = model_cost(self.layer, itemsize), self.layer.hidden
        outputs = self.attention.q_width + 2 * self.attention.kv_width
        read = linear_cost(0, hidden, outputs, itemsize, itemsize)
        each = linear_cost(1, hidden, outputs, itemsize, itemsize) - read
        return replace(found, operators=(*found.operators, OperatorCost("qkv_of_embedding", read, each)))

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each tensor of the head by name, except the token maps d2t and t2d."""
        hidden, attended, fed = self.layer.hidden, self.attention, self.layer.layers[0].feed_forward
        assert isinstance(fed, FeedForwardSpec), "an EAGLE-3 head has no experts"
        heads = {"q": attended.q_width, "k": attended.kv_width, "v": attended.kv_width}
        found: dict[str, Shape] = {
            **{f"self_attn.{part}_proj.weight": (outputs, 2 * hidden) for part, outputs in heads.items()},
            "self_attn.o_proj.weight": (hidden, attended.q_width),
            "mlp.gate_proj.weight": (fed.inner, hidden),
            "mlp.up_proj.weight": (fed.inner, hidden),
            "mlp.down_proj.weight": (hidden, fed.inner),
            **{f"{name}.weight": (hidden,) for name in NORMS.values()},
        }
        if attended.qkv_bias:
            found |= {f"self_attn.{part}_proj.bias": (outputs,) for part, outputs in heads.items()}
        found = {self.start + name: shape for name, shape in found.items()}
        found |= {"fc.weight": (hidden, READ_STATES * self.model_hidden), "norm.weight": (hidden,)}
        found |= {HEAD: (self.layer.vocab, hidden)} if self.head else {}
        return found | ({EMBEDDING: (self.model_vocab, hidden)} if self.embedding else {})


# Norms of the layer: parameter → module
NORMS = {
    "input_norm": "input_layernorm",
    "state_norm": "hidden_norm",
    "post_norm": "post_attention_layernorm",
}


def inspect_eagle(folder: CheckpointFolder, checkpoint: Checkpoint) -> StoredEagle:
    """Check that the folder of an EAGLE-3 head is complete and fits a target model, without loading the weights.

    The folder may have the format of SafeAILab, SpecForge, AngelSlim or vLLM's speculators.

    Args:
        folder: The folder.
        checkpoint: The target model.

    Raises:
        JobFileError: Something is missing, or does not fit the model.
        SecurityRefusal: A path leaves the folder, or a file is malformed.
    """
    path, config = folder.path, folder.file(CONFIG)
    assert config is not None, "inspect_heads has read the configuration"
    pickles = folder.names(*PICKLE_SUFFIXES)
    if pickles and folder.file(WEIGHTS) is None and folder.file(WEIGHT_INDEX) is None:
        raise heads_error(
            path, f"{listed(pickles)} is a pickle, which is not read: save its tensors as {WEIGHTS}"
        )
    files, mistakes = read_weight_files(folder), list[str]()
    stored = _parse(load_json_object(config), files.tensors, files.files, checkpoint.spec, mistakes)
    if not mistakes:
        mistakes += _mistakes(stored, files.tensors)
    if mistakes:
        raise heads_error(path, *mistakes[:NAMED])
    return stored


def _parse(
    raw: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    files: tuple[Path, ...],
    model: ModelSpec,
    mistakes: list[str],
) -> StoredEagle:
    nested = raw.get(_NESTED, {})
    fields = Fields({**nested, **raw} if isinstance(nested, dict) else raw, CONFIG, mistakes)
    hidden, vocab = hidden_size(fields), fields.integer("vocab_size", model.vocab)
    layers = fields.integer("num_hidden_layers", 1)
    if layers != 1:
        mistakes.append(f"{CONFIG}: num_hidden_layers is {layers}; heads of one layer are supported")
    if vocab != model.vocab:
        mistakes.append(f"{CONFIG}: vocab_size is {vocab}, and the model's {model.vocab}")
    if fields.integer("target_hidden_size", model.hidden) != model.hidden:
        stated = raw["target_hidden_size"]
        mistakes.append(
            f"{CONFIG}: target_hidden_size is {stated}, and the model's hidden_size {model.hidden}"
        )
    norm = NormSpec(hidden, rms_eps(fields))
    biased = fields.boolean("attention_bias", False)
    layer = llama_layer(fields, attention(fields, qkv_bias=biased), gated_feed_forward(fields), norm)
    draft_vocab = fields.integer("draft_vocab_size", vocab)
    return StoredEagle(
        files,
        _spec(layer, draft_vocab, model),
        _states(raw, len(model.layers), mistakes),
        model.hidden,
        model.vocab,
        _LAYERS[any(name.startswith(_LAYERS[1]) for name in tensors)],
        OFFSETS in tensors or draft_vocab != vocab,
        EMBEDDING in tensors or hidden != model.hidden,
        HEAD in tensors or hidden != model.hidden or draft_vocab != vocab,
        fields.boolean("norm_before_residual", False),
    )


def _spec(layer: LayerSpec, vocab: int, model: ModelSpec) -> ModelSpec:
    return replace(
        model,
        family="llama",
        hidden=layer.hidden,
        vocab=vocab,
        layers=(layer,),
        final_norm=layer.post_norm,
        tied=False,
        embedding_multiplier=1.0,
        logit_multiplier=1.0,
        logit_cap=None,
        learned_positions=False,
        head_form=None,
    )


def _states(raw: Mapping[str, Any], layers: int, mistakes: list[str]) -> tuple[int, ...]:
    # SGLang's key in eagle_config lists the layers before those whose inputs are read; vLLM's key lists these
    stated, nested = raw.get(_STATED), raw.get("eagle_config")
    key, further = _STATED, 0
    if stated is None and isinstance(nested, dict):
        stated, key, further = nested.get(_STATED), f"eagle_config.{_STATED}", 1
        if nested.get("use_aux_hidden_state") is False:
            mistakes.append(
                f"{CONFIG}: eagle_config.use_aux_hidden_state is false; EAGLE-3 reads three states"
            )
    wanted = f"{READ_STATES} different ones from {-further} to {layers - further}"
    if stated is None:
        found = 2, layers // 2, layers - 3
        if not found[0] < found[1] < found[2]:
            mistakes.append(f"{CONFIG}: a model of {layers} layers needs {key}: {wanted}")
        return found
    if isinstance(stated, list) and all(
        isinstance(one, int) and 0 <= one + further <= layers for one in stated
    ):
        states = tuple(sorted({one + further for one in stated}))
        if len(states) == len(stated) == READ_STATES:
            return states
    mistakes.append(f"{CONFIG}: {key} is {shown(stated)}; wanted {wanted}")
    return ()


def _mistakes(stored: StoredEagle, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    named = {name: one for name, one in tensors.items() if name not in (OFFSETS, USED_TOKENS)}
    found = [
        *tensor_mistakes(
            stored.shapes(),
            {name: one.info for name, one in named.items()},
            WEIGHTS,
            "EAGLE-3 head of one layer",
        ),
        *_wrong_numbers(stored, tensors),
    ]
    yield from found or _wrong_tokens(stored, tensors)


def _wrong_numbers(stored: StoredEagle, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    kinds = {OFFSETS: (stored.spec.vocab, ("I64", "I32")), USED_TOKENS: (stored.model_vocab, ("BOOL",))}
    if stored.offsets and OFFSETS not in tensors:
        yield f"{WEIGHTS} has no tensor {OFFSETS}, which maps the tokens of the head to tokens of the model"
    for name, (count, dtypes) in kinds.items():
        info = tensors[name].info if name in tensors else None
        if info is not None and (info.shape != (count,) or info.dtype not in dtypes):
            stored_as = f"{info.dtype} of shape {info.shape}"
            yield f"{WEIGHTS}: {name} is {stored_as}; wanted {dtypes[0]} of shape {(count,)}"


def _wrong_tokens(stored: StoredEagle, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    # d2t must map to tokens of the target model, to each at most once, and to the tokens that the tensor t2d marks
    if not stored.offsets:
        return
    tokens = tensors[OFFSETS].integers() + np.arange(stored.spec.vocab)
    inside = (tokens >= 0) & (tokens < stored.model_vocab)
    if not inside.all():
        wrong = int(np.flatnonzero(~inside)[0])
        yield (
            f"{WEIGHTS}: {OFFSETS} makes {tokens[wrong]} of the head's token {wrong}; the model has "
            f"{stored.model_vocab}"
        )
    elif len(np.unique(tokens)) < len(tokens):
        yield f"{WEIGHTS}: {OFFSETS} makes the same token of two of the head's"
    elif USED_TOKENS in tensors:
        used = np.flatnonzero(np.frombuffer(tensors[USED_TOKENS].content(), np.bool_))
        if not np.array_equal(used, np.sort(tokens)):
            yield f"{WEIGHTS}: {USED_TOKENS} names other tokens than {OFFSETS}"
