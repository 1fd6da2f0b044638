"""Keys that results depend on, next to the borders of kernels' parts.

A needle has about half of the weight of one query of one KV head. A kernel that skips or repeats a key at the
border of a tile, a block or a segment is far off in that row and head. A trap is a key that a query may not
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_plan import LaunchPlan
from tests.gpu_suite.paged import CODE_SCALE, Paged

UNITS = (16, 32, 64, 128, 1024)  # sizes of blocks, tiles and segments, in keys
TRAP = 3.0  # multiple of a needle's score: it outweighs all other keys
# Variance of random keys by dtype of the cache; for int8 the variance of integers up to 127
SPREAD = {torch.int8: (127 * CODE_SCALE["int8"]) ** 2 / 3}


@dataclass(frozen=True, slots=True)
class Needle:
    """A key of a sequence and a KV head, made for the query in row `reader` of q."""

    sequence: int
    head: int
    position: int
    reader: int
    times: float = 1.0  # multiple of the score that gets half of the weight


def borders(context: int, splits: Iterable[int] = ()) -> list[int]:
    """Return the first and last key, and keys on both sides of each split and of each unit's first and last end."""
    ends = {context, *splits}
    for unit in UNITS:
        ends |= {unit, context // unit * unit}
    beside = {0} | {at for end in ends for at in (end - 1, end)}
    return sorted(at for at in beside if 0 <= at < context)


def for_decode(paged: Paged, plan: LaunchPlan) -> list[Needle]:
    """Return a needle per sequence and KV head, each at another border, also at borders between programs.

    A block with room after the last key gets a trap.
    """
    splits, found = _splits(plan), []
    for sequence, context in enumerate(paged.contexts):
        places = borders(context, splits.get(sequence, ()))
        for head in range(paged.heads.kv):
            at = places[(sequence * paged.heads.kv + head) % len(places)]
            found.append(Needle(sequence, head, at, sequence))
        if context % paged.heads.block:
            found += [Needle(sequence, head, context, sequence, TRAP) for head in range(paged.heads.kv)]
    return found


def _splits(plan: LaunchPlan) -> dict[int, list[int]]:
    """Return for each row the positions at which programs start."""
    found: dict[int, list[int]] = {}
    for row, first, *_ in plan.splits_of(None).items.tolist():
        if row >= 0:
            found.setdefault(row, []).append(int(plan.starts[row]) + first)
    if plan.prefixes is not None:
        members = plan.prefixes.members.tolist()
        for first_member, count, _, first, *_ in plan.prefixes.items.tolist():
            for row in members[first_member : first_member + count]:
                found.setdefault(row, []).append(first)
    return found


def for_prefill(paged: Paged, queries: int) -> list[Needle]:
    """Return needles at borders, one per border and KV head, or traps.

    A needle is for the query at the border, the query after it, or the last one. A trap is for the query
    right before it.
    """
    found = []
    for sequence, context in enumerate(paged.contexts):
        begin, last = context - queries, context - 1

        def row(position: int, sequence: int = sequence, begin: int = begin) -> int:
            return sequence * queries + position - begin

        for number, at in enumerate(borders(context, (begin,))):
            for head in range(paged.heads.kv):
                first = max(at, begin)
                readers = (first, min(first + 1, last), last)
                which = (number + head) % 4
                if which < len(readers):
                    found.append(Needle(sequence, head, at, row(readers[which])))
                elif at > begin:
                    found.append(Needle(sequence, head, at, row(at - 1), TRAP))
    return found


def plant(paged: Paged, q: Tensor, needles: Sequence[Needle]) -> None:
    """Write needles into the cache. If two have one slot, as in shared blocks, the last one wins."""
    heads, table = paged.heads, paged.table.cpu()
    placed: Mapping[tuple[int, int, int], Needle] = {
        (int(table[n.sequence, n.position // heads.block]), n.head, n.position % heads.block): n
        for n in needles
    }
    device = paged.k.device
    block, head, offset = torch.tensor(list(placed), device=device).unbind(1)
    readers = torch.tensor([n.reader for n in placed.values()], device=device)
    # (n, dim): the sum of its readers
    grouped = q.float().view(len(q), heads.kv, -1, heads.dim)[readers, head].sum(1)
    spread = SPREAD.get(paged.k.dtype, 1.0)
    scores = [n.times * (math.log(paged.contexts[n.sequence]) + spread / 2) for n in placed.values()]
    # A query of normal numbers, times itself and the scale, gives the root of its length
    sizes = torch.tensor(scores, device=device) / math.sqrt(heads.dim)
    keys = grouped * sizes[:, None]
    if paged.scale is not None:
        keys = keys / paged.scale[block, head, offset][:, None]
    paged.k[block, head, offset] = _coded(keys, paged)


def _coded(keys: Tensor, paged: Paged) -> Tensor:
    return (keys.round().clamp(-127, 127) if paged.k.dtype == torch.int8 else keys).to(paged.k.dtype)
