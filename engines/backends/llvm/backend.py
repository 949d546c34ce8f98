"""The CPU backend: a graph with stored types decided -> all of a plan that depends on the machine."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engines.backends.llvm.codegen.executor import scheduler_object
from engines.backends.llvm.codegen.isa import Isa, best_isa, isa_named
from engines.backends.llvm.constants import Constants
from engines.backends.llvm.kernels.kernel import Window
from engines.backends.llvm.tuning.tuner import Choice, Progress, Tuner
from engines.ir.graph import BATCH, Graph
from engines.ir.serialize import node_to_json
from engines.lowering.buffers import buffers_of, check_memory, fills_of, write_borders
from engines.lowering.calls.calls import Call
from engines.lowering.calls.placement import NO_BUFFER, Placement, batch_axis, tensor_view
from engines.lowering.lower import Lowered, lower
from engines.lowering.problems.problem import Problem
from engines.machine.cpu import detect
from engines.machine.timing_cache import TimingCache
from engines.plan.plan import Buffer, ExpandedConstant, Fallback, Fill, Footprint, IoTensor, Operand, Step, TensorView

USUAL_BATCH = 32            # of full tiles, whatever their shape
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
    expanded: tuple[ExpandedConstant, ...]
    weight_offsets: dict[str, int]
    inputs: tuple[IoTensor, ...]
    outputs: tuple[IoTensor, ...]


def make_tuner(target: str, cache: TimingCache, timing: bool, short_lived: bool = False) -> Tuner:
    """A tuner for a target by name, or for this machine ("")."""
    cpu = detect()
    isa = isa_named(target) if target else best_isa(cpu.features)
    runnable = isa.requires <= cpu.features and not (isa.triple and not isa.triple.startswith(cpu.architecture))
    return Tuner(isa, cache, cpu.model, timing and runnable, short_lived)


@dataclass(frozen=True)
class Chosen:
    """A lowered graph, and the kernels of its calls."""
    lowered: Lowered
    isa: Isa
    choices: Mapping[Problem, Choice]
    makers: Mapping[Problem, Choice]         # of constants, when a plan is loaded
    max_batch: int

    def time_us(self, call: Call) -> float:
        """As timed, for one item; 0 where nothing was."""
        return self.choices[call.problem].time_us if call.problem else 0.0


def choose_kernels(graph: Graph, tuner: Tuner, max_batch: int, opt_batch: int | None = None,
                   progress: Progress | None = None) -> Chosen:
    """Lower a graph and choose a tactic for each kernel. progress(done, of, what) is called as they are compiled and
    timed.

    opt_batch: the batch that they are timed with; None: one item, and USUAL_BATCH where kernels are cut by batch.
    """
    batches = (1, min(max_batch, USUAL_BATCH)) if opt_batch is None and max_batch > 1 else (opt_batch or 1,)
    lowered = lower(graph, tuner.isa.lanes)
    check_memory(lowered, max_batch)
    lowered = write_borders(lowered, max_batch)
    choices = tuner.choose({call.problem: call.constants for call in lowered.calls if call.problem}, progress, batches)
    made = tuner.choose({maker: {} for choice in choices.values()
                         for maker in choice.kernel.made(tuner.isa, choice.tactic).values()})
    return Chosen(lowered, tuner.isa, choices, made, max_batch)


def assemble(chosen: Chosen) -> Compiled:
    """Pack constants, lay out buffers."""
    assembler = _Assembler(chosen)
    for call in chosen.lowered.calls:
        assembler.add(call)
    return assembler.finish()


class _Assembler:
    """Collects the calls of a lowered graph into steps."""

    def __init__(self, chosen: Chosen) -> None:
        self.lowered, self.isa, self.choices, self.max_batch = (chosen.lowered, chosen.isa, chosen.choices,
                                                                chosen.max_batch)
        self.graph, self.placements = self.lowered.graph, self.lowered.placements
        self.steps: list[Step] = []
        self.code = {choice.symbol: choice.code for choice in chosen.makers.values()}
        self.constants = Constants(self.graph, self.isa, chosen.makers)
        self.writers: dict[int, list[int]] = {}     # buffer -> steps

    def add(self, call: Call) -> None:
        depends = {step for placement in call.inputs for step in self.writers.get(placement.buffer, ())}
        step = self._kernel(call, depends) if call.problem else self._fallback(call, depends)
        for placement in call.outputs:
            self.writers.setdefault(placement.buffer, []).append(len(self.steps))
        self.steps.append(step)

    # ---- steps
    def _kernel(self, call: Call, depends: set[int]) -> Step:
        problem, node = call.problem, call.node
        assert problem is not None
        choice = self.choices[problem]
        grid = choice.kernel.grid(self.isa, choice.tactic)
        self.code[choice.symbol] = choice.code
        packed = self.constants.add_packed(call, choice)
        batched = call.outputs[0].items == BATCH
        constant_bytes = sum(size for _, size in packed)
        windows = choice.kernel.windows(self.isa, choice.tactic)
        reads, writes = (tuple(_reach(placement, window, grid.rows_per_item) for placement, window in pairs
                               if placement.buffer != NO_BUFFER)
                         for pairs in (zip(call.inputs, windows, strict=False),
                                       zip(call.outputs, windows[len(call.inputs):], strict=True)))
        return Step(
            symbol=choice.symbol,
            operands=(*map(self._operand, call.inputs), *(operand for operand, _ in packed),
                      *map(self._operand, call.outputs)),
            rows_per_item=grid.rows_per_item if batched else 0,
            rows=0 if batched else grid.rows_per_item * int(call.outputs[0].items),
            row_step=grid.row_step, columns=grid.columns, column_step=grid.column_step,
            depends=tuple(sorted(depends)), reads=reads, writes=writes, constant_bytes=constant_bytes,
            further_item=round(choice.further_item, 3), name=call.name, fuses=node.origin,
            precision=getattr(problem, "precision", _PRECISIONS.get(problem.outputs[0].dtype, "fp32")),
            tactic=f"{problem.family}: {choice.tactic}", time_us=round(choice.time_us, 3),
            macs=problem.macs, bytes=problem.bytes + constant_bytes)

    def _fallback(self, call: Call, depends: set[int]) -> Step:
        node = call.node
        for name in self.graph.constants.keys() & {*node.inputs}:
            self.constants.tensor(name)     # the reference reads it from there
        inputs = tuple(name if name in self.graph.constants or not name else self._view(name) for name in node.inputs)
        quants = tuple(self.graph.types[n].quant if n in self.graph.constants else None for n in node.inputs)
        fallback = Fallback(node_to_json(node), inputs, tuple(self._view(name) for name in node.outputs), quants)
        return Step(symbol="", operands=(), rows_per_item=1, depends=tuple(sorted(depends)), fallback=fallback,
                    name=call.name, fuses=node.origin, tactic="reference", reason=call.reason)

    def _operand(self, placement: Placement) -> Operand:
        if placement.buffer != NO_BUFFER:
            return Operand(placement.buffer, placement.offset)
        return Operand(None, self.constants.tensor(placement.constant).offset + placement.offset)

    # ---- buffers
    def finish(self) -> Compiled:
        isa, cpu = self.isa, detect()
        made_for = {"features": sorted(isa.requires), "model": cpu.model,
                    "architecture": _architecture(isa, cpu.architecture)}
        return Compiled(
            target=isa.name, cpu=made_for,
            buffers=buffers_of(self.lowered, self.max_batch), fills=fills_of(self.lowered), steps=tuple(self.steps),
            code=(*self.code.values(), scheduler_object(isa)), constants=self.constants.data(),
            expanded=self.constants.expanded(),
            weight_offsets=self.constants.weight_offsets,
            inputs=tuple(map(self._io, self.graph.inputs)), outputs=tuple(map(self._io, self.graph.outputs)))

    def _view(self, name: str) -> TensorView:
        tensor = self.graph.types[name]
        view = tensor_view(name, self.placements[name], scalar=not tensor.shape)
        return replace(view, quant=tensor.quant, batch_axis=batch_axis(tensor))

    def _io(self, name: str) -> IoTensor:
        tensor = self.graph.types[name]
        return IoTensor(name, str(np.dtype(tensor.dtype)), tensor.shape, self._view(name))


def _architecture(isa: Isa, here: str) -> str:
    return isa.triple.split("-")[0] if isa.triple else here


def _reach(placement: Placement, window: Window, period: int) -> Footprint:
    return Footprint(placement.buffer, placement.offset + window.begin, placement.offset + window.end, window.rows,
                 window.stride, placement.view.item, period)
