"""Describes a model that transformers computes, by running it without weights on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from batchinfer.models.families.family import ConfigFiles, eos_token_ids, stated_dtype
from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.foreign.interface import (
    ATTENTION_NAME,
    DecoderStub,
    attach,
    class_of,
    config_of,
    silence_transformers,
)
from batchinfer.models.foreign.recorder import Recorder
from batchinfer.models.foreign.spec import CannotRun, ForeignSpec

TOKENS = 13  # length of the sequence that is run
MOST_POSITIONS = 1 << 22
STATEFUL = "it keeps more than keys and values of each layer, as state-space and recurrent models do"
MIXING = "it mixes tokens beside attention"
ELSEWHERE = "its attention does not go through transformers' attention interface"
# Modules that pass data between tokens without attention
MIXERS = (nn.Conv1d, nn.Conv2d, nn.RNNBase)


def serve(raw: Mapping[str, Any], generation: Mapping[str, Any], connection: Connection[Any, Any]) -> None:
    """Send the ForeignSpec of a model to the parent process, or (reason, detail) if the model cannot run.

    It is the entry point of a child process.

    Args:
        raw: The contents of config.json.
        generation: The contents of generation_config.json.
        connection: The pipe to the parent process.
    """
    try:
        connection.send(describe(raw, generation))
    except CannotRun as error:
        connection.send((error.reason, error.detail))


def describe(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """Return the sizes and attention of a model that transformers computes, found by running it without weights.

    Args:
        raw: The contents of config.json.
        generation: The contents of generation_config.json.

    Raises:
        CannotRun: Transformers cannot run the model, or the engine could not compute its attention correctly.
    """
    with silence_transformers():
        config = config_of(raw)
        kind = class_of(config, raw)
        positions = _positions(config)
        model = _without_weights(kind, config)
        _check_modules(model)
        recorder = Recorder(positions)
        attach(model, recorder)
        with _raise_cannot_run(), recorder.watching(model), FlopCounterMode(display=False) as flops:
            vocab = _run(model).logits.shape[-1]
        _check_calls(recorder, config)
        with _raise_cannot_run():
            _check_caches(recorder, config, positions)
        decoder = recorder.outermost[0]
        with _raise_cannot_run():
            halves = _halves(model, decoder, vocab)
        return ForeignSpec(
            architecture=kind.__name__,
            decoder=decoder,
            version=transformers.__version__,
            vocab=vocab,
            max_positions=positions,
            layers=tuple(recorder.layers),
            active=flops.get_total_flops() // (2 * TOKENS) - halves.head,
            **asdict(halves),
            **_facts(config, raw, generation),
        )


def _positions(config: Any) -> int:
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise CannotRun("it states no max_position_embeddings, so the maximum length of a row is unknown")
    return min(found, MOST_POSITIONS)


def _without_weights(kind: Any, config: Any) -> Any:
    # Other implementations of experts look at the values, which the meta device does not have
    more = {"experts_implementation": "batched_mm"} if kind._can_set_experts_implementation() else {}
    with _raise_cannot_run(), torch.device("meta"):
        return kind._from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.float32, **more
        ).eval()


def _check_modules(model: Any) -> None:
    if model._is_stateful:
        raise CannotRun(STATEFUL)
    for name, module in model.named_modules():
        if isinstance(module, MIXERS):
            raise CannotRun(MIXING, f"{name} is a {type(module).__name__}")


@contextmanager
def _raise_cannot_run() -> Iterator[None]:
    try:
        yield
    except CannotRun:
        raise
    except Exception as error:
        if ATTENTION_NAME in str(error):  # the model looks attention up in a table of its own
            raise CannotRun(ELSEWHERE) from error
        text = f"{type(error).__name__}: {error}"
        raise CannotRun("its code cannot be run without weights, to look at it", shown(text)) from error


def _run(model: Any) -> Any:
    row = torch.ones(1, TOKENS, dtype=torch.long, device="meta")
    with torch.no_grad():
        return model(input_ids=row, attention_mask=row, position_ids=row, use_cache=False)


def _check_calls(recorder: Recorder, config: Any) -> None:
    calls, layers = len(recorder.layers), config.num_hidden_layers
    if not calls:
        raise CannotRun(ELSEWHERE)
    if calls != layers:
        raise CannotRun("not every layer calls attention once", f"{calls} calls, {layers} layers")
    if len(set(recorder.outermost)) > 1 or not recorder.outermost[0]:
        raise CannotRun("its decoder and its head are no separate modules")


def _check_caches(recorder: Recorder, config: Any, positions: int) -> None:
    # The answers of a model whose cache keeps fewer tokens than its masks show depend on how prompts are chunked
    for layer, cache in zip(recorder.layers, DynamicCache(config=config).layers, strict=True):
        if type(cache) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise CannotRun(STATEFUL, type(cache).__name__)
        kept = cache.sliding_window if cache.is_sliding else None
        kept = kept if kept is None or kept < positions else None
        if kept is not None and kept != layer.window:
            raise CannotRun(
                "its cache keeps fewer tokens than its mask shows, so that its answers depend on how a prompt is cut",
                f"{kept} and {layer.window or 'all'}",
            )


def _facts(config: Any, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    mistakes: list[str] = []
    files = ConfigFiles(
        Fields(raw, "config.json", mistakes), Fields(generation, "generation_config.json", mistakes)
    )
    absent = config.eos_token_id
    ids = () if absent is None else (absent,) if isinstance(absent, int) else tuple(absent)
    eos = eos_token_ids(files, ids)
    if mistakes:
        raise CannotRun("wrong values", "; ".join(mistakes))
    return {"family": config.model_type, "eos_token_ids": eos, "dtype": stated_dtype(files.config)}


@dataclass(frozen=True, slots=True)
class _Halves:
    hidden: int
    parameters: int
    streamed: int
    head: int


def _halves(model: Any, path: str, vocab: int) -> _Halves:
    decoder, embedding = model.get_submodule(path), model.get_input_embeddings().weight
    attach(model, Recorder(TOKENS))
    out = _run(decoder)
    hidden, parameters = out.last_hidden_state, _values(model)
    model.set_submodule(path, DecoderStub(type(out)))
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        logits = model(inputs_embeds=hidden, use_cache=False).logits
    if logits.shape != (1, TOKENS, vocab) or embedding.shape[0] < vocab:
        raise CannotRun(
            "it does not give one logit per token id", f"{tuple(logits.shape)}, {embedding.shape[0]} ids"
        )
    streamed = _values(decoder) - embedding.numel()
    return _Halves(hidden.shape[-1], parameters, streamed, flops.get_total_flops() // (2 * TOKENS))


def _values(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
