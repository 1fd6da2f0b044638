"""Runs transformers' continuous batching on equal rows with equal answer lengths, in the same process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from batchinfer.bench.peer import PeerRun
from batchinfer.bench.workloads import Row
from batchinfer.core.errors import BatchInferError
from batchinfer.models.checkpoint.dummy import DummyWeights

POLL_S = 1.0


class ContinuousPeer:
    """A model of a known shape with our weights, and transformers' manager of continuous batching.

    Cache and batch sizes are transformers' defaults, which follow from free memory.
    """

    name = "transformers"

    def __init__(
        self,
        config_json: dict[str, Any],
        weights: DummyWeights,
        place: torch.device,
        dtype: str,
        cache: dict[str, int] | None = None,
    ) -> None:
        """Load the model to `place`, which needs room for weights and cache.

        `cache`: its sizes, if not from free memory.

        Raises BatchInferError if the weights belong to another model.
        """
        transformers_logging.set_verbosity_error()
        given = {name: value for name, value in config_json.items() if name != "architectures"}
        with torch.device(place):
            model: Any = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**given), dtype=getattr(torch, dtype)
            )
        _fill(model, weights)
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager: Any = model.eval().init_continuous_batching(
            generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**(cache or {}))
        )
        with torch.no_grad():
            self._manager.warmup()
        self._manager.start()
        self._turn = 0

    @property
    def version(self) -> str:
        return version("transformers")

    def run(self, rows: Sequence[Row]) -> PeerRun:
        """Run every row, duplicates too. Raises BatchInferError if a row fails or has another length."""
        self._turn += 1
        began = time.perf_counter()
        for number, row in enumerate(rows):
            name = f"{self._turn}:{number}"
            self._manager.add_request(list(row.prompt), request_id=name, max_new_tokens=row.max_tokens)
        answers: dict[str, tuple[int, ...]] = {}
        while len(answers) < len(rows):
            answers.update(self._next())
        wall_s = time.perf_counter() - began
        found = tuple(answers[f"{self._turn}:{number}"] for number in range(len(rows)))
        for answer, row in zip(found, rows, strict=True):
            if len(answer) != row.max_tokens:
                raise BatchInferError(f"{self.name} gave {len(answer)} tokens of {row.max_tokens}")
        return PeerRun(wall_s, found)

    def close(self) -> None:
        self._manager.stop(block=True)

    def _next(self) -> dict[str, tuple[int, ...]]:
        """Return the next answer by its name, or an empty dict after a timeout."""
        result = self._manager.get_result(timeout=POLL_S)
        if result is None:
            if not self._manager.is_running():
                raise BatchInferError(f"{self.name} has ended without all answers")
            return {}
        if result.error is not None:
            raise BatchInferError(f"{self.name}: {result.error}")
        return {result.request_id: tuple(result.generated_tokens)} if result.is_finished() else {}


def _fill(model: Any, weights: DummyWeights) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.named_tensors():
            parameters.pop(name).copy_(tensor)
    if parameters:
        raise BatchInferError(f"no weights for {', '.join(parameters)}")
