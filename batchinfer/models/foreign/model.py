"""A decoder in transformers' code over our paged KV cache, as the engine's runner needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer.models.foreign.interface import Given, attach
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import finite_argmax
from batchinfer_kernels.paged_attention import ScoreRules


@dataclass(slots=True)
class _Step:
    """The state of one forward pass; `done` counts the layers whose attention was computed."""

    inputs: Sequence[AttentionInputs]
    caches: Sequence[LayerCache]
    plans: Sequence[AttentionPlan]
    done: int = 0


class TransformersModel:
    """Runs all tokens of a step as one row, each at its position: only attention, which is ours, looks at more than one
    token. Layers are told apart by the order in which they call it, which is that of `spec.layers`."""

    classifier: ClassVar[None] = None  # transformers' decoders make logits of tokens alone

    def __init__(self, causal: Any, spec: ForeignSpec, ops: Ops, returned: type) -> None:
        """`causal`: the loaded model, which is taken apart; `returned`: the class of what its decoder returns."""
        self.spec = spec
        self._ops = ops
        self._step: _Step | None = None
        self._decoder = causal.get_submodule(spec.decoder)
        attach(causal, self)
        causal.set_submodule(spec.decoder, Given(returned))
        self._around = causal

    @property
    def expert_loads(self) -> ExpertLoads:
        """None: transformers' code does not count them."""
        return ExpertLoads({})

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        """token_ids (T,) int64 → hidden states (T, hidden), ready for the head. Writes K and V to `caches`, each of
        which names its group, of which `inputs` and `plans` have an element."""
        self._step = _Step(inputs, caches, plans)
        try:
            places = inputs[0].positions[None]
            out = self._decoder(input_ids=token_ids[None], position_ids=places, use_cache=False)
        finally:
            self._step = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def states(self, hidden: Tensor) -> Tensor:
        """Return rows of `forward` as they are: they are behind the final norm."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, hidden) → (n, vocab) float32."""
        found: Tensor = self._around(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return found.float()

    def argmax(self, hidden: Tensor) -> Tensor:
        """(n, hidden) → (n,) int64; NO_TOKEN where logits are no finite numbers."""
        return finite_argmax(self.logits(hidden))

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: object, scale: object, **more: Any
    ) -> Tensor:
        """Compute a layer's attention; see Attending. Raises RuntimeError outside of a step, and for a layer that was
        not there when the model was described."""
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
        """Return no mask, because our operators know it; see Attending."""

    @staticmethod
    def _heads(heads: Tensor, dim: int, cache: LayerCache) -> Tensor:
        """(1, heads, T, D) → (T, heads, dim), what is missing zero: it changes no score, and no sum that is kept."""
        laid = heads[0].transpose(0, 1)
        if laid.shape[2] < dim:
            laid = F.pad(laid, (0, dim - laid.shape[2]))
        return laid.to(cache.k.dtype).contiguous()
