"""Measure the model on the held-out rows: exact match of greedy answers, with plain transformers.

    python jobs/quickstart/accuracy.py --dtype float32

An engine that runs job.yaml should reproduce this accuracy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MAX_TOKENS = 96


@dataclass(frozen=True)
class Row:
    """A held-out sentence and its expected answer."""

    text: str
    expected: str


def clean_rows(path: Path = HERE / "data" / "orders.jsonl") -> list[Row]:
    """Return the rows that have an expected answer. Broken lines are skipped."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("expected") is not None:
            rows.append(Row(record["text"], record["expected"]))
    return rows


def answers(
    texts: Sequence[str], folder: Path = HERE / "model", dtype: str = "float32", batch: int = 64
) -> list[str]:
    """Return the greedy answer to each text. Texts of similar length share a batch.

    Args:
        texts: The sentences.
        folder: The folder of the model.
        dtype: The name of torch's data type.
        batch: The number of texts per batch.
    """
    system = YAML(typ="safe").load(HERE / "job.yaml")["prompt"]["system"]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found = [""] * len(texts)
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        chats = [
            [{"role": "system", "content": system}, {"role": "user", "content": texts[i]}] for i in indices
        ]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        for index, text in zip(indices, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            found[index] = text
    return found


def main() -> None:
    """Print the wrong answers, then a line of JSON with the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--rows", type=int, default=None, help="only the first rows")
    arguments = parser.parse_args()
    rows = clean_rows()[: arguments.rows]
    found = answers([row.text for row in rows], arguments.model, arguments.dtype)
    wrong = [(row, answer) for row, answer in zip(rows, found, strict=True) if answer != row.expected]
    for row, answer in wrong:
        print(f"{row.text}\n  expected {row.expected}\n  answered {answer}")
    right = len(rows) - len(wrong)
    print(
        json.dumps(
            {"dtype": arguments.dtype, "rows": len(rows), "right": right, "accuracy": right / len(rows)}
        )
    )


if __name__ == "__main__":
    main()
