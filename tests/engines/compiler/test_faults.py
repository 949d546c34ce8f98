"""An unexpected exception becomes one line that names the node; intended errors stay unchanged."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from onnx import helper

from infer_server.engines.backends.llvm.kernels.elementwise.pointwise import PointwiseKernel
from infer_server.engines.errors import CompilerFault, ModelError
from infer_server.engines.frontend.onnx_import import graph_from_onnx
from infer_server.engines.lowering.calls.calls import RULES
from infer_server.engines.machine.object_cache import OFF, VARIABLE
from infer_server.engines.ops import OPS
from infer_server.engines.passes.rules.noop import RemoveNoOp
from tests.engines.compiler.small_models import engine_of, node, small_model

MODEL = small_model([node("Relu", "x", "a"), node("Softsign", "a", "y")], {"x": ["n", 4]}, ["y"])


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise error
    return fails


def test_a_fault_while_types_are_found_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPS["Softsign"], "types", raising(KeyError("float8")))
    with pytest.raises(CompilerFault, match=r"^a fault of the compiler at node 'softsign' \(Softsign\): KeyError"):
        engine_of(MODEL)


def test_a_fault_while_the_file_is_read_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "get_attribute_value", raising(IndexError("what is this")))
    model = small_model([node("Elu", "x", "y", alpha=0.5)], {"x": ["n", 4]}, ["y"])
    with pytest.raises(CompilerFault, match=r"at node 'elu' \(Elu\): IndexError: what is this"):
        engine_of(model)


def test_a_fault_in_a_rule_of_a_pass_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoveNoOp, "check", raising(ZeroDivisionError()))
    model = small_model([node("Reshape", "x s", "y")], {"x": ["n", 4]}, ["y"], {"s": [-1, 2, 2]})
    with pytest.raises(CompilerFault, match=r"at node 'reshape' \(Reshape\): ZeroDivisionError;"):
        engine_of(model)


def test_a_fault_of_a_kernel_names_the_node_that_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, OFF)       # else its code may be there, and the kernel writes none
    monkeypatch.setattr(PointwiseKernel, "_panel", raising(AssertionError("loop of 0 turns")))
    with pytest.raises(CompilerFault, match=r"at node 'relu' \(Relu\): AssertionError: loop of 0 turns"):
        engine_of(MODEL)


def test_memory_that_ends_is_no_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "Relu", raising(MemoryError()))
    with pytest.raises(ModelError, match="not enough memory to compile the model at node"):
        engine_of(MODEL)


def test_an_error_raised_on_purpose_is_not_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPS["Relu"], "types", raising(ModelError("no such thing")))
    with pytest.raises(ModelError, match="no such thing"):
        graph_from_onnx(MODEL)
