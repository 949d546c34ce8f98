"""Models of one node outside ONNX's default domain, and ONNX Runtime's results for them."""
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.ops.reference import run

OPSETS = [helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("ai.onnx.ml", 3)]
NEWEST_ML = helper.make_opsetid("ai.onnx.ml", 5)
RNG = np.random.default_rng(7)
Arrays = Sequence[np.ndarray | None]


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def model_of(op: str, arrays: Arrays, constants: Sequence[int] = (), outputs: int | str = 1,
             domain: str = "com.microsoft", version: int = 20, batch: bool = False, **attrs: Any) -> onnx.ModelProto:
    """Return a model of one node on inputs i0, i1, ...; None leaves an input out.

    constants: indices of the inputs that are initialisers. outputs: their number, or a string with a character for
    each, of which "-" leaves one out. version: opset of ONNX's own operators, from 21 on with the newest of ai.onnx.ml.
    batch: the leading extents of the inputs are dynamic.
    """
    marks = "y" * outputs if isinstance(outputs, int) else outputs
    names = ["" if a is None else f"i{i}" for i, a in enumerate(arrays)]
    made = ["" if mark == "-" else f"o{i}" for i, mark in enumerate(marks)]
    node = helper.make_node(op, names, made, name="n", domain=domain, **attrs)
    given = {f"i{i}": a for i, a in enumerate(arrays) if a is not None}
    graph = helper.make_graph(
        [node], "m", [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype),
                                                    ("N", *a.shape[1:]) if batch else a.shape)
                      for name, a in given.items() if int(name[1:]) not in constants],
        [helper.make_empty_tensor_value_info(name) for name in made if name],
        [numpy_helper.from_array(a, name) for name, a in given.items() if int(name[1:]) in constants])
    opsets = [helper.make_opsetid("", version), *(OPSETS if version < 21 else [OPSETS[0], NEWEST_ML])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds_of(model: onnx.ModelProto, arrays: Arrays) -> dict[str, np.ndarray]:
    return {value.name: arrays[int(value.name[1:])] for value in model.graph.input}


def imported(op: str, arrays: Arrays, *places: Any, **options: Any) -> dict[str, np.ndarray]:
    """Return the outputs of the imported graph."""
    model = model_of(op, arrays, *places, **options)
    return run(graph_from_onnx(model), feeds_of(model, arrays))


def onnx_runtime(model: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    """Return ONNX Runtime's outputs, without graph optimisations."""
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def check(op: str, arrays: Arrays, *places: Any, rtol: float = 1e-4, atol: float = 1e-5, threads: int = 1,
          **options: Any) -> None:
    """Assert that the imported graph computes what ONNX Runtime does; integers are exact."""
    model = model_of(op, arrays, *places, **options)
    feeds = feeds_of(model, arrays)
    compare(run(graph_from_onnx(model), feeds), onnx_runtime(model, feeds, threads), rtol, atol)


def compare(results: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float = 1e-4,
            atol: float = 1e-5) -> None:
    assert results.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert results[name].dtype == expected.dtype and results[name].shape == expected.shape, name
        if expected.dtype.kind == "f":
            np.testing.assert_allclose(results[name].astype(np.float64), expected.astype(np.float64), rtol, atol,
                                       err_msg=name)
        else:
            np.testing.assert_array_equal(results[name], expected, name)
