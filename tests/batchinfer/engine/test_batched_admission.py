"""When places that have come free are filled."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.schedule.batched_admission import IDLE, AdmissionCosts, BatchedAdmission
from batchinfer.engine.schedule.budget import admission_costs
from batchinfer_kernels.cost import Peaks
from tests.model_costs import llama_cost

COSTS = AdmissionCosts(5e-3, 1e-3, 1e-6, 2e-3, 1e-5, 1e-8)
MODEL = llama_cost(16, 2048, 8192, 32, 8, 64, 128_256, 2, 2)


def steps_until_filled(
    costs: AdmissionCosts, every: int, prompt: int, places: int = 100, read: int = 0, at_once: int = 1
) -> int:
    """A sequence ends in every so many steps; how many have passed when the first place is filled."""
    admission = BatchedAdmission(costs)
    admission.stop(places)
    admission.read, admission.steps = read, at_once
    for step in range(1, 10 * places * every):
        admission.ended += step % every == 0
        if not admission.waits(places - admission.ended, 1000, 0, 8192, lambda n: n * prompt):
            return step
    raise AssertionError("places stay empty")


def test_places_are_filled_when_waiting_has_wasted_as_much_as_filling_them_would():
    """Each step wastes 2 ms times the share of the places that are free: 1, 3, 6, … % of 2 ms. Filling them takes the
    host 6.1 ms; the device works 2 ms of it in the step itself, and 0.9 ms longer than the host in the one before."""
    filled = steps_until_filled(COSTS, every=1, prompt=0)
    wasted = [2e-3 * sum(range(1, steps + 1)) / 100 for steps in (filled - 1, filled)]
    assert wasted[0] < 3.2e-3 <= wasted[1] < 3.6e-3
    assert steps_until_filled(replace(COSTS, launch_s=2e-3), 1, 0) < filled
    assert steps_until_filled(COSTS, every=1, prompt=20) < filled, "prompts hide a part of launching them"


def test_steps_that_are_launched_at_once_waste_as_much_each():
    """Here a sequence ends with each launch."""
    single, four = (steps_until_filled(COSTS, every=1, prompt=0, at_once=steps) for steps in (1, 4))
    assert single / 2 <= four < single / 2 + 1, "the waste grows with the square of launches"


def test_prompts_that_keep_the_device_busy_do_not_wait():
    assert steps_until_filled(COSTS, every=1, prompt=1000) == 1
    assert steps_until_filled(COSTS, every=7, prompt=1000) == 7
    assert steps_until_filled(COSTS, every=1, prompt=300, read=1000) == 1, "nor those behind other prompts"


def test_without_peaks_only_what_the_host_takes_counts():
    unknown = admission_costs(MODEL, None)
    assert (unknown.weights_s, unknown.token_s, unknown.kv_token_s) == (0, 0, 0)
    known = admission_costs(MODEL, Peaks(760e12, 3e12))
    assert unknown.launch_s == known.launch_s < admission_costs(MODEL, None, pieces=False).launch_s
    assert steps_until_filled(unknown, 1, 300) >= steps_until_filled(known, 1, 300)


@given(st.integers(1, 300), st.integers(0, 400), st.integers(1, 400), st.integers(0, 300))
def test_a_fifth_of_the_places_and_all_that_waits_are_never_held_back(places, ended, waiting, prompt):
    admission = BatchedAdmission(replace(COSTS, launch_s=1e9))
    admission.stop(places)
    admission.ended = min(ended, places)
    held = admission.waits(places - admission.ended, waiting, 0, 1 << 30, lambda n: n * prompt)
    full = admission.ended >= min(places // IDLE, waiting) or admission.ended == places
    assert held == (not full)
    assert not BatchedAdmission(None).waits(places, waiting, 0, 10, lambda n: n), (
        "a CPU fills each place at once"
    )
