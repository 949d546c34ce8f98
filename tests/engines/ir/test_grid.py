"""Dequantised weights give back the integers and scales that they were made of."""
from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from infer_server.engines.ir.grid import block_params, grid_params

Floats = NDArray[np.float32]


def made(axis: int, scales: int, seed: int = 0, largest: int = 127) -> tuple[Floats, Floats, NDArray[np.int8]]:
    """Return float weights [8, 5, 3, 3], and the scales and integers that they are made of."""
    random = np.random.default_rng(seed)
    shape = (8, 5, 3, 3)
    integers = random.integers(-largest, largest + 1, shape).astype(np.int8)
    count = shape[axis] if scales > 1 else 1
    steps = random.uniform(0.001, 0.1, count).astype(np.float32)
    along = [-1 if i == axis and count > 1 else 1 for i in range(4)]
    return integers.astype(np.float32) * steps.reshape(along), steps, integers


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scales", [1, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_integers_come_back(axis: int, scales: int, seed: int) -> None:
    weight, _, integers = made(axis, scales, seed)
    quant = grid_params(weight, axis)
    assert quant is not None and (quant.dtype, quant.axis) == ("int8", axis)
    steps = np.array(quant.scale, np.float32).reshape([-1 if i == axis else 1 for i in range(4)])
    np.testing.assert_array_equal(np.rint(weight / steps) * steps, weight)
    greatest = np.abs(integers).max(tuple(i for i in range(4) if i != axis))
    if scales > 1 and greatest.min() == 127 or np.abs(integers).max() == 127 and scales == 1:
        np.testing.assert_array_equal(np.rint(weight / steps), integers)


def test_scales_come_back_bit_for_bit_where_a_channel_uses_all_steps() -> None:
    weight, steps, integers = made(0, 8)
    weight.reshape(8, -1)[:, 0] = 127 * steps
    quant = grid_params(weight, 0)
    assert quant is not None and np.array_equal(np.array(quant.scale, np.float32), steps)


def test_channels_that_were_scaled_once_more_keep_their_integers() -> None:
    weight, _, integers = made(0, 1)
    factor = np.random.default_rng(1).uniform(0.3, 3, (8, 1, 1, 1)).astype(np.float32)
    quant = grid_params(weight * factor, 0)
    assert quant is not None
    whole = weight * factor / np.array(quant.scale, np.float32).reshape(-1, 1, 1, 1)
    assert np.abs(whole - np.rint(whole)).max() < 1e-3


def test_minus_128_is_a_step_and_plus_128_is_none() -> None:
    weight = np.arange(-128, 128, dtype=np.float32).reshape(1, -1) * np.float32(0.3)
    quant = grid_params(weight, 0)
    assert quant is not None and quant.scale == (float(np.float32(0.3)),)
    assert grid_params(-weight, 0) is None


def test_a_channel_of_zeros_has_scale_1() -> None:
    weight, _, _ = made(0, 8)
    weight[2] = 0
    quant = grid_params(weight, 0)
    assert quant is not None and quant.scale[2] == 1


def test_weights_that_never_were_integers_have_no_scales() -> None:
    assert grid_params(np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32), 0) is None


def test_one_channel_that_is_off_the_grid_is_enough() -> None:
    weight, _, _ = made(0, 8)
    weight[3, 1, 1, 1] *= 1.01
    assert grid_params(weight, 0) is None


@pytest.mark.parametrize("lowest", [0, 8, 15])
def test_blocks_of_four_bits_come_back_whatever_their_zero_point(lowest: int) -> None:
    random = np.random.default_rng(lowest)
    scales = random.uniform(0.001, 0.1, (9, 7)).astype(np.float32)
    q = random.integers(0, 16, (9, 7 * 32)) - lowest
    weight = (q * np.repeat(scales, 32, 1))[:, :-5].astype(np.float32)
    blocks = block_params(weight)
    assert blocks is not None and blocks.block == 32 and blocks.numbers.max() <= 15
    scale, zero = (np.repeat(array, 32, 1)[:, :-5] for array in (blocks.scales, blocks.zeros.astype(int)))
    again = (blocks.numbers - zero) * scale
    np.testing.assert_allclose(again, weight, 1e-6)
    weight[4, 40] *= 1.01
    assert block_params(weight) is None


def test_weights_of_four_bits_are_told_from_floats_by_a_few_of_them() -> None:
    random = np.random.default_rng(0)
    numbers = random.integers(-8, 8, (6, 64)).astype(np.float32)
    numbers[0, :16] = 5                                         # a block of one level, and one of zeros
    numbers[1, :16] = 0
    blocks = block_params(numbers * np.repeat(random.uniform(0.01, 1, (6, 2)).astype(np.float32), 32, axis=1))
    assert blocks is not None and blocks.block <= 32
    assert block_params(random.standard_normal((6, 64)).astype(np.float32)) is None


def test_no_weights_are_on_no_grid() -> None:
    for shape in ((0, 64), (64, 0)):
        assert grid_params(np.zeros(shape, np.float32), 0) is None
        assert block_params(np.zeros(shape, np.float32)) is None
