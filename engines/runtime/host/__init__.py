"""Operators that the host evaluates between segments: what only data tell the extents of, sequences, strings.

    run = evaluator(node)           # of engines.ir, as ONNX has it
    y, = run(x)

Those that programs run often are in NumPy here; the onnx package evaluates all others.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engines.errors import EngineError, PlanError
from engines.ir.graph import Node
from engines.runtime.host import selection, sequences, text
from engines.runtime.host.encoders import ENCODERS

Run = Callable[..., tuple[Any, ...]]
OPERATORS = {**selection.OPERATORS, **sequences.OPERATORS}


def evaluator(node: Node) -> Run:
    """What computes the outputs of a node; its arguments are arrays, lists (sequences), or None.

    Raises PlanError when it is run: the operator does not take these values."""
    op = node.op.removeprefix("onnx.")
    compute = _ours(op, node) or _by_onnx(node)

    def run(*values: Any) -> tuple[Any, ...]:
        try:
            return compute(*values)
        except EngineError:
            raise
        except Exception as error:      # an operator's own, for which the values are at fault
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
            from engines.ops.fallback import evaluator_of
            found.append(evaluator_of(node))
        names = [name for name in node.inputs if name]
        given = [value for name, value in zip(node.inputs, values, strict=True) if name]
        return tuple(found[0].run(None, dict(zip(names, given, strict=True))))

    return compute
