"""Report of how much of a plan is compiled: number of steps, share of the time, and why the others are not.

    coverage = coverage_of(plan)
    coverage.line           # coverage: 57 of 60 steps compiled (97.1 % of the time), 3 by reference (2.9 %); ...
    coverage.reasons        # a line for each operator and reason of the steps by reference

Steps that only rewrite a halo count in the time, not in the number of steps. Without timings, times are estimated from
the bytes and multiply-accumulates of a step: a kernel at the rates of an ordinary core, the reference at those of
NumPy plus a constant for each call.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from infer_server.engines.ir.dtypes import memory_dtype
from infer_server.engines.plan.extents import text
from infer_server.engines.plan.plan import Fallback, Plan, Step, TensorView
from infer_server.engines.plan.program import Instruction, Region

KERNEL_MACS_PER_US, KERNEL_BYTES_PER_US = 20_000, 8_000
REFERENCE_BYTES_PER_US, REFERENCE_CALL_US = 500, 50
TIMED, ESTIMATED = "timed at the build", "estimated by what steps move and multiply"
PARTLY = "timed at the build, but estimated for what the reference could not run there, or the host runs"
NAME = re.compile("'[^']*'")
MOST_NAMES = 8              # most nodes named per reason


@dataclass(frozen=True)
class ByReference:
    """A step that no kernel runs."""
    operator: str
    node: str
    reason: str
    time_us: float


@dataclass(frozen=True)
class Coverage:
    """The steps of a plan and of all specialisations in it, by what runs them."""
    compiled: int                           # steps for all shapes that the plan takes
    specialised: int                        # steps for certain numbers of its open extents
    by_reference: tuple[ByReference, ...]
    kernels_us: float                       # time of the kernels for one item, halos included
    basis: str                              # how the times were obtained
    extents: tuple[str, ...] = ()           # extents of each specialisation

    @property
    def steps(self) -> int:
        return self.compiled + self.specialised + len(self.by_reference)

    @cached_property
    def reference_share(self) -> float:
        """Share of the time that the steps by reference take, 0 to 1."""
        reference = sum(step.time_us for step in self.by_reference)
        return reference / (reference + self.kernels_us) if reference else 0.0

    @property
    def line(self) -> str:
        """Summary in one line."""
        how = f"specialised for {'; '.join(self.extents)}" if self.extents else "compiled"
        reference = f"{len(self.by_reference)} by reference"
        done = self.compiled + self.specialised
        if not self.by_reference:
            return f"coverage: {done} of {self.steps} steps {how}, {reference}"
        share = 100 * self.reference_share
        return (f"coverage: {done} of {self.steps} steps {how} ({100 - share:.1f} % of the time), {reference} "
                f"({share:.1f} %); {self.basis}")

    @property
    def reasons(self) -> str:
        """One line for each operator and reason (tensor names ignored), the most expensive first."""
        def alike(step: ByReference) -> tuple[str, str]:
            return step.operator, NAME.sub("", step.reason)

        groups = [list(group) for _, group in groupby(sorted(self.by_reference, key=alike), alike)]
        groups.sort(key=lambda group: -sum(step.time_us for step in group))
        whole = self.kernels_us + sum(step.time_us for step in self.by_reference)
        return "\n".join(f"  {group[0].operator}, {100 * sum(step.time_us for step in group) / whole:.1f} %: "
                         f"{group[0].reason} ({_names(group)})" for group in groups)


def _names(steps: list[ByReference]) -> str:
    names = list(dict.fromkeys(f"'{step.node}'" for step in steps))
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def writes_border(step: Step) -> bool:
    """Return True if the step only rewrites the halo of a buffer that shares memory with others."""
    return step.tactic.startswith("halo_fill:")


def coverage_of(plan: Plan) -> Coverage:
    """Return the coverage of a plan, including its specialisations and the segments of a program."""
    if plan.open or plan.program:
        plans = [one for one in plan.within() if not one.program]
        parts = [_of_one(one) for one in plans]
        host = tuple(map(_by_host, _host_operators(plan.program.main))) if plan.program else ()
        return Coverage(0, sum(part.compiled for part in parts),
                         (*(step for part in parts for step in part.by_reference), *host),
                         sum(part.kernels_us for part in parts),
                         ESTIMATED if not parts else PARTLY if host and parts[0].basis == TIMED else parts[0].basis,
                         tuple(text(one.extents) for one in plans) if plan.open else ("what it was tried on",))
    return _of_one(plan)


def _host_operators(region: Region) -> Iterator[Instruction]:
    """Yield the instructions that the host evaluates, those inside branches and loops included."""
    for instruction in region.instructions:
        if instruction.by_host:
            yield instruction
        for inner in instruction.regions:
            yield from _host_operators(inner)


def _by_host(instruction: Instruction) -> ByReference:
    return ByReference(instruction.op, instruction.name, "the host evaluates it, between the segments of a program",
                       REFERENCE_CALL_US)


def _of_one(plan: Plan) -> Coverage:
    machine = plan.machine
    kernels = [step for step in machine.steps if machine.code and not step.fallback]
    reference = [step for step in machine.steps if not machine.code or step.fallback]
    timed = any(step.time_us for step in kernels) or not kernels
    found = tuple(_by_reference(plan, step, timed) for step in reference)
    us = sum(step.time_us if timed else _kernel_us(step) for step in kernels)
    basis = ESTIMATED if not timed else TIMED if all(step.time_us for step in reference) else PARTLY
    return Coverage(sum(not writes_border(step) for step in kernels), 0, found, us, basis)


def _by_reference(plan: Plan, step: Step, timed: bool) -> ByReference:
    operator = _operator(step.fallback) if step.fallback else step.tactic.partition(":")[0]
    reason = step.reason or f"nothing is compiled for the target '{plan.machine.target}'"
    estimate = REFERENCE_CALL_US + _reference_bytes(plan, step) / REFERENCE_BYTES_PER_US
    return ByReference(operator, step.name, reason, step.time_us if timed and step.time_us else estimate)


def _operator(fallback: Fallback) -> str:
    """Return the ONNX operator of a fallback; for fused nodes, that of the first one in the body."""
    anchor, *_ = fallback.node.get("body", [fallback.node])
    return str(anchor["op"]).removeprefix("onnx.")


def _kernel_us(step: Step) -> float:
    return max(step.macs / KERNEL_MACS_PER_US, step.bytes / KERNEL_BYTES_PER_US)


def _reference_bytes(plan: Plan, step: Step) -> int:
    if step.fallback is None:
        return step.bytes
    tensors = (*step.fallback.inputs, *step.fallback.outputs)
    return sum(math.prod(one.shape) * memory_dtype(one.dtype).itemsize if isinstance(one, TensorView) else
               plan.weights[one].nbytes if one in plan.weights else 0 for one in tensors)
