"""Stores of a nest's results, and updates of scatters."""
from __future__ import annotations

from collections.abc import Sequence

from infer_server.engines.codegen.ir_builder import Value
from infer_server.engines.codegen.nest.loops import Code, LoopState
from infer_server.engines.codegen.nest.values import COMBINED, spread, store
from infer_server.engines.lowering.problems.nest import Nest, Scatter


def write_element(code: Code, frame: LoopState, nest: Nest, targets: Sequence[Value], required: set[int]) -> None:
    """Emit the reductions and stores inside the outer loops."""
    frame = code.reduced(frame, required)
    if nest.inside:
        code.over(frame, code.loops.inner, required, lambda inside: store_results(code, inside, nest, targets))
    else:
        store_results(code, frame, nest, targets)


def store_results(code: Code, frame: LoopState, nest: Nest, targets: Sequence[Value]) -> None:
    """Store the results of the program at the current indices."""
    cut, machine = code.loops.cut, code.machine
    for view, target, result in zip(nest.targets, targets, nest.program.results, strict=True):
        steps = {loop: stride for loop, stride in enumerate(view.strides)}
        for loop in steps:
            target = target + frame.indices[loop] * steps[loop]
        along, across = steps.get(cut.lanes, 0), steps.get(cut.rows, 0)
        for copy in frame.copies():
            if cut.lanes not in steps and copy[1]:
                continue
            address = target + (along * machine.lanes * copy[1] + across * copy[0])
            store(machine, view.dtype, code.value_at(frame, result, copy), address, along,
                  frame.counts[copy[1]] if cut.lanes in steps else 1)


# ---- scatters
def independent_loops(scatter: Scatter) -> dict[int, int]:
    """Map each loop whose index is an index into y, over the full axis, to that axis of y.

    Different iterations of such a loop update different elements, so they may run in parallel.
    """
    program, found = scatter.program, dict[int, int]()
    for axis, number in enumerate(program.results[1:]):
        one = program.operations[number]
        if one.op == "index" and scatter.loops[int(one.what or 0)] == scatter.y.shape[axis]:
            found.setdefault(int(one.what or 0), axis)
    return found


def update(code: Code, frame: LoopState, scatter: Scatter, y: Value) -> None:
    """Emit y[indices] = value, combined with the old element if the scatter has a reduction."""
    value, *indices = (code.value_at(frame, number, (0, 0)) for number in scatter.program.results)
    at = code.address(y, scatter.y.strides, indices, frame.counts[0])
    new = spread(code.machine, value)
    if scatter.combined:
        kind = scatter.program.operations[scatter.program.results[0]].kind
        new = COMBINED[scatter.combined](kind, spread(code.machine, at.load(code.machine, scatter.y.dtype)), new)
    at.store(code.machine, scatter.y.dtype, new)
