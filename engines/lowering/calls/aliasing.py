"""Alias analysis: which tensors are views of another tensor's buffer, so that nothing is copied.

  Split, Slice     outputs are parts of the input
  Concat           inputs are parts of the output, if they are not views yet: their producers write there directly
  Reshape          the output is the input, if the strides allow it
  Transpose        next to a product of two run-time tensors, which reads and writes any axis order
  Pad with zeros   the output is the input with its halo
  Graph.in_place   the output is the leading part of the input that it overwrites

Tensors in one buffer share its halo. Constant tensors have placements in the plan's constants.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from infer_server.engines.errors import ModelError
from infer_server.engines.ir.graph import BATCH, Dim, Graph, Node, TensorType
from infer_server.engines.ir.symbolic import as_int
from infer_server.engines.lowering.calls.halos import halo_of_pad, required_halos
from infer_server.engines.lowering.calls.placement import (
    ITEMS,
    NO_BUFFER,
    Placement,
    Storage,
    batch_axis,
    has_batch,
    item_shape,
    items_of,
    items_stay,
    reshaped,
    stored_dtype,
)
from infer_server.engines.lowering.problems.view import SIZES, Halo, View, dense_view
from infer_server.engines.ops import describe
from infer_server.engines.passes.rewriting.facts import is_product, is_view_of_input, is_view_of_output

VIEWS = ("Split", "Slice", "Reshape", "Transpose")      # operators whose outputs may be views of the input


class Aliasing:
    """Map from tensor names to placements for a whole graph. `buffers` are in order of creation."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.buffers: list[Storage] = []
        self._placements: dict[str, Placement] = {}
        self._required = self._required_halos()
        self._parent: dict[str, _ViewOf] = {}
        _check_dtypes(graph)
        for output, source in graph.in_place.items():
            axis = graph.producer[output].attrs["axis"] % len(graph.shape(output))
            self._parent[output] = _ViewOf(source, cuts=((axis - 1, 0, as_int(graph.shape(output)[axis]), 1),))
        for node in graph.nodes:
            self._record_views(node)
            self._record_pad(node)
        for node in reversed(graph.nodes):
            self._record_concat(node)
            self._record_transposed_product(node)
        self._drop_strided_reshapes()
        self._group_halos = self._halos_of_groups({})
        for name in self._tensors():
            self._placement_of(name, self._placements, self._new_buffer)

    def __getitem__(self, name: str) -> Placement:
        if name in self.graph.constants:
            tensor = self.graph.types[name]
            return Placement(NO_BUFFER, 0, dense_view(stored_dtype(tensor), item_shape(tensor)), items_of(tensor), name)
        return self._placements[name]

    def scratch(self, name: str, view: View, items: Dim) -> Placement:
        """Create a buffer for data that a node's kernels exchange."""
        self.buffers.append(Storage(name, view, items))
        return Placement(len(self.buffers) - 1, 0, view, items)

    def is_view(self, child: str, parent: str) -> bool:
        """Return True if `child` lies inside the buffer of `parent`, so that nothing is copied between them."""
        inside = self._parent.get(child)
        return inside is not None and inside.parent == parent

    # ---- views
    def _tensors(self) -> Iterator[str]:
        yield from self.graph.inputs
        for node in self.graph.nodes:
            yield from node.outputs

    def _required_halos(self) -> dict[str, Halo]:
        required: dict[str, Halo] = {}
        for node in self.graph.nodes:
            for name, halo in required_halos(self.graph, node).items():
                required[name] = required.get(name, Halo()) | halo
        return required

    def _same_storage(self, a: str, b: str, cut: int = 0) -> bool:
        """Return True if both tensors are stored alike with leading items.

        One can then be a part of the other, cut along axis `cut` of the item.
        """
        one, other = self.graph.types[a], self.graph.types[b]
        return ((one.quant, stored_dtype(one)) == (other.quant, stored_dtype(other))
                and (items_of(one) == items_of(other) or cut == ITEMS and not has_batch(one) and not has_batch(other))
                and not batch_axis(one) and not batch_axis(other))

    def _record_views(self, node: Node) -> None:
        if node.op not in VIEWS or node.inputs[0] in self.graph.constants:
            return
        source, types = node.inputs[0], self.graph.types
        if node.op == "Transpose":
            self._record_transpose(node)
            return
        if node.op == "Reshape":
            self._record_reshape(node)
            return
        cuts = cuts_of(node, types[source], [types[o] for o in node.outputs])
        for output, cut in zip(node.outputs, cuts, strict=True):
            rank = len(types[source].shape) - 1
            moves_rows = any(ITEMS < axis < rank - 1 for axis, *_ in cut or ())
            strided = any(axis == rank - 1 and step != 1 for axis, _, _, step in cut or ())
            alike = self._same_storage(source, output, min((axis for axis, *_ in cut or ()), default=0))
            if cut is not None and alike and not strided and not (moves_rows and self._required.get(output)):
                self._parent[output] = _ViewOf(source, cuts=tuple(cut))

    def _record_reshape(self, node: Node) -> None:
        """Record a Reshape as a view. Without a batch, the leading axis may change, too."""
        source, output = (self.graph.types[name] for name in (node.inputs[0], node.outputs[0]))
        batched = BATCH in output.shape
        if (items_stay(source, output) if batched else BATCH not in source.shape) and (
                (source.quant, stored_dtype(source)) == (output.quant, stored_dtype(output))):
            shape = item_shape(output) if batched else tuple(map(as_int, output.shape)) or (1,)
            self._parent[node.outputs[0]] = _ViewOf(node.inputs[0], reshape=shape)

    def _record_pad(self, node: Node) -> None:
        """Record a Pad as a view, unless a convolution pads its output again: a halo around a halo is a copy."""
        if node.op != "Pad" or self._required.get(node.outputs[0]):
            return
        if halo := halo_of_pad(self.graph, node):
            self._parent[node.outputs[0]] = _ViewOf(node.inputs[0], halo=halo)

    def _record_transpose(self, node: Node) -> None:
        """Record a Transpose as a view. The batch leads in memory, so moving only the batch axis moves no data."""
        source, output = node.inputs[0], node.outputs[0]
        axes = self._transposed_axes(node)
        if axes == tuple(range(len(node.attrs["perm"]))) and items_of(self.graph.types[source]) == BATCH:
            self._parent[output] = _ViewOf(source)
        elif axes is not None and is_view_of_input(self.graph, node):
            self._parent[output] = _ViewOf(source, perm=axes)

    def _transposed_axes(self, node: Node) -> tuple[int, ...] | None:
        """Return the permutation of axes in memory, items first, or None if the tensors cannot share memory."""
        source, target = (self.graph.types[name] for name in (node.inputs[0], node.outputs[0]))
        if (source.quant, stored_dtype(source)) != (target.quant, stored_dtype(target)):
            return None
        if items_of(source) != BATCH:
            return tuple(node.attrs["perm"])
        axes = item_perm(node, source)
        return None if axes is None else (0, *(axis + 1 for axis in axes))

    def _record_concat(self, node: Node) -> None:
        if node.op != "Concat":
            return
        output, types = node.outputs[0], self.graph.types
        rank = len(types[output].shape)
        axis = node.attrs["axis"] % rank - 1
        if axis == ITEMS and has_batch(types[output]):
            return
        start = 0
        for name in node.inputs:
            extent = as_int(types[name].shape[axis + 1])
            free = (name in self.graph.producer and name not in self._parent
                    and self._same_storage(name, output, axis)
                    and (axis in (ITEMS, rank - 2) or not self._required.get(name))
                    and node.inputs.count(name) == 1)
            if free:
                self._parent[name] = _ViewOf(output, cuts=((axis, start, start + extent, 1),))
            start += extent

    def _record_transposed_product(self, node: Node) -> None:
        if node.op != "Transpose" or not is_view_of_output(self.graph, node):
            return
        source, output, axes = node.inputs[0], node.outputs[0], self._transposed_axes(node)
        if axes is not None and output not in self._parent and source not in self._parent:
            self._parent[source] = _ViewOf(output, perm=tuple(axes.index(axis) for axis in range(len(axes))))

    def _drop_strided_reshapes(self) -> None:
        """Drop views by Reshape of a tensor with gaps if one of the new axes would cross a gap."""
        flat: dict[str, Placement] = {}
        roots: dict[str, str] = {}
        halos = self._halos_of_groups(roots)
        for name, inside in list(self._parent.items()):
            if inside.reshape is not None and (halos.get(self._root(inside.parent, roots)) or self._required.get(name)
                                               or not self._can_reshape(name, inside, flat)):
                del self._parent[name]
                flat.clear()
                roots.clear()
                halos = self._halos_of_groups(roots)

    def _can_reshape(self, name: str, inside: _ViewOf, flat: dict[str, Placement]) -> bool:
        """Return True if a Reshape can be a view. `flat` caches placements in buffers without halos."""
        assert inside.reshape is not None
        if inside.parent not in self._parent:
            return True
        seen = reshaped(self._placement_of(inside.parent, flat, self._flat_buffer), inside.reshape)
        return seen is not None and (len(seen.view.shape) <= 3 or all(
            is_product(self.graph, node) or node.op == "Transpose" and is_view_of_input(self.graph, node)
            for node in self.graph.consumers[name]))

    def _flat_buffer(self, name: str) -> Placement:
        """Return the tensor as a whole buffer without a halo."""
        tensor = self.graph.types[name]
        return Placement(0, 0, dense_view(stored_dtype(tensor), item_shape(tensor)), items_of(tensor))

    def _root(self, name: str, known: dict[str, str]) -> str:
        """Return the tensor that owns the buffer of this one."""
        path = []
        while name not in known and name in self._parent:
            path.append(name)
            name = self._parent[name].parent
        root = known.get(name, name)
        known.update(dict.fromkeys(path, root))
        return root

    def _halos_of_groups(self, roots: dict[str, str]) -> dict[str, Halo]:
        """Return the halo of each buffer, by the tensor that owns it."""
        halos: dict[str, Halo] = {}
        for name, required in self._required.items():
            root = self._root(name, roots)
            halos[root] = halos.get(root, Halo()) | required
        return halos

    # ---- placements
    def _placement_of(self, name: str, known: dict[str, Placement], buffer: Callable[[str], Placement]) -> Placement:
        """Return the placement of a tensor; `known` caches it and those of its parents."""
        path = []
        while name not in known and name in self._parent:
            path.append(name)
            name = self._parent[name].parent
        if name not in known:
            known[name] = buffer(name)
        placement = known[name]
        for inner in reversed(path):
            placement = known[inner] = self._parent[inner].derive(placement)
        return placement

    def _new_buffer(self, name: str) -> Placement:
        """Create a buffer with the halo that its views need."""
        tensor, halo = self.graph.types[name], self._group_halos.get(name, Halo())
        dtype, shape = stored_dtype(tensor), item_shape(tensor)
        whole = dense_view(dtype, halo.around(shape) if halo else shape)
        pad = float(tensor.quant.zero_point[0]) if tensor.quant else 0.0
        self.buffers.append(Storage(name, whole, items_of(tensor), halo, pad))
        placement = Placement(len(self.buffers) - 1, 0, whole, items_of(tensor))
        if halo:
            placement = placement.moved(*(-index for index in halo.corner(len(shape))))
        return replace(placement, view=replace(whole, shape=shape))


@dataclass(frozen=True)
class _ViewOf:
    """View of a tensor in another: cut along the item's axes, with its halo, permuted, or reshaped."""
    parent: str
    cuts: tuple[tuple[int, int, int, int], ...] = ()        # (axis, start, stop, step)
    halo: Halo = Halo()
    reshape: tuple[int, ...] | None = None
    perm: tuple[int, ...] = ()                              # permutation of the items and the item's axes

    def derive(self, placement: Placement) -> Placement:
        view = placement.view
        if self.reshape is not None:
            seen = reshaped(placement, self.reshape)
            assert seen is not None
            return seen
        if self.perm:
            sizes, steps = (placement.items, *view.shape), (view.item, *view.strides)
            items, *inner = (sizes[axis] for axis in self.perm)
            item, *gaps = (steps[axis] for axis in self.perm)
            return replace(placement, view=View(view.dtype, tuple(map(as_int, inner)), tuple(gaps), item), items=items)
        for cut in self.cuts:
            placement = placement.part(*cut)
        return placement.with_halo(self.halo)


def _check_dtypes(graph: Graph) -> None:
    """Raise ModelError for a tensor, or a constant that is not folded, of a dtype that plans cannot hold."""
    for name in (*graph.inputs, *graph.constants, *(o for node in graph.nodes for o in node.outputs if o)):
        if (dtype := stored_dtype(graph.types[name])) not in SIZES:
            maker = graph.producer.get(name) or next(iter(graph.consumers.get(name, ())), None)
            where = f", of {describe(maker)}," if maker else ""
            raise ModelError(f"{graph.name}: tensor '{name}'{where} is of type {dtype}, which is supported only in "
                             f"constants that become another type at build; tensors may be of {', '.join(SIZES)}")


def cuts_of(node: Node, source: TensorType, outputs: list[TensorType]) -> list[list[tuple[int, int, int, int]] | None]:
    """Return the cuts of each output of a Split or Slice.

    Returns
    -------
    list
        Per output, tuples (axis of the item or ITEMS, start, stop, step), or None if it cannot be a view.
    """
    rank = len(source.shape)
    if node.op == "Split":
        axis = node.attrs.get("axis", 0) % rank
        if axis == 0 and has_batch(source):
            return [None] * len(outputs)
        result: list[list[tuple[int, int, int, int]] | None] = []
        start = 0
        for output in outputs:
            extent = as_int(output.shape[axis])
            result.append([(axis - 1, start, start + extent, 1)])
            start += extent
        return result
    axes, starts, steps = (list(node.attrs[key]) for key in ("axes", "starts", "steps"))
    cut: list[tuple[int, int, int, int]] = []
    for axis, start, step in zip(axes, starts, steps, strict=True):
        axis %= rank
        if axis == 0 and has_batch(source) or step < 1:
            return [None]
        extent = as_int(source.shape[axis])
        start = min(max(start + extent if start < 0 else start, 0), extent)
        count = as_int(outputs[0].shape[axis])
        cut.append((axis - 1, start, start + (count - 1) * step + 1, step))
    return [cut]


def item_perm(node: Node, source: TensorType) -> tuple[int, ...] | None:
    """Return a Transpose's permutation of the item's axes, or None if it moves a leading axis that is not the batch."""
    perm = node.attrs.get("perm") or tuple(reversed(range(len(source.shape))))
    if items_of(source) != BATCH and perm[0] != 0:
        return None
    axis = batch_axis(source)
    return tuple(a - (a > axis) for a in perm if a != axis)
