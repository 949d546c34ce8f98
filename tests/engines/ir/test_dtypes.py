"""bfloat16 by its bits agrees with ml_dtypes; which tensors kernels compute on as float32."""
import ml_dtypes
import numpy as np
import pytest

from engines.ir.dtypes import (
    as_in_memory,
    bfloat16,
    from_bfloat16,
    is_float,
    is_narrow,
    memory_dtype,
    to_bfloat16,
)
from engines.ir.graph import TensorType

NUMBERS = np.concatenate([
    np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.float32(10) ** np.arange(-20, 20).repeat(25),
    np.float32([0, -0.0, 1, np.inf, -np.inf, 3.4e38, 1e-40]),
    np.uint32([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF]).view(np.float32)])      # ties, and up to infinity


def test_a_float_becomes_the_nearest_bfloat16_halves_to_even() -> None:
    np.testing.assert_array_equal(to_bfloat16(NUMBERS), NUMBERS.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_every_bfloat16_is_a_float_that_becomes_it_again() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    real = from_bfloat16(bits)
    np.testing.assert_array_equal(real, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    numbers = ~np.isnan(real)
    np.testing.assert_array_equal(to_bfloat16(real)[numbers], bits[numbers])


@pytest.mark.parametrize("bits", (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF))
def test_nan_stays_nan_of_its_sign(bits: int) -> None:
    stored = to_bfloat16(np.array([bits], np.uint32).view(np.float32))
    assert np.isnan(from_bfloat16(stored)).all() and (stored >> 15 == bits >> 31).all()


def test_shapes_stay() -> None:
    assert to_bfloat16(np.float32(1.5)).shape == () and to_bfloat16(np.zeros((2, 0, 3))).shape == (2, 0, 3)
    assert to_bfloat16(np.zeros((4, 6), np.float32)[::2, ::3]).shape == (2, 2)


def test_bfloat16_is_in_memory_as_its_bits() -> None:
    assert memory_dtype("bfloat16") == np.uint16 and memory_dtype("float16") == np.float16
    assert as_in_memory(np.ones(2, bfloat16())).tolist() == [0x3F80, 0x3F80]
    assert as_in_memory(np.ones(2, np.float16)).dtype == np.float16


def test_floats_of_64_bits_and_integers_are_no_floats_to_kernels() -> None:
    types = {dtype.name: TensorType(dtype, ()) for dtype in
             (bfloat16(), *map(np.dtype, ("float16", "float32", "float64", "int32")))}
    assert [name for name, type_ in types.items() if is_float(type_)] == ["bfloat16", "float16", "float32"]
    assert [name for name, type_ in types.items() if is_narrow(type_)] == ["bfloat16", "float16"]
