"""Attention of draft trees, and moving accepted tokens: each path equals a separate text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.paged_attention import grouped_attention
from batchinfer_kernels.draft_tree import MAX_NODES, move_slots_reference
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.examples import examples
from tests.kernels.cpu_cache import codes_laid_out, laid_out, plain
from tests.kernels.cpu_kit import DTYPES, TOLERANCE, operators
from tests.kernels.cpu_steps import poisoned_step, tree_step
from tests.kernels.refused import assert_refused
from tests.kernels.test_copy_parts import SHAPES, caches, equal
from tests.kernels.test_cpu_attention import KINDS
from tests.kernels.trees import mask_of, path, random_trees


@given(
    seed=st.integers(0, 2**16),
    group=st.sampled_from([1, 3]),
    block_size=st.sampled_from([1, 4, 16, 21]),
    soft_cap=st.sampled_from([None, 0.5]),
    sunk=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 34), st.integers(0, 90)), min_size=1, max_size=4),
)
@settings(max_examples=examples(25, 200), deadline=None)
def test_each_path_equals_a_separate_text(seed, group, block_size, soft_cap, sunk, lengths):
    """In the reference, a node's keys are the text before the tree, then its path."""
    step = poisoned_step(seed, 2 * group, 2, 20, block_size, [(n, n + before) for n, before in lengths])
    trees = random_trees(step, seed)
    rules = {"soft_cap": soft_cap, "sinks": torch.randn(2 * group) if sunk else None}
    got, end = step.reference(tree=mask_of(step, trees), **rules), 0
    for row, ((queries, context), parents) in enumerate(zip(step.chunks, trees, strict=True)):
        end += queries
        root = context - len(parents) - 1
        for node in range(len(parents)):
            places = [*range(root + 1), *(root + 1 + at for at in path(parents, node))]
            slots = step.table[row].long().repeat_interleave(block_size) * block_size
            slots = (slots + torch.arange(len(slots)) % block_size)[places]
            k, v = (
                cache[slots // block_size, :, slots % block_size].transpose(0, 1)[None]
                for cache in (step.k, step.v)
            )
            query = step.q[end - len(parents) + node][None]
            table = torch.zeros(1, 1, dtype=torch.int32)
            wanted = paged_attention_reference(
                query, k, v, table, [1], [len(places)], ScoreRules(0.3, **rules)
            )
            torch.testing.assert_close(got[end - len(parents) + node], wanted[0])


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([1, 3, 7, 16]),
    dim=st.sampled_from([20, 64, 96]),
    block_size=st.sampled_from([1, 4, 16, 21, 100]),
    soft_cap=st.sampled_from([None, 0.5]),
    sunk=st.booleans(),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6),
)
@settings(max_examples=examples(15, 300), deadline=None)
def test_compiled_and_grouped_trees_equal_the_reference(
    seed, kind, group, dim, block_size, soft_cap, sunk, lengths
):
    way, dtype, codes = kind
    chunks = [(queries, queries + before) for queries, before in lengths]
    step = poisoned_step(seed, 2 * group, 2, dim, block_size, chunks).to(dtype, codes)
    tree = mask_of(step, random_trees(step, seed))
    rules = {"soft_cap": soft_cap, "sinks": torch.randn(2 * group) if sunk else None}
    wanted = step.reference(tree=tree, **rules)
    torch.testing.assert_close(
        step.attend(operators(way, codes), tree=tree, **rules), wanted, **TOLERANCE[dtype]
    )
    if not codes:
        groups = step.groups(tree=tree)
        grouped = grouped_attention(step.q, step.k, step.v, groups, ScoreRules(0.3, **rules))
        torch.testing.assert_close(grouped, wanted, **TOLERANCE[dtype])


@given(
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(KINDS),
    block_size=st.sampled_from([16, 5]),
    children=st.integers(2, 5),
    depths=st.lists(st.integers(1, 12), min_size=1, max_size=2),
)
@settings(max_examples=examples(10, 80), deadline=None)
def test_trees_after_shared_prefixes_change_no_bit(seed, kind, block_size, children, depths):
    way, dtype, codes = kind
    step = tree_step(seed, 2, 3, 64, block_size, children, depths, 2, (1, 7, 4)).to(dtype, codes)
    tree = mask_of(step, random_trees(step, seed, 4))
    together = step.attend(operators(way, codes), tree=tree)
    assert torch.equal(together, step.attend(operators(way, codes), share=False, tree=tree))
    torch.testing.assert_close(together, step.reference(tree=tree), **TOLERANCE[dtype])


@pytest.mark.parametrize(("way", "dtype", "codes"), KINDS)
def test_a_chain_has_the_bits_that_it_has_without_a_mask(way, dtype, codes):
    step = poisoned_step(3, 6, 2, 64, 16, [(9, 90), (32, 140), (1, 70), (33, 33)]).to(dtype, codes)
    chains = mask_of(step, [list(range(-1, min(queries, MAX_NODES) - 2)) for queries in step.queries])
    assert torch.equal(step.attend(operators(way, codes)), step.attend(operators(way, codes), tree=chains))


def test_what_a_node_does_not_see_may_be_no_number():
    step = poisoned_step(4, 6, 2, 64, 16, [(6, 90)])
    tree, wanted = mask_of(step, [[-1, -1, 0, 1, 2]]), None
    wanted = step.attend(operators("none"), tree=tree)
    k = step.k.clone()
    k[step.table[0, 86 // 16], :, 86 % 16] = float("nan")  # node 1, which its child sees, node 3
    got = replace(step, k=k).attend(operators("none"), tree=tree)
    assert got[[2, 4]].isnan().all()
    assert torch.equal(got[[0, 1, 3, 5]], wanted[[0, 1, 3, 5]])


@given(
    st.integers(0, 2**16), st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4)
)
def test_visible_keys_follow_from_the_distance(seed: int, lengths: list[tuple[int, int]]) -> None:
    """For each query, by the distance of keys before it, in any part of a step."""
    step = poisoned_step(seed, 1, 1, 1, 4, [(n, n + before) for n, before in lengths])
    mask, first = mask_of(step, random_trees(step, seed)), 0
    for queries, context in step.chunks:
        seen, part = mask.seen(first, first + queries, context), mask.part(first, first + queries)
        words = mask.nearby[first : first + queries] if part is None else part.nearby
        for query, word in enumerate(words.tolist()):
            own = context - queries + query
            assert part is not None or word == -1
            assert seen[query].tolist() == [
                key <= own and (own - key > 31 or bool(word >> own - key & 1)) for key in range(context)
            ]
        first += queries


def some_moves(blocks: int, size: int, seed: int) -> list[tuple[int, int]]:
    """Return moves to the left in order, as paths need them."""
    rng, moves = random.Random(seed), []
    for first in range(0, blocks * size - 9, 9):
        kept = sorted(rng.sample(range(first, first + 9), rng.randint(0, 5)))
        moves += [(source, first + at) for at, source in enumerate(kept) if source != first + at]
    return moves


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slots_are_moved_and_no_others(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    moves = torch.tensor(some_moves(12, shape[1], seed=shape[2]), dtype=torch.int64)
    k, v = caches(shape, dtype)
    wanted = [cache.clone() for cache in (k, v)]
    for source, target in moves.tolist():
        for cache in wanted:
            at, to = divmod(source, shape[1]), divmod(target, shape[1])
            cache[to[0], :, to[1]] = cache[at[0], :, at[1]]
    compiled = CompiledOperators()
    laid = laid_out(compiled, k, v)
    compiled.move_slots(*laid, shape[1], moves)
    for found in ((move_slots_reference(k, v, moves), k, v)[1:], plain(*laid, *shape[1:])):
        assert all(equal(a.contiguous(), b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_codes_keep_their_scales(dtype: torch.dtype) -> None:
    """A step with moved tokens attends like a step whose tokens were there from the start."""
    step = poisoned_step(7, 6, 2, 64, 16, [(1, 40)]).to(dtype, True)
    compiled = operators("none", True)
    k, v, scales = codes_laid_out(compiled, step.k, step.v, step.scales, step.q.element_size())
    blocks = step.table[0].tolist()
    moves = torch.tensor([(blocks[38 // 16] * 16 + 38 % 16, blocks[1] * 16 + 3)])
    compiled.move_slots(k, v, 16, moves, scales, dtype)
    for own in (step.k, step.v, *step.scales):
        as_bytes = own.view(torch.uint8) if own.dim() == 4 else own[..., None]
        move_slots_reference(as_bytes, as_bytes, moves)
    wanted = codes_laid_out(compiled, step.k, step.v, step.scales, step.q.element_size())
    for got, one in zip((k, v, *scales), (wanted[0], wanted[1], *wanted[2]), strict=True):
        used = got[step.table[0, :2].long()], one[step.table[0, :2].long()]
        assert equal(*(part.contiguous() for part in used))


def test_moves_that_do_not_fit_are_refused() -> None:
    k, v = caches(SHAPES[2], torch.float32)
    for moves in (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)):
        assert_refused("moves are", move_slots_reference, k, v, moves)
    assert_refused("caches are", move_slots_reference, k, v[:3], torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not match a block size of 99"):
        CompiledOperators().move_slots(k, v, 99, torch.zeros(1, 2, dtype=torch.int64))
