"""Which families there are. A new one is a file beside this one, and a line here."""

from __future__ import annotations

from batchinfer.models.families.family import Family
from batchinfer.models.families.llama import LLAMA, MISTRAL
from batchinfer.models.families.qwen import QWEN2, QWEN3

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
