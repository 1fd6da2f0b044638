"""A small checkpoint folder (tokenizer and chat template) and jobs over it, for the ingest tests."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from batchinfer.input.tokenizer.tokenizer import Tokenizer as LoadedTokenizer
from batchinfer.job import InputSection, Job, ModelSection, OutputSection, PromptSection, SamplingSection
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import ingest
from batchinfer.store.index.ingest_options import AskedAnswers, IngestOptions

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ("<s>", "<|im_start|>", "<|im_end|>")
_LINES = [
    "the quick brown fox jumps over the lazy dog",
    "user system assistant hello world, how are you?",
    "Grüße aus Köln, 漢字 and 🙂🙃 emoji",
    "1234567890 + 42 = ? {json: [true, false, null]}",
]


def byte_bpe(vocab: int = 400, bos: bool = False) -> Tokenizer:
    """Return a byte-level BPE. Every text has tokens, and multi-byte characters are split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIALS],
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def checkpoint(folder: Path, template: str | None = CHATML, bos: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_bpe(bos=bos).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def options(**changes: Any) -> IngestOptions:
    """Return options: one worker, 512 positions, a vocabulary of 1,000. Fields of AskedAnswers set `asked`."""
    given: dict[str, Any] = {
        "context": b"c" * 32,
        "max_model_len": 512,
        "vocab_size": 1000,
        "now": datetime(2026, 1, 2),
        "workers": 1,
    }
    asked = {one.name: changes.pop(one.name) for one in fields(AskedAnswers) if one.name in changes}
    return IngestOptions(**{**given, "asked": AskedAnswers(**asked), **changes})


def make_job(
    folder: Path,
    *,
    prompt: dict[str, Any] | None,
    columns: tuple[str, ...] = (),
    sampling: dict[str, Any] | None = None,
    on_invalid: tuple[dict[str, Any], ...] = (),
    **source: Any,
) -> Job:
    """Return a job in `folder` with its checkpoint in `folder/model`."""
    job = Job(
        name="test",
        model=ModelSection.model_construct(path=folder / "model", dtype="auto", max_model_len=None),
        input=InputSection.model_construct(**{**_INPUT, **source}),
        prompt=PromptSection(**prompt) if prompt is not None else None,
        sampling=SamplingSection(**(sampling or {})),
        on_invalid=on_invalid,
        output=OutputSection.model_construct(path=folder / "results", columns=columns, rows_per_file=100),
    )
    job.model_post_init({"source": folder / "job.yaml"})
    return job


_INPUT = {
    "path": None,
    "sql": None,
    "sql_memory": "auto",
    "format": "auto",
    "id": None,
    "unique_ids": False,
    "limit": None,
    "workers": "auto",
    "max_line_bytes": 1 << 24,
    "encoding": "utf-8",
    "delimiter": "auto",
    "quote": '"',
}


def run(job: Job, **changes: Any) -> Index:
    return ingest(
        job, LoadedTokenizer.load(job.model.path), options(**changes), job.source.parent / "scratch"
    )


def rows_of(index: Index) -> list[dict[str, Any]]:
    return [row for part in index.index_parts for row in pq.read_table(part).to_pylist()]


def carried(index: Index) -> pa.Table:
    """Return all carried columns."""
    return pa.concat_tables([pq.read_table(part) for part in index.passthrough_parts])


def prompts_of(index: Index) -> list[list[int] | None]:
    return [
        None if r["key"] is None else index.tokens.read(r["token_offset"], r["token_count"]).tolist()
        for r in rows_of(index)
    ]


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Write JSONL from objects. Bytes are written unchanged."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path
