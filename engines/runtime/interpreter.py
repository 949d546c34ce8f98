"""Interpreter of programs: runs segments, host operators, and the regions of If, Loop, Scan and SequenceMap.

A Runner is a function of the values of its region's inputs and of the captured outer values. The interpreter does not
depend on shapes; its overhead is a few microseconds for each instruction.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from infer_server.engines.errors import PlanError
from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.ir.graph import Array, Node
from infer_server.engines.ir.serialize import node_from_json
from infer_server.engines.plan.program import Instruction, Kind, Region
from infer_server.engines.runtime.host import evaluator
from infer_server.engines.runtime.iteration import BoundBody, Iteration, Segment, Value, truth

Around = Mapping[str, Value]
Compute = Callable[[list[Value]], Sequence[Value]]      # (all values of the region) -> results of the instruction


class Runner:
    """Runnable region.

    Each value has a slot in a list: the inputs the first ones, the results of an instruction consecutive ones. Looking
    values up by name would take longer than a small segment runs.
    """

    def __init__(self, region: Region, segments: Sequence[Segment], constants: Mapping[str, Array]) -> None:
        self.region = region
        self._constants = constants
        read = dict.fromkeys((*region.outputs, *(name for one in region.instructions for name in one.inputs)))
        self._beginning: list[Value] = [None] * len(region.inputs)
        self._slots = {name: slot for slot, name in enumerate(region.inputs)}
        self._slot("", None)                # an absent input
        for name in (*read, *region.captures):
            if name in constants and name not in self._slots:
                self._slot(name, constants[name])
        self._captures = [(name, self._slot(name, None)) for name in region.captures]
        self._steps = [self._step(one, segments) for one in region.instructions]
        self._results = _together(self._slots, region.outputs)
        self.bound_body = BoundBody.of(region, segments, constants)

    def run(self, inputs: Sequence[Value], around: Around) -> list[Value]:
        """Run the region and return its outputs. around: outer values by name, the captured ones among them."""
        assert len(inputs) == len(self.region.inputs), f"{len(inputs)} values for {self.region.inputs}"
        values = self._beginning.copy()
        values[:len(inputs)] = inputs
        for name, slot in self._captures:
            if name in around:
                values[slot] = around[name]
        for compute, first, last, drops in self._steps:
            results = compute(values)
            values[first:last] = results if len(results) == last - first else _so_many(results, last - first)
            for slot in drops:
                values[slot] = None
        return list(self._results(values))

    def _slot(self, name: str, value: Value) -> int:
        """Return the slot of a name; a new one has this initial value."""
        if name not in self._slots:
            self._slots[name] = len(self._beginning)
            self._beginning.append(value)
        return self._slots[name]

    def _step(self, instruction: Instruction, segments: Sequence[Segment]) -> tuple[Compute, int, int, Sequence[int]]:
        """Return the function of an instruction, the range of its results' slots, and the slots that are dead after."""
        compute, first = self._compute(instruction, segments), len(self._beginning)
        for name in instruction.outputs:
            if name:
                self._slots[name] = len(self._beginning)
            self._beginning.append(None)    # an unnamed output has a slot, too
        drops = [self._slots[name] for name in instruction.drops if name in self._slots]
        return compute, first, len(self._beginning), drops

    def _compute(self, instruction: Instruction, segments: Sequence[Segment]) -> Compute:
        select = _together(self._slots, instruction.inputs)
        if not instruction.op:
            segment = segments[instruction.segment]
            return lambda values: segment(select(values))
        node = node_from_json(instruction.node)
        regions = [Runner(region, segments, self._constants) for region in instruction.regions]
        control = _CONTROL.get(instruction.op) if regions else None
        if control is None:
            run = evaluator(node)
            return lambda values: run(*select(values))
        captured = [(name, self._slots[name]) for region in instruction.regions for name in region.captures
                    if name in self._slots]
        return lambda values: control(node, regions, select(values), {name: values[slot] for name, slot in captured})


def _together(slots: Mapping[str, int], names: Sequence[str]) -> Callable[[list[Value]], Sequence[Value]]:
    """Return a function that selects the values of these names from a list of all values."""
    if len(names) > 1:
        return itemgetter(*(slots[name] for name in names))
    if not names:
        return lambda values: ()
    slot = slots[names[0]]
    return lambda values: (values[slot],)


def _so_many(results: Sequence[Value], count: int) -> list[Value]:
    """Return exactly `count` results: extra optional outputs are dropped, absent ones are None."""
    return [*results[:count], *[None] * (count - len(results))]


def _if(node: Node, regions: Sequence[Runner], inputs: Sequence[Value], around: Around) -> list[Value]:
    return regions[0 if truth(inputs[0], node) else 1].run((), around)


def _loop(node: Node, regions: Sequence[Runner], inputs: Sequence[Value], around: Around) -> list[Value]:
    """Run ONNX's Loop: the body until its condition is false, at most `inputs[0]` times; scan outputs are stacked."""
    (body,) = regions
    most, condition = inputs[0], inputs[1] if len(inputs) > 1 else None
    limit = None if most is None else max(int(most.reshape(-1)[0]), 0)
    steps = Iteration(node, list(inputs[2:]), limit=limit, counted=True)
    if condition is not None and not truth(condition, node):
        steps.limit = 0
    steps.run(body, around)
    kinds = body.region.kinds[1 + len(steps.carried):]
    return steps.carried + [_stacked(stack, kind, 0) for stack, kind in zip(steps.stacks, kinds, strict=True)]


def _scan(node: Node, regions: Sequence[Runner], inputs: Sequence[Value], around: Around) -> list[Value]:
    """Run ONNX's Scan: the body for each slice of the scan inputs, which are the last ones."""
    if node.attrs["onnx_opset"] < 9:
        return _scan_batch(node, regions, inputs, around)
    (body,) = regions
    scanned = node.attrs["num_scan_inputs"]
    kept = len(inputs) - scanned
    carried, sources = list(inputs[:kept]), inputs[kept:]
    makes = len(body.region.outputs) - kept

    def attribute(name: str, length: int) -> Sequence[int]:
        found: Sequence[int] = node.attrs.get(name, (0,) * length)
        return found

    slices = [_moved(source, axis, 0)[::-1 if backward else 1]
              for source, axis, backward in zip(sources, attribute("scan_input_axes", scanned),
                                                attribute("scan_input_directions", scanned), strict=True)]
    steps = Iteration(node, carried, slices, len(slices[0]))
    steps.run(body, around)
    return steps.carried + [
        _stacked(stack[::-1] if backward else stack, kind, axis) for stack, kind, axis, backward in zip(
            steps.stacks, body.region.kinds[kept:], attribute("scan_output_axes", makes),
            attribute("scan_output_directions", makes), strict=True)]


def _scan_batch(node: Node, regions: Sequence[Runner], inputs: Sequence[Value], around: Around) -> list[Value]:
    """Run Scan of opset 8: each item of the batch separately; the first input is the optional sequence_lens."""
    lengths, *values = inputs
    if lengths is not None:
        raise PlanError(f"{node.op} '{node.name}': lengths of single items, which only opset 8 has, are not supported")
    attrs = {"num_scan_inputs": node.attrs["num_scan_inputs"], "onnx_opset": 9,
             "scan_input_directions": node.attrs.get("directions", (0,) * node.attrs["num_scan_inputs"])}
    items = [_scan(replace(node, attrs=attrs), regions, [value[item] for value in values], around)
             for item in range(len(values[0]))]
    return [np.stack(results) for results in zip(*items, strict=True)]


def _stacked(values: Sequence[Value] | Array, kind: Kind, axis: int) -> Array:
    """Stack the values of all steps, a list or an array, along `axis`."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(_moved(values, 0, axis))
    if values:
        return np.stack(values, axis)
    shape = [extent if isinstance(extent, int) else 0 for extent in kind.shape]
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 0)
    return np.zeros(shape, memory_dtype(kind.dtype or "float32"))


def _moved(array: Array, axis: int, destination: int) -> Array:
    """Move an axis as np.moveaxis does, which takes longer than a small step."""
    if axis == destination:
        return array
    order = list(range(array.ndim))
    order.insert(destination % array.ndim, order.pop(axis))
    return array.transpose(order)


def _map(node: Node, regions: Sequence[Runner], inputs: Sequence[Value], around: Around) -> list[Value]:
    """Run ONNX's SequenceMap: the body on the tensors at each index of the sequences; plain tensors are invariant."""
    (body,) = regions
    results = [body.run([value[index] if isinstance(value, list) else value for value in inputs], around)
               for index in range(len(inputs[0]))]
    return [list(values) for values in zip(*results, strict=True)] or [[] for _ in body.region.outputs]


_CONTROL: Mapping[str, Callable[[Node, Sequence[Runner], Sequence[Value], Around], list[Value]]] = {
    "If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _map}
