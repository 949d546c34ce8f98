"""Epilogue programs have no redundant instructions."""
import numpy as np
import pytest

from infer_server.engines.ir.graph import Node
from infer_server.engines.lowering.epilogue.affine import Affine, AffineWriter
from infer_server.engines.lowering.epilogue.from_onnx import write_node
from infer_server.engines.lowering.epilogue.program import ProgramBuilder
from tests.engines.compiler.small_models import engine_of, small_model
from tests.engines.compiler.small_models import node as model_node

ACC, OTHER = np.linspace(-400, 400, 65, dtype=np.float32), np.linspace(0, 255, 65, dtype=np.float32)


def written(body, operands=0):
    """Return the instructions of body(writer, x, *operands), requantised, for x = 0.01 * ACC + 0.3, and its value."""
    builder = ProgramBuilder(accumulator=True)
    writer = AffineWriter(builder)
    others = [Affine.of(builder.operand(), 0.02, -0.5) for _ in range(operands)]
    result = body(writer, Affine.of(builder.accumulator, 0.01, 0.3), *others)
    program = builder.program(writer.settle(writer.requantise(result, 0.05, 100, 0, 255)))
    return [i.op for i in program.instructions], program.meaning(ACC, [OTHER] * operands, builder.constants)


def node(op, **attrs):
    return lambda writer, *x: write_node(writer, Node(op, ("x",), ("y",), attrs), list(x))


@pytest.mark.parametrize("body, operands, ops, meaning", [
    (node("Relu"), 0, ["fma", "max"], lambda x, y: np.maximum(x, 0)),
    (node("HardSwish"), 0, ["fma", "max", "min", "fma", "fma"], lambda x, y: x * np.clip(x / 6 + 0.5, 0, 1)),
    (node("Swish"), 0, ["fma", "sigmoid", "mul", "fma"], lambda x, y: x / (1 + np.exp(-x))),
    (node("Mul"), 1, ["fma", "fma", "fma"], lambda x, y: x * y),
    (lambda w, x, y: w.add(w.multiply(x, y), y), 1, ["fma", "fma", "fma", "fma"], lambda x, y: x * y + y),
    (lambda w, x: w.multiply(w.multiply(x, x), x), 0, ["fma", "fma", "mul", "fma"], lambda x, y: x ** 3),
], ids=["relu", "hard swish", "silu", "product", "product and sum", "cube"])
def test_a_scale_after_a_product_meets_the_constants_of_a_factor(body, operands, ops, meaning):
    found, result = written(body, operands)
    assert found == ops
    x, y = ACC.astype(np.float64) * 0.01 + 0.3, OTHER.astype(np.float64) * 0.02 - 0.5
    np.testing.assert_allclose(result, meaning(x, y) / 0.05 + 100, rtol=2e-5, atol=2e-4)


def test_an_instruction_is_written_once():
    builder = ProgramBuilder(accumulator=False)
    x = builder.operand()
    assert builder.add("mul", x, 2.0) == builder.add("mul", x, 2.0) != builder.add("mul", x, 3.0)
    assert len(builder.program().instructions) == 2


@pytest.mark.parametrize("bound, ops", [(6.0, ["mul"]), (5.99, ["mul"]), (5.98, ["mul", "min"]),
                                        (np.array([6.0, 60.0]), ["mul"]), (np.array([60.0, 5.0]), ["mul", "min"])])
def test_a_clip_that_rounds_to_the_end_of_the_range_is_left_to_the_store(bound, ops):
    """254.5 rounds to the even 254; larger values end at 255 with or without the clip."""
    scale = np.nextafter(np.float64(6 / 255), 1)        # 6 / scale is less than 255
    builder = ProgramBuilder(accumulator=True)
    writer = AffineWriter(builder)
    clipped = Affine.of(builder.accumulator, 0.01).clip(0.0, bound)
    program = builder.program(writer.settle(writer.requantise(clipped, scale, 0, 0, 255)))
    assert [i.op for i in program.instructions] == ops


@pytest.mark.parametrize("coarse, constants", [(False, [-np.inf]), (True, [-np.finfo(np.float32).max])])
def test_an_infinity_stays_one_unless_a_byte_is_made_of_it(coarse, constants):
    """A mask of -inf hides a key, while the lowest float32 only makes all hidden keys equal."""
    builder = ProgramBuilder(accumulator=False)
    writer = AffineWriter(builder, coarse)
    writer.settle(write_node(writer, Node("Where", ("c", "a", "b"), ("y",)), [
        Affine.of(builder.operand()), Affine.of(builder.operand()), Affine.number(-np.inf)]))
    assert np.ravel(builder.constants).tolist() == constants


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("divisor", [0.0, -0.0, 1e-39, [2, 0, 1e-39, 1]], ids=str)
def test_a_quotient_by_what_has_no_reciprocal_is_infinite_or_no_number_as_ieee_says(divisor):
    """Div alone and in a product's epilogue; 0 / 1e-39 is 0."""
    divisor, x = np.float32(divisor), np.float32([[-2, 0, 3, 5]])
    nodes = [model_node("Div", "x d", "y"), model_node("MatMul", "x w", "p"), model_node("Div", "p d", "z")]
    model = small_model(nodes, {"x": [1, 4]}, ["y", "z"], {"d": divisor, "w": np.eye(4, dtype=np.float32)})
    with np.errstate(all="ignore"):
        quotient = x / divisor
    for made in engine_of(model).run({"x": x}).values():
        np.testing.assert_array_equal(made, quotient)


@pytest.mark.parametrize("coarse", [False, True])
def test_a_clip_keeps_what_is_no_number_unless_a_byte_is_made_of_it(coarse):
    builder = ProgramBuilder(accumulator=True)
    clipped = Affine.of(builder.accumulator).clip(-1, 1)
    program = builder.program(AffineWriter(builder, coarse).settle(clipped))
    result, = program.meaning(np.float32([np.nan]), [], builder.constants)
    assert result == -1 if coarse else np.isnan(result)
