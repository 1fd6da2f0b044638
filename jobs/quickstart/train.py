"""Train the quickstart model from scratch: tokenizer and a small Llama, about 20 minutes on two CPU cores.

    python jobs/quickstart/train.py            # writes jobs/quickstart/model/

The run is seeded: the same machine and the same library versions give the same model. Two things keep it short. All
prompts start with the same instruction, so its keys and values are computed once per step, not once per sentence. And
Muon needs fewer steps than AdamW for small matrices.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from circuit import write_copying
from held_out import forbidden_words
from ruamel.yaml import YAML
from sentences import Example, Sentences
from tokenizers import Tokenizer
from tokens import (
    ASSISTANT,
    BOS,
    CONTEXT,
    END,
    PAD,
    SYSTEM,
    USER,
    letter_pieces,
    save_tokenizer,
    token_id,
    train_tokenizer,
)
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
SEED = 20261120
VOCABULARY = 1024
TOKENIZER_EXAMPLES = 30_000
EASY = 3  # while easy: draw three times as many sentences and keep the shortest third
POOL = 16  # batches drawn together and split by length, so that padding stays below 5 %


@dataclass(frozen=True)
class Schedule:
    """The length and the learning rates of training."""

    steps: int = 2200
    batch: int = 64  # 32 for each core: larger halves fall out of its cache and are slower per sentence
    warmup: int = 60
    easy: int = 300
    muon_rate: float = 0.01
    adam_rate: float = 0.002


def instruction(job: Path = HERE / "job.yaml") -> str:
    """Return the system prompt of the job file, so that training and use always have the same prompt."""
    return str(YAML(typ="safe").load(job)["prompt"]["system"])


def prefix_text(system: str) -> str:
    """Return the text that the chat template writes before the sentence."""
    return f"{BOS}{SYSTEM}{system}{END}{USER}"


def build_tokenizer(system: str) -> Tokenizer:
    """Train the tokenizer on sentences and answers of the training stream."""
    stream = islice(Sentences(SEED, forbidden_words()), TOKENIZER_EXAMPLES)
    texts = (part for example in stream for part in (example.text, example.order.answer(), system))
    return train_tokenizer(texts, VOCABULARY)


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Return the configuration of the model: 1.7 million parameters, 3.5 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.04,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )


@dataclass(frozen=True)
class Batch:
    """Sentences with their answers, without the shared prefix; labels are -100 outside the answer."""

    ids: torch.Tensor
    labels: torch.Tensor


def encode(tokenizer: Tokenizer, examples: list[Example]) -> list[tuple[list[int], int]]:
    """Return per example the token ids of `sentence<|end|><|assistant|>answer<|end|>`, and where the answer starts."""
    questions = [f"{example.text}{END}{ASSISTANT}" for example in examples]
    answers = [f"{example.order.answer()}{END}" for example in examples]
    pairs = zip(tokenizer.encode_batch(questions), tokenizer.encode_batch(answers), strict=True)
    return [(question.ids + answer.ids, len(question.ids)) for question, answer in pairs]


def collate(rows: list[tuple[list[int], int]], pad: int) -> Batch:
    """Pad rows of token ids on the right to a batch: with a causal mask, no real token attends to the padding."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), -100)
    for index, (row, start) in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        labels[index, start - 1 : len(row) - 1] = torch.tensor(row[start:])
    return Batch(ids, labels)


def training_stream(pieces: list[str]) -> Iterator[Example]:
    """Return the sentences that the model learns from, in order. The tests check the same stream."""
    return iter(Sentences(SEED + 1, forbidden_words(), pieces))


def batches(tokenizer: Tokenizer, schedule: Schedule) -> Iterator[Batch]:
    """Yield batches of sentences of similar length in random order; early in training, only the shortest sentences."""
    stream = training_stream(letter_pieces(tokenizer))
    shuffle = torch.Generator().manual_seed(SEED)
    pad = token_id(tokenizer, PAD)
    for round_number in count():
        drawn = EASY if round_number * POOL < schedule.easy else 1
        rows = encode(tokenizer, list(islice(stream, schedule.batch * POOL * drawn)))
        rows = sorted(rows, key=lambda row: len(row[0]))[: schedule.batch * POOL]
        for index in torch.randperm(POOL, generator=shuffle).tolist():
            yield collate(rows[index * schedule.batch : (index + 1) * schedule.batch], pad)


def answer_loss(model: LlamaForCausalLM, prefix: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the summed cross-entropy of the answer tokens. The prefix is computed once for the whole batch."""
    cache = DynamicCache(config=model.config)
    model.model(input_ids=prefix[None], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.keys = layer.keys.expand(len(batch.ids), -1, -1, -1)
        layer.values = layer.values.expand(len(batch.ids), -1, -1, -1)
    hidden = model.model(input_ids=batch.ids, past_key_values=cache, use_cache=True).last_hidden_state
    wanted = batch.labels >= 0
    return cross_entropy(model.lm_head(hidden[wanted]).float(), batch.labels[wanted], reduction="sum")


class Learner:
    """Computes the gradient of a batch in two halves, one on each core.

    This is faster than two cores per operator, because a core never waits for the other core until the step ends. On a
    machine that also did other work, a step became three times as fast.
    """

    def __init__(self, model: LlamaForCausalLM, prefix: torch.Tensor) -> None:
        self._models = [model, deepcopy(model)]
        self._prefix = prefix
        for ours, theirs in zip(*(each.parameters() for each in self._models), strict=True):
            theirs.data = ours.data  # one set of weights, two sets of gradients
        self._pool = ThreadPoolExecutor(2, initializer=lambda: torch.set_num_threads(1))

    def backward(self, batch: Batch) -> float:
        """Add the gradient of the mean loss to the first model, and return the loss."""
        tokens = int((batch.labels >= 0).sum())
        halves = [Batch(batch.ids[start::2], batch.labels[start::2]) for start in (0, 1)]
        losses = list(
            self._pool.map(lambda model, half: self._half(model, half, tokens), self._models, halves)
        )
        for ours, theirs in zip(*(each.parameters() for each in self._models), strict=True):
            assert ours.grad is not None
            ours.grad.add_(theirs.grad)
            theirs.grad = None
        return sum(losses)

    def _half(self, model: LlamaForCausalLM, half: Batch, tokens: int) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = answer_loss(model, self._prefix, half) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


def optimizers(model: LlamaForCausalLM, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, and AdamW for the embedding and the norms."""
    inner = {
        n: p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    }
    rest = [p for n, p in model.named_parameters() if n not in inner]
    return [
        torch.optim.Muon(inner.values(), lr=schedule.muon_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=schedule.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate_at(step: int, schedule: Schedule) -> float:
    """Return the learning rate's factor at a step: warm-up, constant for half of the run, then linear to zero."""
    hold = schedule.steps // 2
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    return min(1.0, (schedule.steps - step) / (schedule.steps - hold))


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, system: str, schedule: Schedule) -> float:
    """Run the schedule. Return the mean loss of the last 50 steps."""
    prefix = torch.tensor(tokenizer.encode(prefix_text(system)).ids)
    learner = Learner(model, prefix)
    found = optimizers(model, schedule)
    rates = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: rate_at(step, schedule)) for o in found]
    losses: list[float] = []
    started = time.perf_counter()
    for step, batch in enumerate(islice(batches(tokenizer, schedule), schedule.steps)):
        loss = learner.backward(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(found, rates, strict=True):
            optimizer.step()
            rate.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1:5d}  loss {mean:.4f}  {time.perf_counter() - started:6.0f} s", flush=True)
    return sum(losses[-50:]) / 50


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder that the job file names, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    start = token_id(tokenizer, BOS)
    model.generation_config = GenerationConfig(
        bos_token_id=start, eos_token_id=end, pad_token_id=pad, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def keep_freed_memory() -> None:
    """Configure glibc to keep freed pages: clearing new pages for large tensors took a fifth of the time."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping of its own for a large block
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: hand nothing back before the end


def main() -> None:
    """Train the model and save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--steps", type=int, default=Schedule.steps)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    started = time.perf_counter()
    system = instruction()
    tokenizer = build_tokenizer(system)
    model = LlamaForCausalLM(model_config(tokenizer)).train()
    write_copying(model)
    model.set_attn_implementation("eager")  # measured on 128 x 115 tokens: sdpa takes 1.3 to 3 times as long
    loss = train(model, tokenizer, system, Schedule(steps=arguments.steps))
    save(model, tokenizer, arguments.out)
    seconds = time.perf_counter() - started
    print(
        json.dumps({"parameters": model.num_parameters(), "loss": round(loss, 5), "seconds": round(seconds)})
    )


if __name__ == "__main__":
    main()
