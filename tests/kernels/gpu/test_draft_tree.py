"""Compares the kernels that find and move the right nodes of draft trees with their references."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.draft_tree import NO_PARENT, move_slots_reference, tree_paths_reference
from batchinfer_kernels.gpu.draft_tree import move_slots, tree_paths
from tests.kernels.refused import assert_refused
from tests.kernels.test_copy_parts import equal
from tests.kernels.trees import random_parents

NO_TOKEN = -1  # where logits are no numbers
# Blocks, heads, block size, values of a head: of K and V, of their scales, of a head's states
SHAPES = [(20, 2, 8, 12), (20, 2, 8, 1), (23, 1, 8, 300)]


def trees(seed: int, count: int, places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (tokens, firsts, drafts, parents); many parents have one right child, and other sequences' rows
    are between."""
    rng = random.Random(seed)
    tokens, firsts = [], []
    drafts, parents = torch.full((count, places), -1), torch.full((count, places), NO_PARENT)
    for tree in range(count):
        nodes = rng.randint(1, places)
        own = random_parents(rng, nodes)
        if rng.random() < 0.3:
            own = [at - 1 for at in range(nodes)]
        parents[tree, :nodes] = torch.tensor(own)
        drafts[tree, :nodes] = torch.tensor(rng.sample(range(50), nodes))
        tokens += [rng.randrange(50) for _ in range(rng.randrange(3))]
        firsts.append(len(tokens))
        for node in range(-1, nodes):
            children = [int(drafts[tree, at]) for at, parent in enumerate(own) if parent == node]
            kind = rng.random()
            right = rng.choice(children) if children else int(drafts[tree, 0])
            tokens.append(right if kind < 0.85 else NO_TOKEN if kind < 0.9 else 60)
    return torch.tensor(tokens), torch.tensor(firsts), drafts, parents


@pytest.mark.parametrize(("count", "places"), [(9, 8), (40, 5), (3, 32), (6, 1)])
def test_right_nodes_are_found(count: int, places: int, device: str) -> None:
    given = trees(places, count, places)
    wanted = tree_paths_reference(*given)
    tokens, firsts, *_ = (tensor.to(device) for tensor in given)
    rows, order = firsts + 2, torch.arange(len(tokens) + 2, device=device)
    found = tree_paths(*(tensor.to(device) for tensor in given), rows, order)
    assert torch.equal(found.cpu(), wanted)
    assert torch.equal(tree_paths(*(tensor.to(device) for tensor in given)).cpu(), wanted)
    assert wanted.max() > 0 or places == 1
    expected = torch.arange(len(order))
    for first, path in zip(given[1].tolist(), wanted.tolist(), strict=True):
        for depth, node in enumerate(path):
            if node >= 0:
                expected[first + 3 + depth] = first + 3 + node
    assert torch.equal(order.cpu(), expected)


def test_a_path_ends_at_the_first_token_without_a_node(device: str) -> None:
    """A path may end with the token of another node, or with the token of a slot without a node."""
    drafts = torch.tensor([[4, 5, 6, -1], [4, 5, 6, -1]], device=device)
    parents = torch.tensor([[-1, -1, 1, NO_PARENT], [-1, 0, 1, NO_PARENT]], device=device)
    tokens = torch.tensor([5, 9, 6, 4, 4, 5, -1, -1], device=device)
    found = tree_paths(tokens, torch.tensor([0, 4], device=device), drafts, parents)
    assert found.tolist() == [[1, 2, -1, -1], [0, 1, -1, -1]]


def path_moves(slots: Tensor, paths: Tensor) -> Tensor:
    """Return the moves that bring accepted nodes to the slots of a chain, [n, 2], for `move_slots_reference`."""
    moves = (paths >= 0) & (paths != torch.arange(paths.shape[1]))
    sources = slots.gather(1, paths.clamp_min(0).long())
    return torch.stack((sources[moves], slots[moves]), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_right_nodes_are_moved_in_all_caches_and_nothing_else(dtype: Any, device: str) -> None:
    """In layers with different heads, and with any bits."""
    places, count = 8, 12
    given = trees(5, count, places)
    paths, generator = tree_paths_reference(*given), torch.Generator().manual_seed(3)
    slots = torch.randperm(160, generator=generator)[: count * places].view(count, places)
    caches = [
        torch.randint(256, (*shape[:3], shape[3] * dtype.itemsize), generator=generator).to(torch.uint8)
        for shape in (*SHAPES, SHAPES[0])
    ]
    wanted = [cache.clone() for cache in caches]
    for cache in wanted:
        move_slots_reference(cache, cache, path_moves(slots, paths))
    own = [cache.to(device, copy=True).view(dtype) for cache in caches]
    move_slots(own, slots.to(device), paths.to(device))
    for got, one, before in zip(own, wanted, caches, strict=True):
        assert equal(got.cpu(), one)
        assert not torch.equal(one, before)


def test_nothing_is_moved_without_trees(device: str) -> None:
    cache = torch.ones(2, 1, 4, 8, device=device)
    none = torch.zeros(0, 4, dtype=torch.int64, device=device)
    found = tree_paths(torch.zeros(0, dtype=torch.int64, device=device), none[:, 0], none, none)
    move_slots([cache], none, found)
    assert found.shape == (0, 4)
    assert bool((cache == 1).all())


def test_wrong_operands_are_refused() -> None:
    tokens, firsts, drafts, parents = trees(1, 2, 4)
    for wrong in (
        (tokens, firsts[:1], drafts, parents),
        (tokens.int(), firsts, drafts, parents),
        (tokens, firsts, drafts, parents[:, :2]),
    ):
        for find in (tree_paths, tree_paths_reference):
            assert_refused(r"tokens are|parents are", find, *wrong)
    assert_refused("given together", tree_paths, tokens, firsts, drafts, parents, order=tokens)
    paths, cache = tree_paths_reference(tokens, firsts, drafts, parents), torch.zeros(4, 2, 4, 16)
    assert_refused("slots are", move_slots, [cache], drafts[:1], paths)
    assert_refused("contiguous", move_slots, [cache[..., ::2]], drafts, paths)
