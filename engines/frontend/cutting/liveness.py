"""Which values of a region nobody needs after an instruction."""
from __future__ import annotations

from dataclasses import replace

from engines.plan.program import Instruction, Region


def with_drops(region: Region) -> Region:
    """The region with the values that each instruction is the last one to use among its drops."""
    needed = {*region.outputs}
    found: list[Instruction] = []
    for instruction in reversed(region.instructions):
        used = {*filter(None, instruction.inputs), *filter(None, instruction.outputs)}.union(
            *(inner.captures for inner in instruction.regions))
        found.append(replace(instruction, drops=tuple(sorted(used - needed))))
        needed |= used
    return replace(region, instructions=tuple(reversed(found)))
