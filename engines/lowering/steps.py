"""Conversion of a lowered graph to the parts of a plan that all backends share: steps and tensor views."""
from __future__ import annotations

from dataclasses import replace

from infer_server.engines.ir.graph import Node
from infer_server.engines.ir.serialize import node_to_json
from infer_server.engines.lowering.calls.calls import AnyCall, FallbackCall, name_of
from infer_server.engines.lowering.calls.placement import batch_axis, tensor_view
from infer_server.engines.lowering.lower import Lowered
from infer_server.engines.plan.plan import Fallback, Step, TensorView

_PRECISIONS = {"uint8": "int8", "int8": "int8", "float16": "fp16", "bfloat16": "bf16"}


def step_of(lowered: Lowered, call: AnyCall) -> Step:
    """Return the step of a call. The backend adds a kernel's tactic, operands and grid."""
    name, fuses = name_of(call), call.node.origin
    if isinstance(call, FallbackCall):
        return Step(symbol="", operands=(), rows_per_item=1, fallback=fallback_of(lowered, call.node), name=name,
                    fuses=fuses, tactic="reference", reason=call.reason)
    problem = call.problem
    return Step(symbol=problem.family, operands=(), rows_per_item=1, name=name, fuses=fuses,
                precision=getattr(problem, "precision", _PRECISIONS.get(problem.outputs[0].dtype, "fp32")),
                macs=problem.macs, bytes=problem.bytes)


def fallback_of(lowered: Lowered, node: Node) -> Fallback:
    """Return the fallback of a node, which the reference runs on its tensors."""
    constants, types = lowered.graph.constants, lowered.graph.types
    inputs = tuple(name if name in constants or not name else view_of(lowered, name) for name in node.inputs)
    quants = tuple(types[name].quant if name in constants else None for name in node.inputs)
    return Fallback(node_to_json(node), inputs, tuple(view_of(lowered, name) for name in node.outputs), quants)


def view_of(lowered: Lowered, name: str) -> TensorView:
    """Return the view of a graph tensor, as plans store it."""
    tensor = lowered.graph.types[name]
    view = tensor_view(name, lowered.placements[name], scalar=not tensor.shape)
    return replace(view, quant=tensor.quant, batch_axis=batch_axis(tensor))


def io_views(lowered: Lowered, names: tuple[str, ...]) -> tuple[TensorView, ...]:
    """Return the views of graph inputs or outputs."""
    return tuple(view_of(lowered, name) for name in names)
