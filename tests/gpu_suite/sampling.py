"""Sampling from the logits of a batch: greedy, with every filter, and log-probabilities, at Llama 3's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.cost import log_probabilities_cost, penalise_cost, sample_cost
from batchinfer_kernels.gpu.log_probabilities import log_probabilities
from batchinfer_kernels.gpu.penalties import penalise
from batchinfer_kernels.gpu.sample import sample
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.penalties import Penalties, penalise_reference
from batchinfer_kernels.sample import RowSampling, sample_reference
from tests.gpu_suite.case import Case, different, distance, part
from tests.suite.section import BenchSection, Part

ROWS, VOCAB = 256, 128_256
TINY_ROWS, TINY_VOCAB = 3, 300
SPREAD = 3.0  # standard deviation of logits: some hundred tokens have 95% of the mass
MOST = 5  # log-probabilities per row
SAID = 512  # tokens of a prompt and answer that are penalised
# Share of rows whose token may differ from the reference: float32 sums round differently at the edge of a filter
TOLERATED_ROWS = 0.02
FILTERS: dict[str, tuple[float, int, float, float]] = {  # temperature, top-k, top-p, min-p
    "temperature": (0.8, 0, 1.0, 0.0),
    "top-p 0.95": (0.8, 0, 0.95, 0.0),
    "top-k 50, top-p 0.95": (0.8, 50, 0.95, 0.0),
    "min-p 0.05": (0.8, 0, 1.0, 0.05),
}


def parts(section: BenchSection) -> list[Part]:
    """Return a part per case."""
    filtered = [part(section, filtered_case, name) for name in FILTERS]
    others = [part(section, make) for make in (log_probabilities_case, penalties_case)]
    return [part(section, greedy_case), *filtered, *others]


def greedy_case(section: BenchSection) -> Case:
    logits = _logits(section)
    theirs = partial(torch.argmax, logits, -1)
    rows, vocab = logits.shape
    return Case(
        "sampling",
        f"greedy, {rows} × {vocab}",
        sample_cost(rows, vocab, logits.element_size(), 0),
        partial(sample, logits),
        theirs,
        {"torch": theirs},
        different,
        0.0,
        "float32",
    )


def filtered_case(section: BenchSection, name: str) -> Case:
    """Return a case compared with torch, which sorts.

    Torch draws other tokens; answers are checked with the reference.
    """
    logits = _logits(section)
    (rows, vocab), sampling = logits.shape, _sampling(logits, *FILTERS[name])
    return Case(
        "sampling",
        f"{name}, {rows} × {vocab}",
        sample_cost(rows, vocab, logits.element_size(), rows),
        partial(sample, logits, sampling),
        partial(sample_reference, logits, sampling),
        {"torch": partial(_sorted_sample, logits, *FILTERS[name])},
        different,
        TOLERATED_ROWS,
        "float32",
    )


def log_probabilities_case(section: BenchSection) -> Case:
    logits = _logits(section)
    (rows, vocab), chosen = logits.shape, logits.argmax(-1)

    def theirs() -> tuple[Tensor, Tensor]:
        found = logits.log_softmax(-1)
        return found.gather(1, chosen[:, None]), found.topk(MOST, -1).values

    return Case(
        "log-probabilities",
        f"{rows} × {vocab}, top {MOST}",
        log_probabilities_cost(rows, vocab, MOST, logits.element_size()),
        partial(log_probabilities, logits, chosen, MOST),
        partial(log_probabilities_reference, logits, chosen, MOST),
        {"torch": theirs},
        lambda ours, right: distance(ours[:2], right[:2]),
        1e-5,
        "float32",
    )


def penalties_case(section: BenchSection) -> Case:
    """Return an in-place case. Repetition lowers the logits further, at the same cost."""
    logits = _logits(section)
    rows, said = len(logits), min(SAID, logits.shape[1] // 4)
    penalties, right = _penalties(logits, said), logits.clone()
    counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    return Case(
        "penalties",
        f"{rows} × {said} tokens",
        penalise_cost(rows * said, rows * said, rows * said // 2, logits.element_size()),
        partial(penalise, logits, penalties, counts),
        partial(penalise_reference, right, penalties),
        off=lambda _, __: distance(logits, right),
        tolerance=1e-6,
        dtype="float32",
    )


def _logits(section: BenchSection) -> Tensor:
    rows, vocab = (TINY_ROWS, TINY_VOCAB) if section.rehearsal else (ROWS, VOCAB)
    generator = torch.Generator(section.device).manual_seed(0)
    return torch.randn(rows, vocab, generator=generator, device=section.device) * SPREAD


def _sampling(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> RowSampling:
    rows, place = len(logits), logits.device
    words = torch.randint(-(2**31), 2**31, (rows, 4), dtype=torch.int64, device=place).to(torch.int32)
    return RowSampling(
        torch.full((rows,), temperature, device=place),
        torch.full((rows,), top_k, dtype=torch.int32, device=place),
        torch.full((rows,), top_p, dtype=torch.float64, device=place),
        torch.full((rows,), min_p, dtype=torch.float64, device=place),
        words,
        torch.arange(rows, dtype=torch.int32, device=place),
    )


def _penalties(logits: Tensor, said: int) -> Penalties:
    """Return penalties for `said` distinct tokens per row, the second half as its answer."""
    (rows, vocab), place = logits.shape, logits.device
    row = torch.arange(rows, device=place)
    # 97: a prime, no factor of vocab
    tokens = (row[:, None] * 37 + torch.arange(said, device=place) * 97) % vocab
    lengths = torch.full((rows,), said, dtype=torch.int32, device=place)
    repetition, presence, frequency = (torch.full((rows,), x, device=place) for x in (1.05, 0.1, 0.1))
    return Penalties(
        rows=row.to(torch.int32),
        tokens=tokens.flatten().to(torch.int32),
        starts=row * said,
        prompt_lens=lengths // 2,
        lengths=lengths,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        banned=torch.full((rows, 1), -1, dtype=torch.int32, device=place),
    )


def _sorted_sample(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Sample as usual in torch: sort if a filter needs it, cumulate, mask, and draw with an exponential race, which
    does not synchronise the device.
    """
    probabilities = (logits / temperature).softmax(-1)
    if top_k > 0 or top_p < 1.0:
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before > top_p, 0.0)
        if top_k > 0:
            ordered[:, top_k:] = 0.0
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    if min_p > 0:
        least = probabilities.amax(-1, keepdim=True) * min_p
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return (probabilities / torch.empty_like(probabilities).exponential_(1.0)).argmax(-1)
