"""Tests of infer_server.engines.onnx_backend as a tool uses it: devices, nodes, dynamic shapes, deciding inputs."""
import os
import unittest

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.backend.test import BackendTest, runner

from infer_server.engines import onnx_backend
from infer_server.engines.errors import ConfigError, InputError, ModelError, UnknownValueError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from tests.conformance.cases import cases

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def model(nodes, inputs, outputs="y"):
    graph = helper.make_graph(nodes, "m", [helper.make_tensor_value_info(*value) for value in inputs],
                              [helper.make_empty_tensor_value_info(name) for name in outputs.split()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])


def reshaped():
    """Return the model y = Reshape(x, Concat(rows, -1))."""
    nodes = [helper.make_node("Constant", [], ["rest"], value_ints=[-1]),
             helper.make_node("Concat", ["rows", "rest"], ["target"], axis=0),
             helper.make_node("Reshape", ["x", "target"], ["y"])]
    return model(nodes, [("x", TensorProto.FLOAT, [3, 4]), ("rows", TensorProto.INT64, [1])])


def test_engines_run_on_the_cpu_only():
    assert onnx_backend.supports_device("CPU") and onnx_backend.supports_device("CPU:0")
    assert not onnx_backend.supports_device("CUDA") and not onnx_backend.supports_device("abacus")
    with pytest.raises(ConfigError, match="CUDA"):
        onnx_backend.prepare(reshaped(), "CUDA:0")


def test_a_node_runs_alone():
    (y,) = onnx_backend.run_node(helper.make_node("Neg", ["x"], ["y"]), [X])
    np.testing.assert_array_equal(y, -X)


def test_the_compiler_names_the_inputs_whose_values_it_has_to_know():
    with pytest.raises(UnknownValueError, match="'rows'") as error:
        graph_from_onnx(reshaped())
    assert error.value.inputs == ("rows",)


def test_a_value_that_is_told_is_no_input_any_more():
    graph = graph_from_onnx(reshaped(), constants={"rows": np.array([6])})
    assert graph.inputs == ("x",) and graph.shape("y") == (6, 2)


@pytest.mark.parametrize(("value", "message"), [
    ({"rows": np.array([6, 2])}, r"int64\[2\] given for input 'rows' does not match the declared int64\[1\]"),
    ({"rows": np.array([6.0])}, r"float64\[1\] given for input 'rows'"), ({"row": np.array([6])}, "no input 'row'")])
def test_a_value_that_does_not_fit_is_refused(value, message):
    with pytest.raises(ModelError, match=message):
        graph_from_onnx(reshaped(), constants=value)


def test_there_is_an_engine_for_each_value_that_decides_about_shapes():
    representation = onnx_backend.prepare(reshaped())
    for rows in (6, 2, 6):
        (y,) = representation.run([X, np.array([rows])])
        np.testing.assert_array_equal(y, X.reshape(rows, -1))
    first, again, other = (representation.plan_of([X + i, np.array([rows])]) for i, rows in enumerate((6, 6, 2)))
    assert first is again and first is not other


def test_open_extents_are_those_of_the_call():
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    representation = onnx_backend.prepare(model(nodes, [("x", TensorProto.FLOAT, ["n", "m"])]))
    for shape in ((2, 3), (4, 1)):
        (y,) = representation.run({"x": np.full(shape, -1, np.float32)})
        assert y.shape == shape and not y.any()


def test_outputs_come_in_the_order_of_the_model_and_by_name():
    nodes = [helper.make_node("Neg", ["x"], ["minus"]), helper.make_node("Abs", ["x"], ["size"])]
    results = onnx_backend.run_model(model(nodes, [("x", TensorProto.FLOAT, [3, 4])], "size minus"), [X])
    np.testing.assert_array_equal(results[1], -X)
    np.testing.assert_array_equal(results.size, X)


def test_what_cannot_be_compiled_is_refused_before_it_is_run():
    unknown = model([helper.make_node("Relu", ["x"], ["y"], alpha=1.0)], [("x", TensorProto.FLOAT, [3])])
    assert not onnx_backend.EngineBackend.is_compatible(unknown)
    with pytest.raises(ModelError, match="no attribute 'alpha'"):
        onnx_backend.prepare(unknown)


def test_inputs_that_are_missing_are_counted():
    with pytest.raises(InputError, match="takes 2 inputs, x, rows; 1 are given"):
        onnx_backend.prepare(reshaped()).run([X])


def test_an_unknown_option_is_refused_with_the_one_it_may_mean():
    with pytest.raises(ConfigError, match="unknown option 'precison'; did you mean 'precision'"):
        onnx_backend.prepare(reshaped(), precison="fp16")


def test_onnx_runs_its_own_tests_through_the_module(monkeypatch):
    """ONNX documents this use: the module is the backend."""
    kept = cases().values()         # which onnx's runner would make again, for seconds
    monkeypatch.setattr(runner, "load_model_tests", lambda kind: [case for case in kept if case.kind == kind])
    suite = BackendTest(onnx_backend, __name__).include("^test_(relu|reshape_extended_dims|add_bcast)_cpu$")
    with open(os.devnull, "w") as nothing:
        result = unittest.TextTestRunner(nothing).run(suite.test_suite)
    ran = result.testsRun - len(result.skipped)
    assert result.wasSuccessful() and ran == 3
