"""Programs: the plan of a model that cannot be compiled as a single graph.

A program is a region: instructions over named values. An instruction runs a compiled segment, an operator on the host,
or regions (If, Loop, Scan). A name denotes one value in the whole program.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

VIEWS = frozenset({"FirstRows"})        # operators that return a view and cost nothing


@dataclass(frozen=True)
class Instruction:
    """A step of a program."""
    op: str                                 # ONNX operator; "" for a segment
    name: str
    inputs: tuple[str, ...]                 # "" is an absent one
    outputs: tuple[str, ...]
    segment: int = -1                       # index in ProgramPart.segments
    node: Mapping[str, Any] = field(default_factory=dict)   # see engines/ir/serialize.py; {} for a segment
    regions: tuple[Region, ...] = ()        # If: then, else; Loop, Scan, SequenceMap: the body
    drops: tuple[str, ...] = ()             # values that are dead afterwards

    @property
    def by_host(self) -> bool:
        """True if the host evaluates it: not a segment, without regions, and not a view."""
        return bool(self.op) and not self.regions and self.op not in VIEWS


@dataclass(frozen=True)
class Kind:
    """ONNX type of a value. dtype: a tensor's, "object" for strings, "sequence", "optional", ...; "" if unknown."""
    dtype: str
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Sequence of instructions with its inputs and outputs, as a block of MLIR."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    captures: tuple[str, ...] = ()          # values of the enclosing regions that it reads
    kinds: tuple[Kind, ...] = ()            # types of the outputs

    def host_operators(self) -> Iterator[str]:
        """Yield the operators that the host evaluates, those in nested regions included."""
        for instruction in self.instructions:
            if instruction.by_host:
                yield instruction.op
            for region in instruction.regions:
                yield from region.host_operators()

    def read_by_host(self) -> Iterator[str]:
        """Yield the outputs and the inputs of all instructions, those in nested regions included."""
        yield from self.outputs
        for instruction in self.instructions:
            yield from instruction.inputs
            for region in instruction.regions:
                yield from region.read_by_host()


@dataclass(frozen=True)
class Text:
    """Constant tensor of strings."""
    shape: tuple[int, ...]
    words: tuple[str, ...]
