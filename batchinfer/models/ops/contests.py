"""Operators are chosen by time when a model is loaded: one choice, which all engines of a run share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.product_choice import product_contest
from batchinfer.models.ops.prompts.contest import prefill_contest
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.spec.spec import AttentionRules

_log = logging.getLogger(__name__)


def fastest_operators(
    ops: Ops,
    sizes: PromptSizes,
    device: torch.device,
    layers: Mapping[AttentionRules, int],
    agreed: Callable[[Callable[[], str]], str],
) -> Ops:
    """Return the operators with prompts read, and some products computed, by who is fastest; see `prompts.contest` and
    `product_choice`.

    `layers`: how many layers have such attention. `agreed`: makes one choice that all engines of a run share, as
    operators round differently; what another engine had nothing to choose of stays as it is.
    """
    prompts = prefill_contest(ops, sizes, device, layers)
    products = product_contest(ops, sizes.tokens, device)
    if prompts is None and products is None:
        return ops

    def decide() -> str:
        chosen: dict[str, Any] = {}
        if prompts is not None:
            chosen["prompts"] = prompts.decide()
        if products is not None:
            chosen["products"] = products.decide()
        if device.type == "cuda":  # an error of a kernel shows here at the latest, while nothing is chosen
            torch.cuda.synchronize(device)
        return json.dumps(chosen)

    chosen = json.loads(agreed(decide))
    if not chosen:
        _log.warning("an engine died while kernels were compared; in this run batchinfer's own are used")
    if products is not None:
        products.settle(chosen.get("products", {}))
    return ops if prompts is None or "prompts" not in chosen else prompts.winner(chosen["prompts"])
