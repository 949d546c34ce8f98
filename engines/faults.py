"""An exception that nobody meant a user to see becomes one line: a fault of the compiler, and at which node.

Nodes are visited in dozens of places, and each would have to say at which one it is. Instead the traceback is asked:
the innermost frame that holds a node was busy with it.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from engines.errors import CompilerFault, EngineError, ModelError
from engines.ir.graph import Node

_REPORT = "please report it with the model; INFER_DEBUG=traceback shows where it was raised"


@contextmanager
def faults_named() -> Iterator[None]:
    """Around what a caller asks of the compiler: whatever it raises is an EngineError, or an OSError about a file."""
    try:
        yield
    except (EngineError, OSError):
        raise
    except MemoryError as error:
        raise ModelError(f"there is not enough memory to compile the model{_where(error)}") from error
    except Exception as error:
        raise CompilerFault(f"a fault of the compiler{_where(error)}: {summary(error)}; {_REPORT}") from error


def summary(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _where(error: BaseException) -> str:
    """" at node 'conv1' (Conv)", if a frame tells."""
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
    """The name in the ONNX file and the operator of a node among a frame's variables, the one called `node` first.

    It may be of the graph or still of the ONNX file, and inside a Match (its root) or a Call.
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
    """The first node of a lowered graph that became a kernel for `problem`: tuning knows no nodes."""
    for value in values.values():
        for call in getattr(value, "calls", ()) if problem is not None else ():
            if getattr(call, "problem", None) == problem:
                return _node({"node": call.node})
    return None
