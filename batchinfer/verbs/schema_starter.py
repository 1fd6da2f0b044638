"""Implements `batchinfer init --from`: makes a prompt and an output section for a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputCorrupt, InputMissing
from batchinfer.core.sampling import MAX_SCHEMA_BYTES, SamplingParams
from batchinfer.input.constraints.answer_bound import UnboundedAnswer, most_tokens
from batchinfer.input.constraints.constraint_check import constraint_problem
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.input.constraints.schema_problem import BadSchema
from batchinfer.input.constraints.schema_references import References, UnknownReference
from batchinfer.job.check import RESULT_COLUMNS
from batchinfer.job.template import ORDERS, Sample, yaml_text
from batchinfer.store.columns.schema_columns import NoColumns, schema_columns

COLUMN = "answer"  # name of the only column if properties cannot be columns
FIT_TOKENS = 2048  # largest bound for `max_tokens: fit`; answers usually need far less
MAX_TOKENS = 1024
DESCRIBED = 100  # maximum number of properties in the prompt
DESCRIPTION_CHARS = 300


@dataclass(frozen=True, slots=True)
class SchemaFile:
    """The file of a JSON Schema that the user wants answers to follow, for a new job.

    Attributes:
        path: The file.
        data: Its content.
        schema: The parsed schema.
    """

    path: Path
    data: bytes
    schema: Any

    @classmethod
    def read(cls, path: Path) -> SchemaFile:
        """Read a schema file, and check that answers can follow the schema.

        Raises:
            InputMissing: The file cannot be read.
            InputCorrupt: The schema is invalid or not supported.
        """
        try:
            with open(path, "rb") as file:
                data = file.read(MAX_SCHEMA_BYTES + 1)
            schema = parsed_schema(data.decode("utf-8"))
        except OSError as error:
            raise InputMissing(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputCorrupt(f"{path}: is not UTF-8; a JSON Schema is") from None
        except BadSchema as error:
            raise InputCorrupt(f"{path}: {error}") from None
        if (problem := constraint_problem(SamplingParams(json_schema=json.dumps(schema)))) is not None:
            raise InputCorrupt(f"{path}: {problem.partition(': ')[2] or problem}")
        return cls(path, data, schema)

    def sample(self, name: str) -> Sample:
        """Return example rows and an instruction for a new job whose answers follow the schema.

        Args:
            name: The value of `output.schema_file` in the job file.
        """
        output = [f"  schema_file: {yaml_text(name)}    # answers follow it"]
        if not self._has_columns():
            output.append(f"  column: {COLUMN}          # the whole answer in one column")
        return replace(
            ORDERS, system=self._instruction(), max_tokens=self._max_tokens(), output="\n".join(output)
        )

    def _max_tokens(self) -> str:
        try:
            bound = most_tokens(SamplingParams(json_schema=json.dumps(self.schema)))
        except UnboundedAnswer:
            return str(MAX_TOKENS)
        return "fit" if bound <= FIT_TOKENS else str(MAX_TOKENS)

    def _has_columns(self) -> bool:
        # Properties become columns if they have types, and no other column of the result has their name
        try:
            names = schema_columns(self.schema).schema.names
        except NoColumns:
            return False
        return not {name.casefold() for name in names} & {*RESULT_COLUMNS, ORDERS.column}

    def _instruction(self) -> str:
        lines = list(self._properties())
        if not lines:
            return "Read the text, and answer with one line of JSON."
        head = "Read the text, and write what it says as one line of JSON with these keys:"
        return _literal("\n".join([head, *lines]))

    def _properties(self) -> Iterator[str]:
        found = self._followed(self.schema)
        properties = found.get("properties")
        for name, one in list(properties.items() if isinstance(properties, dict) else ())[:DESCRIBED]:
            about = self._followed(one)
            said = one.get("description") if isinstance(one, dict) else None
            text = said or about.get("description") or about.get("title") or _kind(about)
            yield f"- {name}: {' '.join(str(text).split())[:DESCRIPTION_CHARS]}" if text else f"- {name}"

    def _followed(self, schema: Any) -> dict[str, Any]:
        references = References(self.schema)
        for _ in range(DESCRIBED):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            try:
                schema = references.resolve(schema["$ref"])
            except UnknownReference:
                return {}
        return schema if isinstance(schema, dict) else {}


def _kind(schema: dict[str, Any]) -> str:
    values = schema.get("enum")
    if isinstance(values, list) and len(values) <= DESCRIBED:
        return "one of " + ", ".join(json.dumps(one, ensure_ascii=False) for one in values)
    if isinstance(schema.get("format"), str):
        return str(schema["format"])
    kinds = schema.get("type", [])
    return " or ".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)


def _literal(text: str) -> str:
    return text.replace("{", "{{ '{' }}")
