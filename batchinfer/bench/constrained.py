"""Rows that follow JSON Schemas, for comparison with the same rows without: each samples as many tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.bench.options import BenchOptions
from batchinfer.bench.vocabulary import made_up_tokenizer
from batchinfer.bench.workloads import Row
from batchinfer.core.request import RowError
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.input.constraints.constrained import GrammarConstraints, RowConstraint
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.models.checkpoint.shapes import shape_config

RECORDS = 1000  # an answer's least: none is whole before its row has its tokens


def schema(number: int, turn: int) -> str:
    """The JSON Schema of a long list of orders. Names hold the number and the turn: other ones are compiled anew."""
    name, mark = f"customer_{number}", f"sent_{turn}"
    order = {
        name: {"type": "string", "maxLength": 20},
        "quantity": {"type": "integer"},
        "state": {"enum": ["open", "paid", mark]},
        "due": {"type": "string", "format": "date"},
    }
    item = {"type": "object", "properties": order, "required": list(order)}
    orders = {"type": "array", "items": item, "minItems": RECORDS}
    return json.dumps({"type": "object", "properties": {"orders": orders}, "required": ["orders"]})


def under_schemas(rows: Sequence[Row], schemas: int, turn: int) -> list[Row]:
    """The rows, each under one of so many schemas, which no other turn has."""
    texts = [schema(number, turn) for number in range(schemas)]
    return [replace(row, schema=texts[number % schemas]) for number, row in enumerate(rows)]


def with_constraints(loaded: LoadedModel, options: BenchOptions) -> LoadedModel:
    """The same model, able to follow schemas. Raises what reading a checkpoint's tokenizer raises."""
    definition, vocab = _tokenizer(options)
    eos = loaded.engine_limits.eos_token_ids
    constraints = EverySampled(GrammarConstraints(definition, eos, vocab, loaded.info.threads))
    # which loads the tokenizer, as a job does once
    constraints.start(SamplingParams(json_schema=schema(0, 0)))
    masks = ConstraintMasks(constraints)
    sampler = replace(loaded.runner.sampler, mask=masks)
    return replace(loaded, runner=replace(loaded.runner, sampler=sampler), masks=masks)


def _tokenizer(options: BenchOptions) -> tuple[str, int]:
    """Its definition, and how many tokens it has."""
    if options.is_shape:
        vocab = shape_config(options.model).vocab
        return made_up_tokenizer(vocab), vocab
    tokenizer = Tokenizer.load(options.folder)
    return tokenizer.definition, tokenizer.vocab_size


@dataclass(frozen=True, slots=True)
class SampledConstraint:
    """Its forced tokens are found, but sampled: so each row takes as many steps as without a constraint."""

    grammar: RowConstraint

    @property
    def needs_end(self) -> bool:
        return self.grammar.needs_end

    @property
    def ended(self) -> bool:
        return self.grammar.ended

    @property
    def over(self) -> bool:
        return self.grammar.over

    @property
    def failure(self) -> RowError | None:
        return self.grammar.failure

    def take(self, token: int) -> None:
        self.grammar.take(token)

    def allows(self, token: int) -> bool:
        return not self.grammar.jump_forward() and self.grammar.allows(token)

    def fork(self) -> SampledConstraint:
        return SampledConstraint(self.grammar.fork())

    def jump_forward(self) -> Sequence[int]:
        self.grammar.jump_forward()
        return ()


@dataclass(frozen=True, slots=True)
class EverySampled:
    """The engine asks this for constraints, as it asks batchinfer.engine.schedule.constraints.Constraints."""

    grammars: GrammarConstraints

    @property
    def work(self) -> ConstraintWork:
        return self.grammars.work

    def start(self, params: SamplingParams) -> SampledConstraint:
        return SampledConstraint(self.grammars.start(params))

    def fill(self, constraints: Sequence[Any], bits: NDArray[np.int32]) -> None:
        self.grammars.fill([one.grammar for one in constraints], bits)
