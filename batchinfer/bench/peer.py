"""Runs a workload with transformers' `generate`, for comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from batchinfer.bench.workloads import Row

BATCH = 32  # rows; on two CPU cores, the times with 16, 32 and 64 differed by less than the noise


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The result of a run with transformers.

    Attributes:
        wall_s: Seconds from prompts as token ids to answers as token ids.
        answers: Token ids of each row's answer.
    """

    wall_s: float
    answers: tuple[tuple[int, ...], ...]


class TransformersPeer:
    """A checkpoint that is loaded with transformers in this process, to compare its speed with batchinfer's."""

    name = "transformers"

    def __init__(self, checkpoint: Path, dtype: str, device: torch.device | str) -> None:
        """Load the checkpoint in a dtype such as "bfloat16". Raises OSError if the folder cannot be loaded."""
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self._device = torch.device(device)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        self._model = model.to(self._device).eval()

    @property
    def version(self) -> str:
        """Return the installed version of transformers."""
        return version("transformers")

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> PeerRun:
        """Generate the answers of all rows, including duplicates, in batches of rows of similar length.

        A batch generates the number of tokens that its longest row needs. The answers of shorter rows are truncated.
        """
        began = time.perf_counter()
        answers: list[tuple[int, ...]] = [()] * len(rows)
        for numbers in _batches(rows):
            for number, answer in zip(numbers, self._generate([rows[n] for n in numbers]), strict=True):
                answers[number] = tuple(answer[: rows[number].max_tokens])
        return PeerRun(time.perf_counter() - began, tuple(answers))

    def _generate(self, rows: Sequence[Row]) -> list[list[int]]:
        ids, mask = _padded(rows)
        longest = max(row.max_tokens for row in rows)
        config = GenerationConfig(
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        whole: Tensor = self._model.generate(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), generation_config=config
        )
        found: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return found


def _batches(rows: Sequence[Row]) -> Iterator[list[int]]:
    order = sorted(range(len(rows)), key=lambda n: (len(rows[n].prompt), rows[n].max_tokens))
    yield from (order[at : at + BATCH] for at in range(0, len(order), BATCH))


def _padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    width = max(len(row.prompt) for row in rows)
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for number, row in enumerate(rows):
        ids[number, width - len(row.prompt) :] = torch.tensor(row.prompt)
        mask[number, width - len(row.prompt) :] = 1
    return ids, mask
