"""The CPU backend: a graph with stored types decided -> all of a plan that depends on the machine."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.backends.llvm.calls import Call
from engines.backends.llvm.isa import Isa, best_isa, isa_named
from engines.backends.llvm.lower import Lowered, lower
from engines.backends.llvm.places import NO_BUFFER, Place, batch_axis, buffer_bytes
from engines.backends.llvm.scheduler import scheduler_object
from engines.backends.llvm.spec import ALIGNMENT
from engines.backends.llvm.tuner import Tuner
from engines.cpu import detect
from engines.ir import BATCH, Graph
from engines.plan import Buffer, Fallback, Fill, IoTensor, Operand, Step, TensorView
from engines.serialize import node_to_json
from engines.tactics import TimingCache

Progress = Callable[[int, int, str], None]
_PRECISIONS = {"uint8": "int8", "int8": "int8", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Compiled:
    """The machine's part of a plan."""
    target: str
    cpu: dict[str, Any]
    buffers: tuple[Buffer, ...]
    fills: tuple[Fill, ...]
    steps: tuple[Step, ...]
    code: tuple[bytes, ...]
    constants: bytes
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]


def make_tuner(target: str, cache: TimingCache, timing: bool) -> Tuner:
    """A tuner for a target by name, or for this machine ("")."""
    cpu = detect()
    isa = isa_named(target) if target else best_isa(cpu.features)
    runnable = isa.requires <= cpu.features and not (isa.triple and not isa.triple.startswith(cpu.architecture))
    return Tuner(isa, cache, cpu.model, timing and runnable)


def compile_graph(graph: Graph, tuner: Tuner, max_batch: int, progress: Progress | None = None) -> Compiled:
    """Lower, choose a tactic for each kernel, pack constants, lay out buffers.

    progress(done, of, what) is called as the kernels are chosen.
    """
    lowered = lower(graph, tuner.isa)
    assembler = _Assembler(lowered, tuner, max_batch)
    for i, call in enumerate(lowered.calls):
        if progress:
            progress(i, len(lowered.calls), call.node.name)
        assembler.add(call)
    if progress:
        progress(len(lowered.calls), len(lowered.calls), "")
    return assembler.finish()


class _Assembler:
    """Collects the calls of a lowered graph into steps."""

    def __init__(self, lowered: Lowered, tuner: Tuner, max_batch: int) -> None:
        self.lowered, self.tuner, self.max_batch = lowered, tuner, max_batch
        self.graph, self.places = lowered.graph, lowered.places
        self.steps: list[Step] = []
        self.code: dict[str, bytes] = {}
        self.constants = bytearray()
        self.tensors: dict[str, Operand] = {}       # constants that kernels read as they read any tensor
        self.readers: dict[int, list[int]] = {}     # buffer -> steps
        self.writers: dict[int, list[int]] = {}

    def add(self, call: Call) -> None:
        depends = {step for place in call.inputs for step in self.writers.get(place.buffer, ())}
        step = self._kernel(call, depends) if call.spec else self._fallback(call, depends)
        for place in call.inputs:
            self.readers.setdefault(place.buffer, []).append(len(self.steps))
        for place in call.outputs:
            self.writers.setdefault(place.buffer, []).append(len(self.steps))
        self.steps.append(step)

    # ---- steps
    def _kernel(self, call: Call, depends: set[int]) -> Step:
        spec, node = call.spec, call.node
        assert spec is not None
        choice = self.tuner.choose(spec, call.constants)
        grid = spec.grid(self.tuner.isa, choice.tactic)
        self.code[choice.kernel.symbol] = choice.kernel.code
        packed = [self._constant(array) for array in spec.pack(self.tuner.isa, choice.tactic, call.constants)]
        batched = call.outputs[0].items == BATCH
        constant_bytes = sum(size for _, size in packed)
        return Step(
            symbol=choice.kernel.symbol,
            operands=(*map(self._operand, call.inputs), *(operand for operand, _ in packed),
                      *map(self._operand, call.outputs)),
            rows_per_item=grid.rows_per_item if batched else 0,
            rows=0 if batched else grid.rows_per_item * int(call.outputs[0].items),
            row_step=grid.row_step, columns=grid.columns, column_step=grid.column_step,
            depends=tuple(sorted(depends)), constant_bytes=constant_bytes,
            name=node.name or node.outputs[0], fuses=node.origin,
            precision=getattr(spec, "precision", _PRECISIONS.get(spec.outputs[0].dtype, "fp32")),
            tactic=f"{spec.family}: {choice.tactic}", time_us=round(choice.time_us, 3),
            macs=spec.macs, bytes=spec.bytes + constant_bytes)

    def _fallback(self, call: Call, depends: set[int]) -> Step:
        node = call.node
        inputs = tuple(name if name in self.graph.constants or not name else self._view(name) for name in node.inputs)
        quants = tuple(self.graph.types[n].quant if n in self.graph.constants else None for n in node.inputs)
        fallback = Fallback(node_to_json(node), inputs, tuple(self._view(name) for name in node.outputs), quants)
        return Step(symbol="", operands=(), rows_per_item=1, depends=tuple(sorted(depends)), fallback=fallback,
                    name=node.name or node.outputs[0], fuses=node.origin, tactic="reference", reason=call.reason)

    def _constant(self, array: np.ndarray[Any, Any]) -> tuple[Operand, int]:
        """Appended on a cache line; (where, bytes)."""
        self.constants.extend(bytes(-len(self.constants) % ALIGNMENT))
        offset = len(self.constants)
        self.constants.extend(np.ascontiguousarray(array).tobytes())
        return Operand(None, offset), array.nbytes

    def _operand(self, place: Place) -> Operand:
        if place.buffer != NO_BUFFER:
            return Operand(place.buffer, place.offset)
        if place.constant not in self.tensors:
            self.tensors[place.constant], _ = self._constant(self.graph.constants[place.constant])
        return replace(self.tensors[place.constant], offset=self.tensors[place.constant].offset + place.offset)

    # ---- buffers
    def finish(self) -> Compiled:
        isa, cpu = self.tuner.isa, detect()
        self.constants.extend(bytes(ALIGNMENT * 4))     # a prefetch or the last vector may look past the end
        made_for = {"features": sorted(isa.requires), "model": cpu.model,
                    "architecture": _architecture(isa, cpu.architecture)}
        return Compiled(
            target=isa.name, cpu=made_for,
            buffers=tuple(self._buffers()), fills=tuple(self._fills()), steps=tuple(self.steps),
            code=(*self.code.values(), scheduler_object(isa)), constants=bytes(self.constants),
            inputs=tuple(map(self._io, self.graph.inputs)), outputs=tuple(map(self._io, self.graph.outputs)))

    def _buffers(self) -> list[Buffer]:
        inputs = {self.places[name].buffer for name in self.graph.inputs}
        outputs = {self.places[name].buffer for name in self.graph.outputs}
        result = []
        for i, storage in enumerate(self.places.buffers):
            first = -1 if i in inputs else min(self.writers.get(i, [len(self.steps)]))
            last = len(self.steps) if i in outputs else max([*self.readers.get(i, []), *self.writers.get(i, []), first])
            result.append(Buffer(storage.name, buffer_bytes(storage, max(self.max_batch, 1)), first, last))
        return result

    def _fills(self) -> list[Fill]:
        fills = []
        for i, storage in enumerate(self.places.buffers):
            if storage.halo:
                halo = storage.halo
                cells = ((halo.top, halo.bottom), (halo.left, halo.right), (0, 0))
                view = _tensor_view(storage.name, Place(i, 0, storage.whole, storage.items))
                fills.append(Fill(view, storage.pad, cells if view.batched else ((0, 0), *cells)))
        return fills

    def _view(self, name: str) -> TensorView:
        tensor = self.graph.types[name]
        view = _tensor_view(name, self.places[name], scalar=not tensor.shape)
        return replace(view, quant=tensor.quant, batch_axis=batch_axis(tensor))

    def _io(self, name: str) -> IoTensor:
        tensor = self.graph.types[name]
        return IoTensor(name, str(np.dtype(tensor.dtype)), tensor.shape, self._view(name))


def _architecture(isa: Isa, here: str) -> str:
    return isa.triple.split("-")[0] if isa.triple else here


def _tensor_view(name: str, place: Place, scalar: bool = False) -> TensorView:
    view = place.view
    if place.items == BATCH:
        return TensorView(name, view.dtype, view.shape, place.buffer, place.offset, view.strides, view.item)
    shape, strides = ((), ()) if scalar else ((int(place.items), *view.shape), (view.item, *view.strides))
    return TensorView(name, view.dtype, shape, place.buffer, place.offset, strides, 0, batched=False)
