"""Session of the CPU backend: builds the machine part of a plan from a graph with storage types."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from infer_server.engines.backends.base import Progress, TimedNode
from infer_server.engines.backends.llvm.codegen.executor import scheduler_object
from infer_server.engines.backends.llvm.codegen.isa import Isa, isa_named
from infer_server.engines.backends.llvm.constants import PackedConstants
from infer_server.engines.backends.llvm.kernels.kernel import Window
from infer_server.engines.backends.llvm.runtime.loaded import LoadedPlan
from infer_server.engines.backends.llvm.sharing import SharedConstants
from infer_server.engines.backends.llvm.tuning.candidates import Choice
from infer_server.engines.backends.llvm.tuning.item_major import item_major_as_in, with_item_major_runs
from infer_server.engines.backends.llvm.tuning.layouts import sharing_problems
from infer_server.engines.backends.llvm.tuning.network_timing import Trial, settled, trial_buffers
from infer_server.engines.backends.llvm.tuning.references import with_reference_times
from infer_server.engines.backends.llvm.tuning.tuner import Tuner
from infer_server.engines.ir.deferred import table
from infer_server.engines.ir.graph import BATCH, Graph
from infer_server.engines.ir.symbolic import as_int, is_symbolic
from infer_server.engines.lowering.buffers import buffers_of, fills_of, write_borders
from infer_server.engines.lowering.calls.calls import AnyCall, ProblemCall, name_of
from infer_server.engines.lowering.calls.placement import NO_BUFFER, Placement
from infer_server.engines.lowering.lower import Lowered, lower
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.steps import io_views, step_of
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.passes.quantization.weights import with_rounded_rows
from infer_server.engines.plan.arena import check_memory
from infer_server.engines.plan.plan import Footprint, MachinePart, Operand, Plan, Step
from infer_server.engines.plan.symbolic.plans import CompiledKernel

USUAL_BATCH = 32            # batch that fills tiles of any shape


@dataclass(frozen=True)
class CpuChosen:
    """Lowered graph, and the kernels of its calls."""
    lowered: Lowered
    choices: Mapping[Problem, Choice]
    expanders: Mapping[Problem, Choice]      # kernels that expand constants when a plan is loaded
    max_batch: int
    items: int                              # batch size for timing kernels that are not divided by batch

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    def times(self) -> list[TimedNode]:
        return [TimedNode(name_of(call), call.node.origin, self.choices[call.problem].time_us)
                for call in self.lowered.compiled]


@dataclass(frozen=True)
class SymbolicCalls:
    """Lowered graph whose extents may be symbolic, and the kernel of each of its calls that solve problems."""
    lowered: Lowered
    choices: Sequence[Choice]
    expanders: Mapping[Problem, Choice]
    max_batch: int

    @property
    def graph(self) -> Graph:
        return self.lowered.graph


class LlvmSession:
    """Session that builds for one instruction set. It times kernels if this machine can run them."""

    def __init__(self, target: str, cache: TimingCache, timing: bool, short_lived: bool = False,
                 sibling: LlvmSession | None = None) -> None:
        """Make a session.

        Parameters
        ----------
        target : name of the instruction set (codegen/isa.py).
        cache : times of kernels from earlier builds.
        timing : choose tactics by time, if this machine can run them; else by cost.
        short_lived : for plans that run a few times only; see Tuner.
        sibling : a session of the same build, whose compiled code this one shares if it is for the same target.
        """
        cpu, isa = detect(), isa_named(target)
        runnable = isa.requires <= cpu.features and not (isa.triple and not isa.triple.startswith(cpu.architecture))
        self.isa, self.cache = isa, cache
        code = sibling.tuner.code if sibling and sibling.isa == isa else None
        self.tuner: Tuner = Tuner(isa, cache, cpu.model, timing and runnable, short_lived, code)
        tiles = [precision for precision, _ in isa.matrix.products] if isa.matrix else []
        self.arithmetic = tuple(dict.fromkeys(("fp32", "int8", *["bf16"] * isa.bf16, *tiles)))
        self._timed: dict[str, dict[str, float]] = {}
        self._sharing_plan: Plan | None = None
        self._shared: SharedConstants | None = None

    @property
    def target(self) -> str:
        return self.isa.name

    @property
    def processor(self) -> str:
        return self.tuner.processor

    def choose(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
               progress: Progress | None = None) -> CpuChosen:
        """Lower a graph and choose a tactic for each kernel.

        opt_batch: the batch size to time with. None: one item, and also USUAL_BATCH for kernels that are divided by
        batch.
        """
        lowered, batches = self._lowered(graph, max_batch, opt_batch)
        choices = self.tuner.choose({call.problem: call.constants for call in lowered.compiled}, progress, batches,
                                    sharing_problems((call.problem, call.constants) for call in lowered.compiled))
        return CpuChosen(lowered, choices, self._expanders(choices.values()), max_batch, batches[0])

    def _lowered(self, graph: Graph, max_batch: int, opt_batch: int | None) -> tuple[Lowered, tuple[int, ...]]:
        """Return the lowered graph, and the batch sizes that kernels are chosen for."""
        batches = (1, min(max_batch, USUAL_BATCH)) if opt_batch is None and max_batch > 1 else (opt_batch or 1,)
        lowered = lower(with_rounded_rows(graph), self.isa.narrow.lanes)
        buffers = buffers_of(lowered, max_batch)
        if not is_symbolic(buffers):         # symbolic sizes are checked when they are known
            check_memory(graph.name, buffers, max_batch)
        return write_borders(lowered, max_batch), batches

    def choose_symbolic(self, graph: Graph, max_batch: int, opt_batch: int | None = None) -> SymbolicCalls:
        """Lower a graph and choose kernels that take its symbolic extents at run time; see Tuner.symbolic."""
        lowered, batches = self._lowered(graph, max_batch, opt_batch)
        choices = self.tuner.symbolic([call.problem for call in lowered.compiled], batches)
        return SymbolicCalls(lowered, choices, self._expanders(choices), max_batch)

    @property
    def dynamic_kernels(self) -> Sequence[CompiledKernel]:
        """Return the dynamic kernels known so far, and their code."""
        return self.tuner.dynamic_kernels.known

    def settle(self, chosen: CpuChosen, progress: Progress | None = None) -> CpuChosen:
        """Choose the fastest inside this network among tactics whose times are close."""
        if not self.tuner.timing:
            return chosen
        uses = [call.problem for call in chosen.lowered.compiled]
        choices = settled(chosen.choices, uses, self.tuner, chosen.items, partial(self._trial, chosen), progress)
        return replace(chosen, choices=choices, expanders=self._expanders(choices.values()))

    def assemble(self, chosen: CpuChosen | SymbolicCalls) -> MachinePart:
        """Pack constants and lay out buffers: return the machine part of a plan."""
        if isinstance(chosen, SymbolicCalls):
            choices = [[choice] for choice in chosen.choices]
        else:
            if self.tuner.timing:
                self._timed |= self.tuner.corrections(chosen.choices)
            choices = [[chosen.choices[call.problem]] for call in chosen.lowered.compiled]
        machine = _CpuAssembler(chosen, self.isa, choices, self._shared).machine()
        if self._sharing_plan and not self.tuner.timing:
            return item_major_as_in(self._sharing_plan.machine, machine, chosen.max_batch)
        return machine

    @property
    def timed(self) -> Mapping[str, Mapping[str, float]]:
        """Return the corrections of all kernels that were timed; see Tuner.corrections."""
        return self._timed

    def take_over(self, plan: Plan, dynamic: Sequence[CompiledKernel] = ()) -> None:
        """Reuse the constants, code, times and dynamic kernels of a plan. Later plans share its constants."""
        self._sharing_plan, self._shared = plan, SharedConstants(plan.machine)
        if part := plan.open:
            code = [code for one in (plan, *part.others) for code in one.machine.code]
            self.tuner.take_over(part.timed, code, dynamic)

    def _trial(self, chosen: CpuChosen, candidates: Mapping[Problem, Sequence[Choice]]) -> Trial:
        """Return a plan with the steps of all close candidates, with memory for as many items as are timed."""
        expanders = self._expanders(choice for some in candidates.values() for choice in some)
        items = chosen.items if chosen.max_batch else 0
        assembler = _CpuAssembler(replace(chosen, expanders=expanders, max_batch=items), self.isa,
                                  [candidates[call.problem] for call in chosen.lowered.compiled])
        machine = assembler.machine()
        machine = replace(machine, inputs=(), outputs=(), buffers=trial_buffers(machine.buffers, assembler.steps_of))
        # Fallback steps are not timed, but they are loaded, and read their constants from the plan.
        plan = Plan(chosen.graph.name, "", items, (), (), machine, weights=chosen.graph.constants)
        problems = [call.problem if isinstance(call, ProblemCall) else None for call in chosen.lowered.calls]
        return Trial(plan, assembler.steps_of, problems)

    def _expanders(self, choices: Iterable[Choice]) -> Mapping[Problem, Choice]:
        return self.tuner.choose({problem: {} for choice in choices
                                  for problem in choice.kernel.expansions(self.isa, choice.tactic).values()})

    def tuned(self, plan: Plan) -> Plan:
        """Return the plan with item-major runs where they are faster, and with measured times of fallback steps."""
        if not self.tuner.timing:
            return plan
        sharing = LoadedPlan(self._sharing_plan) if self._sharing_plan else None
        plan = with_item_major_runs(plan, self.cache, self.tuner.processor, sharing)
        return with_reference_times(plan, sharing)


class _CpuAssembler:
    """Assembler of steps for the calls of a lowered graph, one step for each choice of a call.

    A final plan has one choice for each call; a trial has several.
    """

    def __init__(self, chosen: CpuChosen | SymbolicCalls, isa: Isa, choices: Sequence[Sequence[Choice]],
                 shared: SharedConstants | None = None) -> None:
        self.lowered, self.isa, self.choices, self.max_batch = chosen.lowered, isa, iter(choices), chosen.max_batch
        self.steps: list[Step] = []
        self.steps_of: list[range] = []             # numbers of the steps of each call
        self.code = {choice.symbol: choice.code for choice in chosen.expanders.values()}
        self.constants = PackedConstants(chosen.graph, self.isa, chosen.expanders, shared)
        self.shared = shared.sizes if shared else ()
        self.writers: dict[int, list[int]] = {}     # buffer -> steps that write it
        for call in self.lowered.calls:
            self._add(call)

    def _add(self, call: AnyCall) -> None:
        depends = {step for placement in call.inputs for step in self.writers.get(placement.buffer, ())}
        step = replace(step_of(self.lowered, call), depends=tuple(sorted(depends)))
        first = len(self.steps)
        if isinstance(call, ProblemCall):
            self.steps += [self._kernel(call, step, choice) for choice in next(self.choices)]
        else:
            for name in self.lowered.graph.constants.keys() & {*call.node.inputs}:
                self.constants.store_own(name)
            self.steps.append(step)
        self.steps_of.append(range(first, len(self.steps)))
        for placement in call.outputs:
            self.writers.setdefault(placement.buffer, []).extend(self.steps_of[-1])

    # ---- steps
    def _kernel(self, call: ProblemCall, step: Step, choice: Choice) -> Step:
        grid = choice.kernel.grid(self.isa, choice.tactic)
        self.code[choice.symbol] = choice.code
        packed = self.constants.add_packed(call, choice)
        parameters = () if choice.parameters is None else (
            self.constants.add(table(choice.parameters or (0,), np.dtype(np.int64)))[0],)
        batched = call.outputs[0].items == BATCH
        constant_bytes = sum(size for _, size in packed)
        windows = choice.kernel.windows(self.isa, choice.tactic)
        reads, writes = (tuple(_footprint(placement, window, grid.rows_per_item) for placement, window in pairs
                               if placement.buffer != NO_BUFFER)
                         for pairs in (zip(call.inputs, windows, strict=False),
                                       zip(call.outputs, windows[len(call.inputs):], strict=True)))
        return replace(
            step, symbol=choice.symbol,
            operands=(*map(self._operand, call.inputs), *(operand for operand, _ in packed),
                      *map(self._operand, call.outputs), *parameters),
            rows_per_item=grid.rows_per_item if batched else 0,
            rows=0 if batched else grid.rows_per_item * as_int(call.outputs[0].items),
            row_step=grid.row_step, columns=grid.columns, column_step=grid.column_step,
            reads=reads, writes=writes, constant_bytes=constant_bytes, further_item=round(choice.further_item, 3),
            tactic=f"{call.problem.family}: {choice.tactic}", time_us=round(choice.time_us, 3),
            bytes=step.bytes + constant_bytes)

    def _operand(self, placement: Placement) -> Operand:
        if placement.buffer != NO_BUFFER:
            return Operand(placement.buffer, placement.offset)
        constant = self.constants.tensor(placement.constant)
        return replace(constant, offset=constant.offset + placement.offset)

    # ---- buffers
    def machine(self) -> MachinePart:
        isa, cpu = self.isa, detect()
        made_for = {"features": sorted(isa.requires), "model": cpu.model,
                    "architecture": isa.triple.partition("-")[0] or cpu.architecture}
        return MachinePart(
            backend="llvm", target=isa.name, cpu=made_for,
            buffers=buffers_of(self.lowered, self.max_batch), fills=fills_of(self.lowered), steps=tuple(self.steps),
            code=(*dict.fromkeys(self.code.values()), scheduler_object(isa)), constants=self.constants.data(),
            expanded=tuple(self.constants.expanded), weight_offsets=self.constants.weight_offsets, shared=self.shared,
            inputs=io_views(self.lowered, self.lowered.graph.inputs),
            outputs=io_views(self.lowered, self.lowered.graph.outputs))


def _footprint(placement: Placement, window: Window, period: int) -> Footprint:
    return Footprint(placement.buffer, placement.offset + window.begin, placement.offset + window.end, window.rows,
                     window.stride, placement.view.item, period)
