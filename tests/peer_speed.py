"""Vectors of an encoder beside sentence-transformers, scores of a decoder beside lm-evaluation-harness, in turns.

    python -m tests.peer_speed encode|score --peer PYTHON [--dtype D] [--rows N] [--rounds N] [--threads N]
                                [--continuations N]

`PYTHON` is an interpreter that has the peer: sentence-transformers, whose `encode` takes 32 texts of similar length at
a time, or lm-eval with its `hf` model, 16 rows at a time. Random weights of the sizes of all-MiniLM-L6-v2 and of
SmolLM-135M, with a tokenizer of bytes. The peer's seconds are those of `encode` or `loglikelihood` alone, after a
call that is not counted. Ours are those of a whole job but for starting and loading: reading and tokenising rows,
planning, computing, publishing; and beside them those from the first step to the end of the last. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("encode", "score"))
    parser.add_argument("--peer", required=True, help="an interpreter that has the peer")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--continuations", type=int, default=4, help="of each context that is scored")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "model", Path(place) / "texts.json"
        make_model(asked.task, folder)
        texts = texts_of(asked.task, asked.rows, asked.continuations)
        file.write_text(json.dumps(texts))
        job, steps, peer = list[float](), list[float](), list[float]()
        for _ in range(asked.rounds):
            whole, engine = ours(asked.task, folder, texts, asked.dtype, asked.threads)
            job.append(whole)
            steps.append(engine)
            peer.append(theirs(asked.task, asked.peer, folder, file, asked.dtype, asked.threads))
            print(f"job {whole:.2f} s, of that steps {engine:.2f} s; peer {peer[-1]:.2f} s", file=sys.stderr)
    found = {
        name: round(statistics.median(each), 3)
        for name, each in (("job_s", job), ("steps_s", steps), ("peer_s", peer))
    }
    shares = {"job": found["job_s"] / found["peer_s"], "steps": found["steps_s"] / found["peer_s"]}
    print(json.dumps({**vars(asked), **found, **{name: round(share, 3) for name, share in shares.items()}}))


if __name__ == "__main__":
    main()
