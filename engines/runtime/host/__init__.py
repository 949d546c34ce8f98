"""Host operators, evaluated between segments: data-dependent shapes, sequences, strings.

    run = evaluator(node)           # an infer_server.engines.ir node of an ONNX operator
    y, = run(x)

Frequent operators are implemented in NumPy here; the onnx package's reference evaluates all others.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from infer_server.engines.errors import EngineError, PlanError
from infer_server.engines.ir.graph import Node
from infer_server.engines.runtime.host import selection, sequences, text
from infer_server.engines.runtime.host.encoders import ENCODERS

Run = Callable[..., tuple[Any, ...]]
OPERATORS = {**selection.OPERATORS, **sequences.OPERATORS}


def evaluator(node: Node) -> Run:
    """Return the function that computes the outputs of a node.

    Its arguments are arrays, lists (sequences) or None (absent). It raises PlanError for values that the operator does
    not accept.
    """
    op = node.op.removeprefix("onnx.")
    compute = _ours(op, node) or _by_onnx(node)

    def run(*values: Any) -> tuple[Any, ...]:
        try:
            return compute(*values)
        except EngineError:
            raise
        except Exception as error:      # any error of an operator is attributed to its values
            raise PlanError(f"{op} '{node.name}' cannot be computed of these values ({type(error).__name__}: {error})"
                            ) from error

    return run


def _ours(op: str, node: Node) -> Run | None:
    domain = node.attrs.get("onnx_domain", "")
    if domain == "ai.onnx.ml" and op in ENCODERS:
        return ENCODERS[op](node.attrs)
    if domain == "com.microsoft" and op in text.OPERATORS:
        return text.OPERATORS[op](node.attrs)
    return partial(OPERATORS[op], node.attrs) if not domain and op in OPERATORS else None


def _by_onnx(node: Node) -> Run:
    found: list[Any] = []

    def compute(*values: Any) -> tuple[Any, ...]:
        if not found:       # when it is first run: serving others needs no onnx
            from infer_server.engines.ops.fallback import evaluator_of
            found.append(evaluator_of(node))
        names = [name for name in node.inputs if name]
        given = [value for name, value in zip(node.inputs, values, strict=True) if name]
        return tuple(found[0].run(None, dict(zip(names, given, strict=True))))

    return compute
