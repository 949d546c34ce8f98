"""Models that pass the schema but are invalid raise a ModelError with the reason before a kernel is compiled."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from infer_server.engines.errors import ModelError
from infer_server.engines.frontend.onnx_file import read_model
from infer_server.engines.frontend.onnx_import import graph_from_onnx

RELU = ("Relu", ["x"], ["y"], {})


def malformed(nodes: Sequence[Any], shape: Sequence[int] = (1, 3), inputs: Sequence[str] = ("x",),
              outputs: Sequence[str] = ("y",), **constants: Any) -> onnx.ModelProto:
    made = [helper.make_node(op, read, written, name=op.lower(), **attrs) for op, read, written, attrs in nodes]
    arrays = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(made, "m", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                                          for name in inputs],
                              [helper.make_empty_tensor_value_info(name) for name in outputs], arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


IMAGE = (1, 4, 4, 4)
SCALED = ("Resize", ["x", "", "s"], ["y"], {})
CASES = {
    "two inputs of one name": (malformed([RELU], inputs=("x", "x")),
                               "'x' is produced twice: by an input and by an input"),
    "two nodes that make one tensor": (malformed([RELU, ("Abs", ["x"], ["y"], {})]), "produced twice: by node 'relu'"),
    "a node that makes an input": (malformed([("Relu", ["x"], ["x"], {})], outputs=["x"]), "'x' is produced twice"),
    "a node that makes a constant": (malformed([("Relu", ["x"], ["c"], {}), ("Add", ["x", "c"], ["y"], {})],
                                               c=np.ones(3, np.float32)),
                                               "'c' is produced twice: by a constant and by"),
    "a cycle": (malformed([("Add", ["x", "z"], ["y"], {}), ("Relu", ["y"], ["z"], {})]), "input 'z' is not produced"),
    "no outputs": (malformed([RELU], outputs=()), "has no outputs"),
    "a tile of -1": (malformed([("Tile", ["x", "k"], ["y"], {})], k=[-1, 2]), r"shape \[-1, 6\]"),
    "an expansion to -1": (malformed([("Expand", ["x", "k"], ["y"], {})], k=[-1, 3]), r"shape \[-1, 3\]"),
    "a scale below 0": (malformed([SCALED], IMAGE, s=np.float32([1, 1, -2, 2])), "must be finite and positive"),
    "an infinite scale": (malformed([SCALED], IMAGE, s=np.float32([1, 1, np.inf, 2])), "must be finite and positive"),
    "too few scales": (malformed([SCALED], IMAGE, s=np.float32([1, 1, 2])),
                       "scales has 3 values, but there are 4 axes"),
    "an index beyond the end": (malformed([("Gather", ["x", "i"], ["y"], {"axis": 1})], i=[17]), "indices are in 17"),
    "a range to no number": (malformed([("Range", ["a", "b", "c"], ["y"], {})], a=np.float32(0), b=np.float32(np.nan),
                                       c=np.float32(1)), "number of steps"),
    "a range of steps of 0": (malformed([("Range", ["a", "b", "c"], ["y"], {})], a=0, b=5, c=0), "number of steps"),
    "a bound that is no number": (malformed([("Clip", ["x", "c"], ["y"], {})], c=np.ones(3, np.float32)),
                                  "min and max must be scalars"),
    "groups of 0": (malformed([("GroupNormalization", ["x", "g", "g"], ["y"], {"num_groups": 0})], IMAGE,
                              g=np.ones(2, np.float32)), "'groupnormalization' .*: attribute 'num_groups' is 0"),
    "blocks of 0": (malformed([("DepthToSpace", ["x"], ["y"], {"blocksize": 0})], IMAGE), "'depthtospace' "),
    "starts without ends": (malformed([("Slice", ["x", "a", "b"], ["y"], {})], a=[0, 0], b=[1]), "2 starts, 1 ends"),
    "steps of 0": (malformed([("Slice", ["x", "a", "a", "a", "b"], ["y"], {})], a=[0], b=[0]), r"steps \[0\]"),
    "parts of different ranks": (malformed([("Concat", ["x", "c"], ["y"], {"axis": 0})], c=np.ones(3, np.float32)),
                                 "the inputs must have the same number of axes"),
    "more parts than outputs": (malformed([("Split", ["x", "k"], ["y"], {"axis": 1})], k=[1, 2]), "split has 2 sizes"),
    "a bias that does not fit its layer": (
        malformed([("LSTM", ["x", "w", "r", "b"], ["y"], {"hidden_size": 2})], (5, 1, 3), b=np.ones(16, np.float32),
                  w=np.ones((1, 8, 3), np.float32), r=np.ones((1, 8, 2), np.float32)),
        r"input 3 has shape \[16\], but must have \[1, 16\]"),
    "more axes than an array may have": (malformed([RELU], [1] * 40), "40 axes; at most 31 are supported"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_model_is_refused_for(case: tuple[onnx.ModelProto, str]) -> None:
    with pytest.raises(ModelError, match=case[1]):
        graph_from_onnx(case[0])


def test_a_branch_that_reads_what_nothing_makes_is_refused_though_it_may_not_be_taken() -> None:
    def branch(name: str, reads: str) -> onnx.GraphProto:
        return helper.make_graph([helper.make_node("Add", ["x", reads], [name])], name, [],
                                 [helper.make_empty_tensor_value_info(name)])
    branches = {"then_branch": branch("t", "x"), "else_branch": branch("e", "gone")}
    model = malformed([("Cast", ["x"], ["c"], {"to": TensorProto.BOOL}), ("If", ["c"], ["y"], branches)], (1,))
    with pytest.raises(ModelError, match=r"node 'e' \(Add\) in graph 'e' of node 'if' \(If\) reads 'gone'"):
        read_model(model)


def test_a_function_that_calls_itself_is_refused() -> None:
    again = helper.make_node("F", ["a"], ["b"], domain="f")
    model = malformed([("F", ["x"], ["y"], {"domain": "f"})])
    model.opset_import.append(helper.make_opsetid("f", 1))
    model.functions.append(helper.make_function("f", "F", ["a"], ["b"], [again], model.opset_import))
    with pytest.raises(ModelError,
                       match=r"the model's functions cannot be inlined, because one calls itself: f\.F calls f\.F"):
        read_model(model)


def test_a_shape_of_negative_extents_is_refused() -> None:
    """NumPy's reshape would infer an extent of -3."""
    model = malformed([("Add", ["x", "c"], ["y"], {})], c=np.ones(3, np.float32))
    model.graph.initializer[0].dims[0] = -3
    with pytest.raises(ModelError, match=r"tensor 'c' cannot be read: its shape \[-3\]"):
        graph_from_onnx(model)
