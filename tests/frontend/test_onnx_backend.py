"""ONNX's own node tests, for every operator that we write ourselves: import, infer, run, compare."""
import importlib
import pkgutil
import warnings

import numpy as np
import onnx.backend.test.case.node
import pytest

from engines.frontend.normalise import RULES
from engines.frontend.onnx_import import graph_from_onnx
from engines.ops import OPS
from engines.reference import run

# What lies outside of what we take, by a part of the test's name.
OUT_OF_SCOPE = {
    "empty_set": "empty tensors: an extent of 0 declares a symbolic one",
    "zero_size": "empty tensors: an extent of 0 declares a symbolic one",
    "allowzero": "empty tensors: an extent of 0 declares a symbolic one",
    "scales_linear_align_corners": "the extents of a fractional result are rounded first, as ONNX Runtime does",
    "scales_cubic_align_corners": "the extents of a fractional result are rounded first, as ONNX Runtime does",
    "training": "training mode",
    "dropout_default_mask": "the mask of a Dropout, which only training needs",
    "_sequence": "sequences are no tensors",
    "_optional": "optional types are no tensors",
    "identity_opt": "optional types are no tensors",
    "STRING": "strings are no numbers",
    "string": "strings are no numbers",
    "FLOAT8": "types that NumPy does not have",
    "FLOAT4": "types that NumPy does not have",
    "UINT4": "types that NumPy does not have",
    "INT4": "types that NumPy does not have",
    "UINT2": "types that NumPy does not have",
    "INT2": "types that NumPy does not have",
    "BFLOAT16": "types that NumPy does not have",
    "e8m0": "types that NumPy does not have",
    "_e4m3": "types that NumPy does not have",
    "_e5m2": "types that NumPy does not have",
    "_float4": "types that NumPy does not have",
    "_int4": "types that NumPy does not have",
    "_uint4": "types that NumPy does not have",
    "_int2": "types that NumPy does not have",
    "_uint2": "types that NumPy does not have",
    "_bf16": "types that NumPy does not have",
    "bfloat16": "types that NumPy does not have",
}


def cases():
    """Import runs each module's tests into one list; what they warn of is not ours."""
    names = {op.lower() for op in (*OPS, *RULES)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, module, _ in pkgutil.iter_modules(onnx.backend.test.case.node.__path__):
            if module.replace("_", "").removesuffix("op") in names:
                importlib.import_module(f"onnx.backend.test.case.node.{module}")
        from onnx.backend.test.case.node import _NodeTestCases
    for case in sorted(_NodeTestCases, key=lambda case: case.name):
        ops = {node.op_type for node in case.model.graph.node}
        if ops <= {*OPS, *RULES}:
            yield case


CASES = {case.name: case for case in cases()}


def arrays(values):
    """Some of the data sets are arrays, some are protos."""
    return [onnx.numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in values]


ROUNDED = {"float16": 2 * 2.0 ** -10}      # relative: sums in another order end on a neighbour, or the one after
ALL_CONSTANT = ("test_range", "test_constantofshape")     # even the first input decides about a shape


def known_shapes_as_constants(case, inputs):
    """The model with its later inputs as initialisers: tests feed what we want to know before run time."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for opset in model.opset_import:        # tests of operators that have not changed since are kept at opset 7
        opset.version = max(opset.version, 9)
    fed = {}
    for value, array in zip(case.model.graph.input, inputs, strict=True):
        first = value is case.model.graph.input[0] and not case.name.startswith(ALL_CONSTANT)
        if not first and np.asarray(array).dtype != bool:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), value.name))
        else:
            fed[value.name] = array
    return model, fed


@pytest.mark.parametrize("name", CASES)
def test_onnx_node_test(name):
    reason = next((why for part, why in OUT_OF_SCOPE.items() if part in name), None)
    if reason:
        pytest.skip(reason)
    case = CASES[name]
    for inputs, outputs in case.data_sets:
        inputs, outputs = map(arrays, (inputs, outputs))
        model, feeds = known_shapes_as_constants(case, inputs)
        graph = graph_from_onnx(model)
        results = run(graph, {key: feeds[key] for key in graph.inputs})
        for output, expected in zip(case.model.graph.output, outputs, strict=True):
            result = results[output.name]
            assert result.dtype == expected.dtype
            assert tuple(graph.shape(output.name)) == expected.shape
            np.testing.assert_allclose(result, expected, rtol=max(case.rtol, ROUNDED.get(result.dtype.name, 0)),
                                       atol=max(case.atol, 1e-6))
