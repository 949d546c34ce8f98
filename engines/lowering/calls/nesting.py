"""Writer of a nest for a node: tensors are read at indices, and affine reads become views over the loops."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infer_server.engines.ir.graph import BATCH, Node
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.calls import Context, ProblemCall, Refused
from infer_server.engines.lowering.calls.placement import Placement, as_one_item
from infer_server.engines.lowering.nest.pointwise import write_node
from infer_server.engines.lowering.nest.program import ITEM, KINDS, Linear, NestProgram, Number, Term, Writer
from infer_server.engines.lowering.problems.nest import Nest, Scatter, Update
from infer_server.engines.lowering.problems.view import View

THE_ITEM, THE_FIRST = Linear(0, ((ITEM, 1),)), Linear(0)


@dataclass(frozen=True)
class _Source:
    """Operand of a nest."""
    placement: Placement
    view: View


class NestWriter(Writer):
    """Writer of a nest whose outer loops are the axes of a tensor, except its batch.

    Attributes
    ----------
    axes : list of Term
        Index for each axis of the tensor, including the batch.
    inner : list of Term
        Index for each reduced extent.
    """

    def __init__(self, ctx: Context, node: Node, shape: Sequence[int | str], reduced: Sequence[int] = ()) -> None:
        self.ctx, self.node, self.batched = ctx, node, BATCH in shape
        super().__init__([as_int(extent) for extent in shape if extent != BATCH], reduced)
        self.axes = [self.index(loop) for loop in range(len(self.loops))]
        if self.batched:
            self.axes.insert(shape.index(BATCH), self.along(THE_ITEM))
        self.inner = [self.index(len(self.loops) + loop) for loop in range(len(self.reduced))]
        self._sources: list[_Source] = []

    # ---- tensors
    def extent(self, name: str, axis: int) -> int:
        """Return the extent of an axis that is not the batch."""
        extent = self.ctx.type(name).shape[axis]
        if not isinstance(extent, int):
            raise Refused(f"it needs the batch size of '{name}', which is known at run time only")
        return extent

    def at(self, name: str, indices: Sequence[Term], outside: Number | None = None) -> Term:
        """Return the element of a tensor at an index per axis.

        `outside` replaces elements out of bounds; without it all indices must be in bounds.
        """
        tensor, indices = self.ctx.type(name), list(indices)
        if tensor.quant is not None:
            raise Refused(f"'{name}' is quantised")
        tests: list[Term] = []
        for axis, extent in enumerate(tensor.shape):
            if extent != BATCH and outside is not None:
                tests += self._tests(indices, axis, as_int(extent))
        value = self.at_placement(self.ctx.placements[name], tensor.shape, indices)
        return self.where(self.both(tests), value, value.like(outside or 0)) if tests else value

    def _tests(self, indices: list[Term], axis: int, extent: int) -> list[Term]:
        """Return the bounds tests of an axis that can fail, and clamp its index."""
        index, bounds = indices[axis], self.bounds(indices[axis])
        tests = [] if bounds and bounds[0] >= 0 else [index >= 0]
        tests += [] if bounds and bounds[1] < extent else [index < extent]
        if tests:
            indices[axis] = index.within(extent)
        return tests

    def wrapped_index(self, index: Term, extent: int) -> Term:
        """Return a run-time index, wrapped if negative and clamped to the axis."""
        wide = index.to("i64") if index.kind != "u64" else index.bits("i64")
        return self.where(wide < 0, wide + extent, wide).within(extent)

    def broadcast(self, name: str) -> Term:
        """Return the element of a tensor that ONNX broadcasting aligns with the nest's element."""
        shape = self.ctx.type(name).shape
        lead = len(self.axes) - len(shape)
        if lead < 0:
            raise Refused(f"'{name}' has more axes than the result")
        zero = self.constant(0, "i64")
        return self.at(name, [zero if extent == 1 else index for extent, index in
                              zip(shape, self.axes[lead:], strict=True)])

    def at_placement(self, placement: Placement, shape: Sequence[int | str], indices: Sequence[Term]) -> Term:
        """Return the element of a tensor of this shape at its placement."""
        if (dtype := placement.view.dtype) not in KINDS:
            raise Refused(f"a tensor is stored as {dtype}")
        kind, indices = KINDS[dtype], list(indices)
        if BATCH in shape:
            item, view = indices.pop(list(shape).index(BATCH)), placement.view
            if not self.batched and item.linear == THE_FIRST:
                view = replace(view, item=0)
            elif not self.batched or item.linear != THE_ITEM:
                raise Refused("it reads across the items of a batch")
        else:
            placement = as_one_item(placement) if shape else placement
            view = replace(placement.view, item=0 if self.batched else placement.view.item)
        linears = [index.linear for index in indices]
        if any(linear is None or any(loop == ITEM for loop, _ in linear.steps) for linear in linears):
            return self.pick(self._source(placement, view), kind, indices)
        steps, offset = [0] * (len(self.loops) + len(self.reduced)), 0
        for linear, stride in zip(linears, view.strides, strict=True):
            assert linear is not None
            offset += linear.offset * stride
            for loop, step in linear.steps:
                steps[loop] += step * stride
        seen = View(view.dtype, (*self.loops, *self.reduced), tuple(steps), view.item)
        return self.read(self._source(replace(placement, offset=placement.offset + offset), seen), kind)

    def _source(self, placement: Placement, view: View) -> int:
        source = _Source(replace(placement, view=view), view)
        if source not in self._sources:
            self._sources.append(source)
        return self._sources.index(source)

    # ---- results
    def target(self, name: str) -> Placement:
        """Return the placement of a result, viewed over the loops."""
        tensor, placement = self.ctx.type(name), self.ctx.placements[name]
        if tensor.quant is not None:
            raise Refused(f"'{name}' is quantised")
        if placement.view.dtype not in KINDS:
            raise Refused(f"'{name}' is stored as {placement.view.dtype}")
        if BATCH in tensor.shape or not tensor.shape:
            return placement
        return as_one_item(placement)

    def finished(self, value: Term) -> Term:
        """Apply the node's body to the anchor's result."""
        values = {self.node.anchor.outputs[0]: value}
        try:
            for part in self.node.body[1:]:
                arguments = [values[name] if name in values else self.broadcast(name) for name in part.inputs if name]
                values[part.outputs[0]] = write_node(part, arguments)
        except NotImplementedError as reason:
            raise Refused(str(reason)) from reason
        return values[self.node.outputs[0]]

    def call(self, *results: Term | None, inside: bool = False, targets: Sequence[Placement] = ()) -> ProblemCall:
        """Return a nest that stores the results as the node's outputs; None skips an output.

        `targets` are placements over the loops, for outputs whose axes are not the loops.
        """
        places = targets or [self.target(name) for name in self.node.outputs]
        stored = [(target, result) for target, result in zip(places, results, strict=False) if result is not None]
        if any((target.items == BATCH) != self.batched for target, _ in stored):
            raise Refused("only one of its input and its result has a batch axis")
        program = self.program(*(result.to(KINDS[target.view.dtype]) for target, result in stored))
        program, sources = self._pruned(program)
        places = tuple(target for target, _ in stored)
        spec = Nest(tuple(source.view for source in sources), tuple(target.view for target in places), self.loops,
                    self.reduced, program, inside)
        return ProblemCall(self.node, spec, tuple(source.placement for source in sources), places)

    def scatter(self, name: str, value: Term, indices: Sequence[Term], combined: str = "") -> ProblemCall:
        """Return a scatter: a copy of a tensor or a fill with a scalar, then stores of values in the output."""
        y, x = self.target(self.node.outputs[0]), self.ctx.placements[name]
        if (y.items == BATCH) != self.batched or self.batched and indices[0].linear != THE_ITEM:
            raise Refused("it scatters across the items of a batch")
        x = x if BATCH in self.ctx.type(name).shape else as_one_item(x)
        view = x.view if not self.batched or BATCH in self.ctx.type(name).shape else replace(x.view, item=0)
        if not self.ctx.type(name).shape:
            view = View(view.dtype, y.view.shape, (0,) * len(y.view.shape), 0)
        program = self.program(value.to(KINDS[y.view.dtype]), *indices[self.batched:])
        program, sources = self._pruned(program, first=1)
        kind = Update if self.node.outputs[0] in self.ctx.graph.in_place else Scatter
        spec = kind((view, *(source.view for source in sources)), y.view, self.loops, program, combined)
        return ProblemCall(self.node, spec, (replace(x, view=view), *(source.placement for source in sources)), (y,))

    def _pruned(self, program: NestProgram, first: int = 0) -> tuple[NestProgram, list[_Source]]:
        """Return the program and the sources that it reads, renumbered from `first`."""
        used = sorted({int(one.what or 0) for one in program.operations if one.op in ("read", "pick")})
        numbers = {old: new for new, old in enumerate(used, first)}
        operations = tuple(replace(one, what=numbers[int(one.what or 0)]) if one.op in ("read", "pick") else one
                           for one in program.operations)
        return replace(program, operations=operations), [self._sources[old] for old in used]
