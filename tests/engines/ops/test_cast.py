"""Casts to types that NumPy lacks give the bits of ONNX's reference."""
import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from onnx.reference.ops.op_cast import cast_to

from infer_server.engines.ir.dtypes import RARE, dtype_named
from infer_server.engines.ops.cast import Cast

TARGETS = [name for name in RARE if not name.startswith("float6")]      # of which older onnx packages know nothing
NUMBERS = np.concatenate([
    np.random.default_rng(0).standard_normal(760) * 10.0 ** np.arange(-38, 38).repeat(10),
    np.arange(0, 1 << 32, 0x7FFFF1, np.int64).astype(np.uint32).view(np.float32),       # all over float32
    [np.inf, -np.inf, 0, -0.0, 1.5 * 2.0 ** 127, 2.0 ** -127, 448, 449, 57344, 61440, 65504]]).astype(np.float32)


@pytest.mark.parametrize("to", [name for name in TARGETS if "float" in name])
def test_floats_of_few_bits_are_rounded_and_saturated_as_onnx_says(to: str) -> None:
    number = helper.np_dtype_to_tensor_dtype(dtype_named(to))
    for saturate in (0, 1):
        for mode in ("up", "down", "nearest"):
            made = Cast.formula(NUMBERS, to, saturate, mode)
            wanted = cast_to(NUMBERS, number, bool(saturate), mode)
            assert made.dtype == wanted.dtype
            np.testing.assert_array_equal(made.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("source", [*TARGETS, "float16", "int64", "bool"])
def test_each_type_becomes_each_other(source: str) -> None:
    bits = np.arange(2 ** (2 if "int2" in source else 4 if "4" in source[-4:] else 8), dtype=np.uint8)
    x = bits.view(dtype_named(source)) if source in RARE else (bits % 8).astype(source)
    real = x.astype(np.float32)
    for to in (*TARGETS, "float32", "int8"):
        with np.errstate(invalid="ignore"):     # infinity has no integer
            made = Cast.formula(x, to)
        assert made.dtype == dtype_named(to)
        if to in ("float32", "int8"):
            exact = np.abs(real) < 127
            np.testing.assert_array_equal(made[exact].astype(np.float32), real[exact] if to == "float32" else
                                          np.trunc(real[exact]))


def test_a_number_beyond_a_float8_is_its_greatest_or_none() -> None:
    x = np.array([1e6, -1e6], np.float32)
    assert Cast.formula(x, "float8_e4m3fn").astype(np.float32).tolist() == [448, -448]
    assert np.isnan(Cast.formula(x, "float8_e4m3fn", saturate=0).astype(np.float32)).all()
    assert Cast.formula(x, "float8_e5m2", saturate=0).astype(np.float32).tolist() == [np.inf, -np.inf]
    assert Cast.formula(x, "float4_e2m1fn").dtype == ml_dtypes.float4_e2m1fn
