"""Liveness analysis: find the values of a region that an instruction is the last one to use."""
from __future__ import annotations

from dataclasses import replace

from infer_server.engines.plan.program import Instruction, Region


def with_drops(region: Region) -> Region:
    """Return the region with `drops` of each instruction set to the values that it is the last one to use."""
    needed = {*region.outputs}
    found: list[Instruction] = []
    for instruction in reversed(region.instructions):
        used = {*filter(None, instruction.inputs), *filter(None, instruction.outputs)}.union(
            *(inner.captures for inner in instruction.regions))
        found.append(replace(instruction, drops=tuple(sorted(used - needed))))
        needed |= used
    return replace(region, instructions=tuple(reversed(found)))
