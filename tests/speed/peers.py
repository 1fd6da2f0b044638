"""Encoders beside sentence-transformers, and scores of decoders beside lm-evaluation-harness."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.speed.harness import in_turns, medians, option, rounds, section, show

ENCODE = """
import json, sys, time, torch
from sentence_transformers import SentenceTransformer
folder, texts, dtype, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model = SentenceTransformer(folder, device="cpu", model_kwargs={"torch_dtype": getattr(torch, dtype)})
texts = json.load(open(texts))
model.encode(texts[:32], batch_size=32)
began = time.perf_counter()
model.encode(texts, batch_size=32)
print(json.dumps(time.perf_counter() - began))
"""
SCORE = """
import json, sys, time, torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
folder, texts, dtype, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
model = HFLM(pretrained=folder, device="cpu", dtype=dtype, batch_size=16)
def asked(pairs):
    return [Instance("loglikelihood", {}, tuple(pair), at) for at, pair in enumerate(pairs)]
pairs = json.load(open(texts))
model.loglikelihood(asked(pairs[:16]), disable_tqdm=True)
began = time.perf_counter()
model.loglikelihood(asked(pairs), disable_tqdm=True)
print(json.dumps(time.perf_counter() - began))
"""


def make_model(task: str, folder: Path) -> None:
    """Write a checkpoint of random weights."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    from tests.checkpoints import make_tokenizer
    from tests.sentence_checkpoints import write_modules

    folder.mkdir()
    make_tokenizer(folder, None)
    if task == "encode":
        sizes = {
            "hidden_size": 384,
            "num_attention_heads": 12,
            "num_hidden_layers": 6,
            "intermediate_size": 1536,
        }
        BertModel(BertConfig(vocab_size=260, **sizes)).save_pretrained(folder)
        write_modules(folder, "mean_tokens")
        pooling = folder / "1_Pooling/config.json"
        pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"word_embedding_dimension": 384}))
        return
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    more = {"intermediate_size": 1536, "tie_word_embeddings": True, "bos_token_id": 256, "eos_token_id": 257}
    LlamaForCausalLM(LlamaConfig(vocab_size=49_152, **sizes, **more)).save_pretrained(folder)


def texts_of(task: str, rows: int, continuations: int) -> list[Any]:
    """Make texts of 80 tokens on average, up to a few hundred; or contexts of 150, each with so many continuations of
    9."""
    rng = random.Random(7)

    def text(length: int) -> str:
        return "".join(rng.choice("abcdefghij klmnop") for _ in range(length))

    if task == "encode":
        return [text(min(400, 8 + int(rng.expovariate(1 / 72)))) for _ in range(rows)]
    contexts = [text(rng.randint(75, 225)) for _ in range(rows // continuations)]
    return [[context, " " + text(8)] for context in contexts for _ in range(continuations)]


def ours(task: str, folder: Path, texts: list[Any], dtype: str, threads: int) -> tuple[float, float]:
    """Return the seconds of a job without starting and loading, and those of its engine's steps."""
    from tests.batchinfer.killed_runs import REAL
    from tests.batchinfer.pipeline.test_pipeline import run

    with tempfile.TemporaryDirectory() as place:
        job: dict[str, Any] = {
            "name": "speed",
            "model": {"path": str(folder), "dtype": dtype},
            "input": {"path": "rows.jsonl", "id": "id"},
            "engine": {"device": "cpu", "threads": threads},
            "output": {"path": "out/res"},
        }
        if task == "encode":
            job |= {"task": "embed", "prompt": {"text": "text"}}
            rows = [{"id": str(at), "text": text} for at, text in enumerate(texts)]
        else:
            job |= {"task": "score", "prompt": {"text": "text"}, "score": {"continuation": "then"}}
            rows = [{"id": str(at), "text": text, "then": then} for at, (text, then) in enumerate(texts)]
        path = Path(place) / "job.yaml"
        path.write_text(json.dumps(job))
        (path.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        outcome = run(path, REAL)
        assert outcome.exit_code == 0
        row = outcome.row
        return row["wall_s"] - row["startup_s"] - row["load_s"], row["engine_wall_s"]


def theirs(task: str, python: str, folder: Path, texts: Path, dtype: str, threads: int) -> float:
    """Return the seconds of the peer's call."""
    code = ENCODE if task == "encode" else SCORE
    said = json.dumps([str(folder), str(texts), dtype, threads])
    found = subprocess.run([python, "-c", code, said], check=True, capture_output=True, text=True)
    return float(found.stdout.strip().splitlines()[-1])


@section(
    "peers",
    option("task", choices=("encode", "score")),
    option("--peer", required=True, help="an interpreter that has the peer"),
    option("--dtype", default="float32", choices=("float32", "bfloat16")),
    option("--rows", default=256),
    option("--continuations", default=4, help="of each context that is scored"),
    option("--threads", default=2),
    rounds(3),
)
def peers(given: Namespace, place: Path) -> list[dict[str, Any]]:
    """Time vectors beside sentence-transformers, or scores beside lm-evaluation-harness.

    The peer is sentence-transformers, whose `encode` takes 32 texts of similar length at a time, or lm-eval with its
    `hf` model, 16 rows at a time. Random weights of the sizes of all-MiniLM-L6-v2 and of SmolLM-135M, with a tokenizer
    of bytes. The peer's seconds are those of `encode` or `loglikelihood` alone, after a call that is not counted. Ours
    are those of a whole job but for starting and loading, and those from the first step to the end of the last.
    """
    folder, file = place / "model", place / "texts.json"
    make_model(given.task, folder)
    texts = texts_of(given.task, given.rows, given.continuations)
    file.write_text(json.dumps(texts))

    def pair(_: int) -> dict[str, float]:
        job_s, steps_s = ours(given.task, folder, texts, given.dtype, given.threads)
        peer_s = theirs(given.task, given.peer, folder, file, given.dtype, given.threads)
        return {"job_s": job_s, "steps_s": steps_s, "peer_s": peer_s}

    found = medians(in_turns({given.task: pair}, given.rounds)[given.task])
    shares = {name: round(found[f"{name}_s"] / found["peer_s"], 3) for name in ("job", "steps")}
    show([found | shares])
    return [found | shares]
