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
    """Return a JSON Schema as JSON text, for an answer that is a list of at least RECORDS orders.

    Each pair of `number` and `turn` gives a different schema, so that an engine cannot reuse a compiled one.

    Args:
        number: Number of the schema within a run.
        turn: Number of the repetition of the run.
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
    """Return the rows with a JSON Schema each.

    Args:
        rows: The rows of the workload.
        schemas: Number of different schemas, which rows use in turn.
        turn: Number of the repetition. Each repetition has new schemas, so that the engine has compiled none of them.
    """
    texts = [schema(number, turn) for number in range(schemas)]
    return [replace(row, schema=texts[number % schemas]) for number, row in enumerate(rows)]


def with_constraints(loaded: LoadedModel, options: BenchOptions) -> LoadedModel:
    """Return the model with a tokenizer added, so that rows can have JSON Schemas.

    Args:
        loaded: The model.
        options: The options of the command, which name the checkpoint or shape.
    """
    definition, vocab = _tokenizer(options)
    eos = loaded.engine_limits.eos_token_ids
    constraints = EverySampled(GrammarConstraints(definition, eos, vocab, loaded.info.threads))
    # Loads the tokenizer, which a job does only once
    constraints.start(SamplingParams(json_schema=schema(0, 0)))
    masks = ConstraintMasks(constraints)
    sampler = replace(loaded.runner.sampler, mask=masks)
    return replace(loaded, runner=replace(loaded.runner, sampler=sampler), masks=masks)


def _tokenizer(options: BenchOptions) -> tuple[str, int]:
    if options.is_shape:
        vocab = shape_config(options.model).vocab
        return made_up_tokenizer(vocab), vocab
    tokenizer = Tokenizer.load(options.folder)
    return tokenizer.definition, tokenizer.vocab_size


@dataclass(frozen=True, slots=True)
class SampledConstraint:
    """A constraint whose forced tokens are sampled by the model instead of being skipped.

    A token is forced if it is the only one that the constraint allows. Rows then take the same number of steps with and
    without a constraint, so that their times can be compared.

    Attributes:
        grammar: The wrapped constraint; see `batchinfer.engine.schedule.constraints`.
    """

    grammar: RowConstraint

    @property
    def needs_end(self) -> bool:
        """Return True if the answer would be incomplete if it ended now."""
        return self.grammar.needs_end

    @property
    def ended(self) -> bool:
        """Return True if the answer is complete and no token may follow."""
        return self.grammar.ended

    @property
    def over(self) -> bool:
        """Return True if the constraint has no effect on further tokens: all are allowed."""
        return self.grammar.over

    @property
    def failure(self) -> RowError | None:
        """Return the error that makes the constraint impossible to follow, or None."""
        return self.grammar.failure

    def take(self, token: int) -> None:
        """Append a generated token to the answer."""
        self.grammar.take(token)

    def allows(self, token: int) -> bool:
        """Return True if the constraint allows the token next; False for every token if only one token is allowed."""
        return not self.grammar.jump_forward() and self.grammar.allows(token)

    def fork(self) -> SampledConstraint:
        """Return a copy of the constraint with the same answer so far."""
        return SampledConstraint(self.grammar.fork())

    def jump_forward(self) -> Sequence[int]:
        """Compute the forced tokens, but return none of them, so that the model samples them."""
        self.grammar.jump_forward()
        return ()


@dataclass(frozen=True, slots=True)
class EverySampled:
    """Creates constraints whose forced tokens are sampled by the model; see `SampledConstraint`.

    It has the interface `batchinfer.engine.schedule.constraints.Constraints`.

    Attributes:
        grammars: Creates the wrapped constraints.
    """

    grammars: GrammarConstraints

    @property
    def work(self) -> ConstraintWork:
        """Return the time spent on constraints so far."""
        return self.grammars.work

    def start(self, params: SamplingParams) -> SampledConstraint:
        """Return the constraint of a new row with these sampling parameters."""
        return SampledConstraint(self.grammars.start(params))

    def fill(self, constraints: Sequence[Any], bits: NDArray[np.int32]) -> None:
        """Write the token mask of each constraint, the tokens that it allows next, to `bits`, (rows, words) int32."""
        self.grammars.fill([one.grammar for one in constraints], bits)
