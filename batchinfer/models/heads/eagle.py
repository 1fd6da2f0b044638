"""EAGLE-3 (Li et al., 2025, arXiv:2503.01840): a decoder layer that drafts from embeddings and hidden states.

It reads the embedding of a token next to the state of the token before it. A state combines three hidden states of the
target model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.models.decoder.attention import AttentionHalf, attention_half
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.feed_forward import feed_forward
from batchinfer.models.decoder.positions import rope_table
from batchinfer.models.heads.stored_eagle import EMBEDDING, HEAD, NORMS, OFFSETS, StoredEagle
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import Head, LayerParts, Linear
from batchinfer.models.spec.spec import NormSpec

_FINAL = "final_norm"


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """The loaded weights of an EAGLE-3 draft head, packed for its operators.

    Args:
        stored: The head's folder, whose weights these are.
        ops: The operators.
        parts: The packed weights of the head's decoder layer.
        norms: The weights of the norm of the previous token's state, and of the final norm, by name.
        fuse: Computes a token's state from three hidden states of the target model.
        embedding: (vocab of the model, hidden). None: the embedding of the target model.
        head: The output layer. None: the output layer of the target model.
        targets: (vocab of the head,) int64, the target model's id of each token that the head can propose. None: both
            have the same ids.
    """

    stored: StoredEagle
    ops: Ops
    parts: LayerParts
    norms: Mapping[str, Tensor]
    fuse: Linear
    embedding: Tensor | None
    head: Head | None
    targets: Tensor | None

    @classmethod
    def load(cls, stored: StoredEagle, ops: Ops, dtype: torch.dtype, device: torch.device) -> EagleWeights:
        """Load the weights of an EAGLE-3 head.

        Args:
            stored: The folder of the head.
            ops: The operators for which the weights are packed.
            dtype: The dtype of the target model.
            device: The device of the target model.
        """
        found = _tensors(stored, dtype, device)
        layer, start = stored.spec.layers[0], stored.start

        def joined(*parts: str, end: str = "weight") -> Tensor:
            return torch.cat([found[f"{start}{part}_proj.{end}"] for part in parts])

        attended = [f"self_attn.{part}" for part in "qkv"]
        weights = {
            "qkv": joined(*attended),
            "o": joined("self_attn.o"),
            "gate_up": joined("mlp.gate", "mlp.up"),
            "down": joined("mlp.down"),
            **{name: found[f"{start}{module}.weight"] for name, module in NORMS.items()},
        }
        if stored.attention.qkv_bias:
            weights["qkv.bias"] = joined(*attended, end="bias")
        targets = None
        if stored.offsets:
            targets = found[OFFSETS] + torch.arange(stored.spec.vocab, device=device)
        return cls(
            stored,
            ops,
            pack_layer(ops, layer, weights),
            {"state_norm": weights["state_norm"], _FINAL: found["norm.weight"]},
            ops.pack_linear(found["fc.weight"], None),
            found.get(EMBEDDING),
            ops.pack_head(found[HEAD]) if stored.head else None,
            targets,
        )

    def of(self, model: Decoder, positions: int) -> EagleHead:
        """Return a draft head with these weights on top of a target model, ready to draft tokens.

        Args:
            model: The target model, whose embedding and output layer are used if the head has none.
            positions: The maximum number of tokens of a sequence.
        """
        layer = self.stored.spec.layers[0]
        assert layer.rotation is not None, "a layer with attention rotates its heads"
        rope = rope_table(layer.rotation, positions, self.norms[_FINAL].device)
        parts = replace(self.parts, rope=rope)
        half = attention_half(self.ops, layer.attention, parts)
        assert half is not None, "an EAGLE-3 head attends"
        embedding = model.embedding if self.embedding is None else self.embedding
        head = model.head if self.head is None else self.head
        return EagleHead(self, parts, half, embedding, head)


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """An EAGLE-3 draft head on top of a target model, ready to draft tokens.

    Args:
        weights: The weights of the head.
        parts: The packed weights of the head's layer, with its rotary table.
        attention: The attention half of the layer.
        embedding: (vocab of the model, hidden), the embedding of the head or else of the target model.
        head: The output layer of the head or else of the target model.
    """

    weights: EagleWeights
    parts: LayerParts
    attention: AttentionHalf
    embedding: Tensor
    head: Head

    def input_states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Return the draft head's states of T tokens, (T, width), computed from the target model's hidden states.

        Args:
            tapped: (T, hidden size of the model) each: the inputs of a low, a middle and a high layer of the model.
            hidden: Not used.
        """
        return self.weights.fuse(torch.cat([*tapped], -1))

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        inputs: AttentionInputs,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Return the head's states of T tokens, (T, width), and write the tokens' K and V to the head's KV cache.

        Args:
            token_ids: (T,) int64, the tokens.
            states: (T, width), for each token, the state of the token before it.
            inputs: Positions and cache slots of the tokens.
            cache: The KV cache of the head.
            plan: The result of `ops.plan_attention` for the step.
        """
        ops, layer, parts = self.weights.ops, self.weights.stored.spec.layers[0], self.parts
        embedded = self._apply_norm("input_norm", ops.embedding(token_ids, self.embedding))
        state = self._apply_norm("state_norm", states)
        residual = state if self.weights.stored.norms_residual else states
        queries = self.attention.queries(torch.cat((embedded, state), -1), inputs, cache)
        attended = self.attention.result(self.attention.attend(queries, inputs, cache, plan), inputs)
        x, residual = ops.norm(self._norm, parts.norms, "post_norm", attended, residual)
        return feed_forward(ops, layer, parts, x, inputs) + residual

    def states(self, hidden: Tensor) -> Tensor:
        """Return states after the head's final norm, (n, width).

        Args:
            hidden: (n, width), states from `forward`.
        """
        return self._apply_norm(_FINAL, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token, (n, vocab of the model). Tokens that the head never proposes have -inf.

        Args:
            hidden: (n, width), states from `forward`.
        """
        logits, targets = self.head(self.states(hidden)), self.weights.targets
        if targets is None:
            return logits
        whole = logits.new_full((len(logits), self.weights.stored.model_vocab), float("-inf"))
        whole[:, targets] = logits
        return whole

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the target model's id of the most likely next token, (n,); NO_TOKEN if its logit is not finite.

        Args:
            hidden: (n, width), states from `forward`.
        """
        tokens, targets = self.head.argmax(self.states(hidden)), self.weights.targets
        return tokens if targets is None else torch.where(tokens < 0, tokens, targets[tokens.clamp(min=0)])

    @property
    def _norm(self) -> NormSpec:
        norm = self.weights.stored.spec.final_norm
        assert norm is not None, "all norms of a head are equal, and it has one"
        return norm

    def _apply_norm(self, name: str, x: Tensor) -> Tensor:
        norms = self.parts.norms if name in self.parts.norms else self.weights.norms
        return self.weights.ops.norm(self._norm, norms, name, x)[0]


def _tensors(stored: StoredEagle, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    wanted, found = stored.shapes(), dict[str, Tensor]()
    with ExitStack() as stack:
        for path in stored.files:
            file = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            for name in {*file.keys()} & {*wanted, OFFSETS}:
                tensor = file.get_tensor(name)
                found[name] = tensor.to(device, torch.int64 if name == OFFSETS else dtype)
    return found
