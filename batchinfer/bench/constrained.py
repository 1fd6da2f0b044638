"""Runs the rows of a workload with JSON Schemas, to measure the cost of constraints at the same number of tokens."""

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

RECORDS = 1000  # minimum items of an answer: no answer is complete before max_tokens


def schema(number: int, turn: int) -> str:
    """Return the JSON Schema of a long list of orders.

    Names in the schema contain `number` and `turn`, so each combination has to be compiled.
    """
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
    """Return the rows with schemas. There are `schemas` different schemas, which no other turn uses."""
    texts = [schema(number, turn) for number in range(schemas)]
    return [replace(row, schema=texts[number % schemas]) for number, row in enumerate(rows)]


def with_constraints(loaded: LoadedModel, options: BenchOptions) -> LoadedModel:
    """Return the same model with support for schemas. Raises errors of reading the tokenizer."""
    definition, vocab = _tokenizer(options)
    eos = loaded.engine_limits.eos_token_ids
    constraints = EverySampled(GrammarConstraints(definition, eos, vocab, loaded.info.threads))
    # Loads the tokenizer, which a job does only once
    constraints.start(SamplingParams(json_schema=schema(0, 0)))
    masks = ConstraintMasks(constraints)
    sampler = replace(loaded.runner.sampler, mask=masks)
    return replace(loaded, runner=replace(loaded.runner, sampler=sampler), masks=masks)


def _tokenizer(options: BenchOptions) -> tuple[str, int]:
    """Return the tokenizer's definition and the number of its tokens."""
    if options.is_shape:
        vocab = shape_config(options.model).vocab
        return made_up_tokenizer(vocab), vocab
    tokenizer = Tokenizer.load(options.folder)
    return tokenizer.definition, tokenizer.vocab_size


@dataclass(frozen=True, slots=True)
class SampledConstraint:
    """A constraint whose forced tokens are sampled: each row takes the same number of steps as without a constraint.

    See `batchinfer.engine.schedule.constraints` for its methods.
    """

    grammar: RowConstraint

    @property
    def needs_end(self) -> bool:
        """Return the value of the wrapped constraint."""
        return self.grammar.needs_end

    @property
    def ended(self) -> bool:
        """Return the value of the wrapped constraint."""
        return self.grammar.ended

    @property
    def over(self) -> bool:
        """Return the value of the wrapped constraint."""
        return self.grammar.over

    @property
    def failure(self) -> RowError | None:
        """Return the value of the wrapped constraint."""
        return self.grammar.failure

    def take(self, token: int) -> None:
        """Append a token."""
        self.grammar.take(token)

    def allows(self, token: int) -> bool:
        """Return True if the token is allowed and no token is forced."""
        return not self.grammar.jump_forward() and self.grammar.allows(token)

    def fork(self) -> SampledConstraint:
        """Return a copy."""
        return SampledConstraint(self.grammar.fork())

    def jump_forward(self) -> Sequence[int]:
        """Compute the forced tokens, but return none of them."""
        self.grammar.jump_forward()
        return ()


@dataclass(frozen=True, slots=True)
class EverySampled:
    """An implementation of `batchinfer.engine.schedule.constraints.Constraints` that samples forced tokens."""

    grammars: GrammarConstraints

    @property
    def work(self) -> ConstraintWork:
        """Return the time spent on constraints."""
        return self.grammars.work

    def start(self, params: SamplingParams) -> SampledConstraint:
        """Return the constraint of a new row."""
        return SampledConstraint(self.grammars.start(params))

    def fill(self, constraints: Sequence[Any], bits: NDArray[np.int32]) -> None:
        """Fill the masks of rows."""
        self.grammars.fill([one.grammar for one in constraints], bits)
