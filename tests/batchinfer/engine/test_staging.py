"""Tests copies to the device in one transfer, and tokens that only the device knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.runner.sampled import DeviceTokens
from batchinfer.engine.schedule.sampling_writer import awaited_from, indices_of
from batchinfer.engine.tensors.staging import Download, Upload, upload
from tests.batchinfer.engine.driver import sequence

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.array([[1.5, 2.5]], np.float32),
    np.empty((0, 3), np.int32),
    np.array([7], np.int32),
    np.arange(12).reshape(3, 4).T.astype(np.float64)[::2],
]
SEQUENCES = [sequence([1, 2], 3, key) for key in range(12)]
ONE, TWO, THREE = SEQUENCES[:3]


def test_values_shapes_and_types_arrive():
    for array, tensor in zip(ARRAYS, upload(ARRAYS, CPU), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.is_contiguous()


def test_the_arrays_may_change_at_once():
    array = np.array([1, 2])
    (tensor,) = upload([array], CPU)
    array[:] = 9
    assert tensor.tolist() == [1, 2]


def test_a_refill_changes_the_tensors_that_there_are():
    made = Upload(ARRAYS, CPU)
    first = made.tensors[0]
    made.refill([ARRAYS[0] + 10, *ARRAYS[1:]])
    assert first.tolist() == [10, 11, 12, 13, 14]
    assert made.tensors[3].tolist() == [7]
    with pytest.raises(ValueError, match="do not fit"):
        made.refill([ARRAYS[0][:4], *ARRAYS[1:]])
    with pytest.raises(ValueError, match="do not fit"):
        made.refill([ARRAYS[0].astype(np.int32), *ARRAYS[1:]])


def test_downloaded_values_are_unchanged():
    tensors = torch.tensor([3, -1]), torch.tensor([[0.5], [2.0]])
    assert [array.tolist() for array in Download(*tensors).arrays()] == [[3, -1], [[0.5], [2.0]]]


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [([ONE, TWO, THREE], [7, 0, 9]), ([THREE, ONE], [9, 7]), ([ONE, THREE], [7, 9]), ([TWO], [0])],
)
def test_each_row_gets_its_sampled_token(asked, tokens):
    """0 if there is no sampled token: the sequence's further tokens are dropped."""
    device_tokens = DeviceTokens(torch.tensor([7, -1, 9]))
    assert device_tokens.of(awaited_from(asked, [ONE, TWO, THREE]), CPU).tolist() == tokens
    assert device_tokens.of(None, CPU).tolist() == [7, 0, 9]


def test_a_sequence_that_the_step_did_not_run_is_an_error():
    with pytest.raises(AssertionError, match="did not run it"):
        awaited_from([TWO], [ONE])


@given(st.data())
def test_each_row_is_found_at_its_old_position(data):
    """Compares with a dict after any changes."""
    before = data.draw(st.lists(st.sampled_from(SEQUENCES), unique_by=id))
    stay = [s for s in before if data.draw(st.booleans())]
    new = [s for s in SEQUENCES if s not in before and data.draw(st.booleans())]
    now = [*stay, *new]
    if data.draw(st.booleans()):
        now = data.draw(st.permutations(now))
    assert indices_of(now, before) == [before.index(s) if s in before else -1 for s in now]
