"""bfloat16 stored as bits agrees with ml_dtypes, and rare types are stored as bits."""
import ml_dtypes
import numpy as np
import pytest

from infer_server.engines.ir.dtypes import (
    BITS,
    as_in_memory,
    as_named,
    dtype_in_file,
    dtype_named,
    from_bfloat16,
    integer_limits,
    is_float,
    is_narrow,
    memory_dtype,
    name_in_file,
    to_bfloat16,
)
from infer_server.engines.ir.graph import TensorType

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
    assert as_in_memory(np.ones(2, dtype_named("bfloat16"))).tolist() == [0x3F80, 0x3F80]
    assert as_in_memory(np.ones(2, np.float16)).dtype == np.float16


def test_floats_of_64_bits_and_integers_are_no_floats_to_kernels() -> None:
    types = {dtype.name: TensorType(dtype, ()) for dtype in
             (dtype_named("bfloat16"), *map(np.dtype, ("float16", "float32", "float64", "int32")))}
    assert [name for name, type_ in types.items() if is_float(type_)] == ["bfloat16", "float16", "float32"]
    assert [name for name, type_ in types.items() if is_narrow(type_)] == ["bfloat16", "float16"]


@pytest.mark.parametrize("name", BITS)
def test_what_numpy_lacks_survives_memory_and_files(name: str) -> None:
    kind = dtype_named(name)
    array = np.arange(3).astype(kind)
    bits = as_in_memory(array)
    assert bits.dtype == memory_dtype(name) and as_named(bits, name).tobytes() == array.tobytes()
    assert as_named(bits, name).dtype == dtype_in_file(name_in_file(kind)) == kind
    assert (integer_limits(kind) is not None) == ("int" in name)


def test_integers_have_limits() -> None:
    assert [integer_limits(dtype_named(name)) for name in ("uint8", "int16", "int4", "uint4", "int2", "uint2")] == [
        (0, 255), (-32768, 32767), (-8, 7), (0, 15), (-2, 1), (0, 3)]


def test_a_file_names_no_dtype_of_objects() -> None:
    with pytest.raises(ValueError, match="dtype O"):
        dtype_in_file("O")
