"""How steps of a simulated engine are launched."""

from __future__ import annotations

from batchinfer.engine.tensors.graph_sizes import SHORTEST
from batchinfer.plan.simulation.clock import Captures, Launching


def chunks(rows: int, start: int, length: int = 1) -> tuple[list[int], list[int]]:
    """The starts and lengths of a step's chunks."""
    return [start] * rows, [length] * rows


def test_steps_that_read_prompts_are_replayed_in_pieces_up_to_a_size():
    launching = Launching(Captures(rows=8, longest=5000, tokens=64))
    assert launching.mode(*chunks(4, 0, 16), decodes=False, shares=False) == "piecewise_graph"
    assert launching.mode(*chunks(4, 0, 17), decodes=False, shares=False) == "eager"
    assert launching.mode(*chunks(4, 9), decodes=False, shares=True) == "piecewise_graph", (
        "something is copied"
    )


def test_decode_steps_are_replayed_as_one_graph_up_to_a_size():
    launching = Launching(Captures(rows=8, longest=500, tokens=0))  # no step is captured in pieces
    found = [launching.mode(*chunks(*step), True, False) for step in ((8, 9), (9, 9), (8, 499), (8, 500))]
    assert found == ["full_graph", "eager", "full_graph", "eager"]


def test_kinds_that_the_warm_up_leaves_out_are_captured_when_they_come_for_the_third_time():
    launching = Launching(Captures(rows=8, longest=5000, tokens=64))
    kinds = [(chunks(3, 9), True), (chunks(3, SHORTEST), False), (chunks(5, SHORTEST), False)]
    found = [[launching.mode(*step, True, shares) for step, shares in kinds] for _ in range(4)]
    assert found == [["piecewise_graph"] * 3] * 2 + [["full_graph"] * 3] * 2
    assert launching.mode(*chunks(4, SHORTEST + 7), True, False) == "full_graph", (
        "three rows take the graph of four"
    )


def test_without_captures_all_is_launched_by_operators():
    launching = Launching(Captures(0, 0, 0))
    assert {launching.mode(*chunks(2, 9), decodes, False) for decodes in (True, False)} == {"eager"}
