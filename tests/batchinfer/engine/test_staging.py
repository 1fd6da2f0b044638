"""Copies to the device, in one transfer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchinfer.engine.tensors.staging import Download, Upload, upload

CPU = torch.device("cpu")
ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.array([[1.5, 2.5]], np.float32),
    np.empty((0, 3), np.int32),
    np.array([7], np.int32),
    np.arange(12).reshape(3, 4).T.astype(np.float64)[::2],
]


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


def test_values_come_back():
    tensors = torch.tensor([3, -1]), torch.tensor([[0.5], [2.0]])
    assert [array.tolist() for array in Download(*tensors).arrays()] == [[3, -1], [[0.5], [2.0]]]
