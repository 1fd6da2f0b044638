"""A decoder that transformers' code computes, over the engine's paged KV cache and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer.models.foreign.interface import DecoderStub, attach
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import finite_argmax
from batchinfer_kernels.paged_attention import ScoreRules


@dataclass(slots=True)
class _Step:
    inputs: Sequence[AttentionInputs]
    caches: Sequence[LayerCache]
    plans: Sequence[AttentionPlan]
    done: int = 0


class TransformersModel:
    """Runs a model with transformers' code. All tokens of a step form one row, each at its own position.

    Only attention passes data between tokens, and the engine's operators compute it. The n-th attention call of a step
    belongs to the n-th of `spec.layers`.
    """

    classifier: ClassVar[None] = None  # transformers' decoders make logits of tokens alone

    def __init__(self, causal: Any, spec: ForeignSpec, ops: Ops, returned: type) -> None:
        """Prepare a loaded model: redirect its attention to this object, and separate decoder and output layer.

        Args:
            causal: The loaded model with its output layer. It is modified.
            spec: The sizes and attention of the model.
            ops: The operators that compute attention.
            returned: The class of the object that the decoder returns.
        """
        self.spec = spec
        self._ops = ops
        self._step: _Step | None = None
        self._decoder = causal.get_submodule(spec.decoder)
        attach(causal, self)
        causal.set_submodule(spec.decoder, DecoderStub(returned))
        self._around = causal

    @property
    def expert_loads(self) -> ExpertLoads:
        """Return no counters, as transformers' code does not count the tokens of experts."""
        return ExpertLoads({})

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """Run the decoder on a step's T tokens, and write their K and V to the caches.

        Args:
            token_ids: (T,) int64.
            inputs: Positions, cache slots and block tables of the step, one element per cache group.
            caches: The KV cache of each layer, with the index of its cache group.
            plans: What `ops.plan_attention` returned for each element of `inputs`.

        Returns:
            The hidden states after the final norm, (T, hidden).
        """
        self._step = _Step(inputs, caches, plans)
        try:
            places = inputs[0].positions[None]
            out = self._decoder(input_ids=token_ids[None], position_ids=places, use_cache=False)
        finally:
            self._step = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def states(self, hidden: Tensor) -> Tensor:
        """Return hidden states from `forward` unchanged, as the final norm is already applied to them."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of n positions, (n, vocab) float32.

        Args:
            hidden: (n, hidden), rows of the result of `forward`.
        """
        found: Tensor = self._around(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return found.float()

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the most likely token of each row, (n,) int64; NO_TOKEN for rows whose logits are not finite.

        Args:
            hidden: (n, hidden), rows of the result of `forward`.
        """
        return finite_argmax(self.logits(hidden))

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, **more: Any
    ) -> Tensor:
        """Compute the attention of the step's next layer over its KV cache; see `AttentionBackend.attend`.

        Raises:
            RuntimeError: No step is running, or attention was already called for all layers of the step.
        """
        step = self._step
        if step is None or step.done == len(self.spec.layers):
            raise RuntimeError("attention was called by no layer of a step")
        layer, cache = self.spec.layers[step.done], step.caches[step.done]
        step.done += 1
        queries, keys, values = (self._heads(heads, layer.head_dim, cache) for heads in (q, k, v))
        inputs = step.inputs[cache.group]
        self._ops.store(keys, values, inputs, cache)
        if inputs.parts is not None:
            self._ops.copy_parts(cache, inputs.parts)
        sinks = more["s_aux"].float() if layer.sinks else None
        plan = step.plans[cache.group]
        rules = ScoreRules(layer.scale, layer.window, layer.soft_cap, sinks)
        found = self._ops.attention(queries, cache, plan, rules)
        return found[None, ..., : layer.v_dim].to(v.dtype)

    def mask(self, **_: Any) -> None:
        """Return None, as the engine's operators apply the mask. It overrides `AttentionBackend.mask`."""

    @staticmethod
    def _heads(heads: Tensor, dim: int, cache: LayerCache) -> Tensor:
        """Return q, k or v of a layer in the form for the engine's attention: (T, heads, dim) in the cache's dtype.

        Args:
            heads: (1, heads, T, size).
            dim: The head size of the cache. If `size` is smaller, zeros are added.
            cache: The KV cache.
        """
        laid = heads[0].transpose(0, 1)
        if laid.shape[2] < dim:
            laid = F.pad(laid, (0, dim - laid.shape[2]))
        return laid.to(cache.k.dtype).contiguous()
