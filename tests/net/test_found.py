"""Models that random tests found to be wrong or refused before, in ONNX's text form."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from infer_server.engines.lowering.epilogue import from_onnx
from tests.net.check import Wrong, check
from tests.net.evaluation import OPSET, Array, Evaluator, evaluator
from tests.net.graphs import ITEMS, Case

FOUND = {
    "a sum of a vector": "(float[5] x) => (float[] y) { y = ReduceSum <keepdims: int = 0> (x) }",
    "a maximum over the leading axis": """(float[5, 3] x) => (float[] y) <int64[1] axes = {0}>
        { y = ReduceMax <keepdims: int = 0> (x, axes) }""",
    "a mean over the leading axes, kept": """(float[2, 5, 3] x) => (float[] y) <int64[2] axes = {0, 1}>
        { y = ReduceMean (x, axes) }""",
    "a reduction over no axes": """(float[4] x) => (float[] y)
        { y = ReduceSum <keepdims: int = 0, noop_with_empty_axes: int = 1> (x) }""",
    "squares summed over no axes": """(float[4] x) => (float[] y)
        { y = ReduceSumSquare <keepdims: int = 0, noop_with_empty_axes: int = 1> (x) }""",
    "a maximum of nothing": "(int32[N, 0] x) => (int32[] y) <int64[1] axes = {1}> { y = ReduceMax (x, axes) }",
    "a sum of no integers": "(int32[N, 0] x) => (int32[] y) <int64[1] axes = {1}> { y = ReduceSum (x, axes) }",
    "a softmax of a vector": "(float[5] x) => (float[] y) { y = Softmax <axis: int = 0> (x) }",
    "a constant that varies along a vector": """(float[2] x) => (float[] y) <float[2] c = {0.25, 2.5}>
        { y = Add (x, c) }""",
    "a row looked up by a number": """(int64 x) => (float[] y) <float[7, 1] table = {1, 2, 3, 4, 5, 6, 7}>
        { y = Gather <axis: int = 0> (table, x) }""",
    "nothing joined along another axis": """(float[1, 0] a, float[1, 0] b) => (float[] y)
        { y = Concat <axis: int = 0> (a, b) }""",
    "one number of a batch of truths": """(bool[N] x, float[N, 2] z) => (bool[] y, float[] u) <int64 first = {0}>
        { y = Gather <axis: int = 0> (x, first) u = Neg (z) }""",
    "one axis of a turned tensor, backwards": """(float[1, 3, 1, 1] x) => (float[] y)
        <int64[1] start = {-1}, int64[1] end = {-4}, int64[1] axis = {2}, int64[1] step = {-1}>
        { t = Transpose <perm: ints = [0, 2, 1, 3]> (x) y = Slice (t, start, end, axis, step) }""",
    "a product of nothing in 16 bits": """(bfloat16[1, 0] x, bfloat16[1] b) => (bfloat16[] y) <bfloat16[0, 1] w = {}>
        { p = MatMul (x, w) y = Add (p, b) }""",
}


def case_of(text: str, precision: str = "fp32") -> Case:
    """Return a case of a graph in ONNX's text form, with inputs between -3 and 3."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {OPSET}]> net {text}')
    random, symbolic = np.random.default_rng(0), set()
    inputs: dict[str, Array] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else ITEMS for d in kind.shape.dim]
        symbolic |= {value.name} if any(d.dim_param for d in kind.shape.dim) else set()
        numbers = np.asarray(random.integers(-3, 4, shape))
        inputs[value.name] = numbers.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return Case(inputs, symbolic, constants, _evaluators(model.graph.node, {**inputs, **constants}),
                tuple(value.name for value in model.graph.output), precision)


def _evaluators(nodes: Sequence[onnx.NodeProto], known: dict[str, Array]) -> tuple[Evaluator, ...]:
    created = []
    for node in nodes:
        arrays = [known[name] for name in node.input]
        created.append(evaluator(node, arrays))
        known.update(zip(node.output, created[-1].run(arrays), strict=True))
    return tuple(created)


def test_weights_of_no_elements_have_no_scale() -> None:
    check(case_of("""(float[N, 0] x) => (float[] y) <float[0, 1] w = {}> { y = Gemm (x, w) }""", "int8"))


@pytest.mark.parametrize("name", FOUND)
def test_what_the_net_found_stays_right(name: str) -> None:
    check(case_of(FOUND[name]))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_a_kernel_that_is_a_little_wrong_is_caught(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("(float[N, 5] x) => (float[] y) { a = Sigmoid (x) y = Relu (a) }", precision)
    check(case)
    monkeypatch.setitem(from_onnx.WRITERS, "Relu", lambda w, node, x: x.clip(0.25, np.inf))  # type: ignore[arg-type]
    with pytest.raises(Wrong, match="of 1 items is 0.25, not 0.119"):
        check(case)
