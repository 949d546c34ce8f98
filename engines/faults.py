"""Conversion of unexpected exceptions to CompilerFault, a message of one line that names the node.

The compiler visits nodes in dozens of places. Instead of recording the current node in each, the traceback is searched
for the innermost frame with a node among its variables.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from infer_server.engines.errors import CompilerFault, EngineError, ModelError
from infer_server.engines.ir.graph import Node

_REPORT = "please report it with the model; INFER_DEBUG=traceback shows where it was raised"


@contextmanager
def faults_named() -> Iterator[None]:
    """Convert every exception in the block but EngineError and OSError to CompilerFault or ModelError."""
    try:
        yield
    except (EngineError, OSError):
        raise
    except MemoryError as error:
        raise ModelError(f"there is not enough memory to compile the model{_where(error)}") from error
    except Exception as error:
        raise CompilerFault(f"a fault of the compiler{_where(error)}: {summary(error)}; {_REPORT}") from error


def summary(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _where(error: BaseException) -> str:
    """Return " at node 'conv1' (Conv)", or "" if no frame has a node."""
    problem: Any = None
    for frame in reversed(_frames(error.__traceback__)):
        values = frame.f_locals
        if (node := _node(values)) or (node := _lowered_to(problem, values)):
            name, op = node
            return f" at node '{name}' ({op})"
        problem = problem or values.get("problem") or getattr(values.get("self"), "problem", None)
    return ""


def _frames(trace: TracebackType | None) -> list[FrameType]:
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames


def _node(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the ONNX name and operator of a node among a frame's variables, preferring the variable `node`.

    The node may be a graph's or an ONNX NodeProto, itself or inside a Match (its root) or an OperatorCall.
    """
    candidates: list[Any] = [values.get("node"), *values.values()]
    for value in candidates:
        for found in (value, getattr(value, "root", None), getattr(value, "node", None)):
            if isinstance(found, Node):
                return next(filter(None, (*found.origin, found.name, *found.outputs)), ""), found.anchor.op
            if found is not None and type(found).__name__ == "NodeProto":   # by name: serving imports no onnx
                return found.name or next(iter(found.output), ""), found.op_type
    return None


def _lowered_to(problem: Any, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first node of a lowered graph whose call has this problem: the tuner has problems only, no nodes."""
    for value in values.values():
        for call in getattr(value, "calls", ()) if problem is not None else ():
            if getattr(call, "problem", None) == problem:
                return _node({"node": call.node})
    return None
