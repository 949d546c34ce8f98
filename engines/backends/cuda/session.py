"""Compiles graphs for one GPU architecture: chooses tactics, emits kernels and assembles the machine part of a plan."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer_server.engines.backends.base import Progress, TimedNode
from infer_server.engines.backends.cuda import kernels  # noqa: F401  (fills KERNELS)
from infer_server.engines.backends.cuda.codegen.assemble import cubin_of, ptx_of
from infer_server.engines.backends.cuda.codegen.gpu import gpu_named
from infer_server.engines.backends.cuda.codegen.module import GpuModule
from infer_server.engines.backends.cuda.constants import Constants
from infer_server.engines.backends.cuda.cost import CARDS
from infer_server.engines.backends.cuda.kernels.kernel import KERNELS, GpuKernel, kernel_for
from infer_server.engines.backends.cuda.runtime.driver import GpuDriver
from infer_server.engines.backends.cuda.splitting import Splitting, aligned
from infer_server.engines.backends.cuda.tuner import GpuTuner, TuningRequest, cheapest
from infer_server.engines.errors import NoKernelError
from infer_server.engines.ir.graph import BATCH, Graph
from infer_server.engines.lowering.buffers import buffers_of, fills_of, write_borders
from infer_server.engines.lowering.calls.calls import AnyCall, ProblemCall, name_of
from infer_server.engines.lowering.calls.placement import NO_BUFFER, Placement
from infer_server.engines.lowering.lower import Lowered, lower
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.lowering.steps import io_views, step_of
from infer_server.engines.machine.cpu import detect
from infer_server.engines.machine.timing_cache import TimingCache
from infer_server.engines.plan.arena import check_memory
from infer_server.engines.plan.plan import Launch, MachinePart, Operand, Plan, Step
from infer_server.engines.plan.symbolic.plans import CompiledKernel

GROUP_COUTS = 32        # groups of a convolution are merged up to this width, the smallest tile's


@dataclass(frozen=True)
class GpuChoice:
    """Kernel with its chosen tactic, and its time, either measured or estimated by cost.py."""
    kernel: GpuKernel[Any]
    tactic: Any
    seconds: float
    items: int              # items of the launch that takes `seconds`


Key = tuple[Problem, tuple[int, ...]]       # a problem and the alignments of its tensors


@dataclass(frozen=True)
class CudaChosen:
    """Lowered graph and the kernel choices of its calls."""
    lowered: Lowered
    choices: Mapping[Key, GpuChoice]
    max_batch: int
    items: int                              # batch that tactics were chosen for
    timed_on: str = ""                      # name of the GPU; "" if times are estimates

    @property
    def graph(self) -> Graph:
        return self.lowered.graph

    def choice(self, call: ProblemCall) -> GpuChoice:
        return self.choices[_key(call)]

    def times(self) -> list[TimedNode]:
        """Return a time per node, measured or estimated."""
        return [TimedNode(name_of(call), call.node.origin, self.choice(call).seconds * 1e6 / self.items)
                for call in self.lowered.compiled]

    @property
    def seconds(self) -> float:
        """Time of a batch, the sum of its launches."""
        return sum(self.choice(call).seconds for call in self.lowered.compiled)


class CudaSession:
    """Session for one architecture. Tactics are timed on a GPU of that kind, or ranked by the cost model."""
    arithmetic = ("fp32", "int8", "fp16", "bf16")
    timed: Mapping[str, Mapping[str, float]] = {}
    dynamic_kernels: Sequence[CompiledKernel] | None = None

    def __init__(self, target: str, cache: TimingCache, device: GpuDriver | None = None) -> None:
        """Create a session that times tactics on `device`, or nothing if it is None."""
        self.gpu = gpu_named(target)
        self.tuner = GpuTuner(device, self.gpu, cache) if device else None

    def take_over(self, plan: Plan, dynamic: Sequence[CompiledKernel] = ()) -> None:
        """Do nothing: each plan has its own constants."""

    @property
    def target(self) -> str:
        return self.gpu.name

    def choose_symbolic(self, graph: Graph, max_batch: int, opt_batch: int | None = None) -> None:
        """Return None: there are no dynamic kernels for GPUs."""

    @property
    def processor(self) -> str:
        return self.tuner.device.name if self.tuner else detect().model

    def choose(self, graph: Graph, max_batch: int, opt_batch: int | None = None,
               progress: Progress | None = None) -> CudaChosen:
        """Lower a graph and choose a tactic per kernel for `opt_batch` items; None means max_batch."""
        items, card = opt_batch or max(max_batch, 1), CARDS[self.target]
        lowered = Splitting(self.gpu, card, items).apply(lower(graph, GROUP_COUTS, KERNELS))
        check_memory(graph.name, buffers_of(lowered, max_batch), max_batch)
        lowered = write_borders(lowered, max_batch)
        requests = {_key(call): call for call in map(self._compiled, lowered.calls)}
        each = [self._tuning_request(call, items) for call in requests.values()]
        found = self.tuner.choose(each, card, progress) if self.tuner else [cheapest(one, card) for one in each]
        choices = {key: GpuChoice(one.kernel, tactic, seconds, one.items)
                   for key, one, (tactic, seconds) in zip(requests, each, found, strict=True)}
        return CudaChosen(lowered, choices, max_batch, items, self.tuner.device.name if self.tuner else "")

    def _compiled(self, call: AnyCall) -> ProblemCall:
        """Return the call, or raise NoKernelError if it is a host fallback."""
        if not isinstance(call, ProblemCall):
            raise NoKernelError(f"'{name_of(call)}' ({call.node.op}) cannot run on {self.target}: {call.reason}; "
                                "a plan for a GPU runs nothing on the host")
        return call

    def _tuning_request(self, call: ProblemCall, items: int) -> TuningRequest:
        problem, aligned = _key(call)
        kernel = kernel_for(problem, self.gpu, aligned)
        refusal = kernel.refusal if kernel else f"there is no GPU kernel for {problem.family}"
        if kernel is None or refusal:
            raise NoKernelError(f"'{name_of(call)}' ({call.node.op}) cannot run on {self.target}: {refusal}")
        own = call.outputs[0].items
        return TuningRequest(kernel, call.constants, items if own == BATCH else int(own))

    def settle(self, chosen: CudaChosen, progress: Progress | None = None) -> CudaChosen:
        return chosen

    def assemble(self, chosen: CudaChosen) -> MachinePart:
        """Emit and compile kernels, pack constants and lay out buffers."""
        return _Assembler(chosen, self).machine()

    def tuned(self, plan: Plan) -> Plan:
        return plan


def _key(call: ProblemCall) -> Key:
    return call.problem, tuple(map(aligned, (*call.inputs, *call.outputs)))


class _Assembler:
    """Converter of the calls of a lowered graph into steps. Equal problems with one tactic share a kernel."""

    def __init__(self, chosen: CudaChosen, session: CudaSession) -> None:
        self.chosen, self.lowered, self.gpu = chosen, chosen.lowered, session.gpu
        self.module, self.symbols = GpuModule(), dict[Any, str]()
        self.constants = Constants(chosen.graph)
        self.writers: dict[int, list[int]] = {}     # buffer -> steps
        self.steps = tuple(self._step(index, call) for index, call in enumerate(self.lowered.compiled))

    def _step(self, index: int, call: ProblemCall) -> Step:
        choice = self.chosen.choice(call)
        grid = choice.kernel.grid(choice.tactic)
        packed = [self.constants.add(array) for array in choice.kernel.pack(choice.tactic, call.constants)]
        size = sum(count for _, count in packed)
        items = call.outputs[0].items
        depends = {step for placement in call.inputs for step in self.writers.get(placement.buffer, ())}
        for placement in call.outputs:
            self.writers.setdefault(placement.buffer, []).append(index)
        step = step_of(self.lowered, call)
        return replace(
            step, symbol=self._symbol(choice),
            operands=(*map(self._operand, call.inputs), *(operand for operand, _ in packed),
                      *map(self._operand, call.outputs)),
            rows_per_item=grid.rows_per_item if items == BATCH else 0,
            rows=0 if items == BATCH else grid.rows_per_item * int(items),
            row_step=grid.row_step, columns=grid.columns, column_step=grid.column_step,
            launch=Launch(grid.threads, grid.shared_bytes), depends=tuple(sorted(depends)), constant_bytes=size,
            tactic=f"{call.problem.family}: {choice.tactic}", bytes=step.bytes + size,
            time_us=choice.seconds * 1e6 / choice.items if self.chosen.timed_on else 0.0)

    def _symbol(self, choice: GpuChoice) -> str:
        """Return the kernel's name, and emit the kernel on first use."""
        key = choice.kernel, choice.tactic
        if key not in self.symbols:
            self.symbols[key] = f"{choice.kernel.problem.family}_{len(self.symbols)}"
            choice.kernel.emit(self.module, self.symbols[key], choice.tactic)
        return self.symbols[key]

    def _operand(self, placement: Placement) -> Operand:
        if placement.buffer != NO_BUFFER:
            return Operand(placement.buffer, placement.offset)
        return Operand(None, self.constants.tensor(placement.constant).offset + placement.offset)

    def machine(self) -> MachinePart:
        ptx = ptx_of(self.module.text(), self.gpu)
        cubin = cubin_of(ptx, self.gpu)
        graph, lowered = self.lowered.graph, self.lowered
        return MachinePart(
            backend="cuda", target=self.gpu.name, cpu=self._target_metadata(),
            inputs=io_views(lowered, graph.inputs), outputs=io_views(lowered, graph.outputs),
            buffers=buffers_of(lowered, self.chosen.max_batch), fills=fills_of(lowered), steps=self.steps,
            code=(*filter(None, [cubin]), ptx.encode()), constants=self.constants.data(),
            weight_offsets=self.constants.weight_offsets)

    def _target_metadata(self) -> dict[str, Any]:
        """Describe the GPU and the expected run time, for the plan's metadata."""
        chosen = self.chosen
        expected: dict[str, Any] = {"items": chosen.items, "seconds": chosen.seconds, "timed": bool(chosen.timed_on)}
        if not chosen.timed_on:
            expected["steps_us"] = [round(node.time_us, 3) for node in chosen.times()]
        return {"architecture": self.gpu.name, "model": chosen.timed_on or CARDS[self.gpu.name].name,
                "expected": expected}
