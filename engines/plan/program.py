"""Programs: what is run one after the other where a model is no single graph.

A program is a region: instructions over named values. An instruction runs a segment, which is compiled, or an operator
that the host evaluates, or regions: If, Loop, Scan. Names are the same everywhere in a program.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

VIEWS = frozenset({"FirstRows"})        # operators of a program that cost nothing


@dataclass(frozen=True)
class Instruction:
    """A step of a program."""
    op: str                                 # ONNX's; "" for a segment
    name: str
    inputs: tuple[str, ...]                 # "" is an absent one
    outputs: tuple[str, ...]
    segment: int = -1                       # index in ProgramPart.segments
    node: Mapping[str, Any] = field(default_factory=dict)   # what is not a segment, as engines.ir.serialize writes it
    regions: tuple[Region, ...] = ()        # If: then, else; Loop, Scan, SequenceMap: the body
    drops: tuple[str, ...] = ()             # values that nobody needs afterwards

    @property
    def by_host(self) -> bool:
        """Whether the host evaluates it: it is no segment, has no regions, and is no view of what a segment made."""
        return bool(self.op) and not self.regions and self.op not in VIEWS


@dataclass(frozen=True)
class Kind:
    """What ONNX tells of a value. dtype: "object" for strings, "sequence", "optional", ...; "" if it tells nothing."""
    dtype: str
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Region:
    """Instructions, and the values that they begin and end with."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]
    captures: tuple[str, ...] = ()          # values from around it
    kinds: tuple[Kind, ...] = ()            # of the outputs

    def host_operators(self) -> Iterator[str]:
        """Those that are neither in segments nor regions."""
        for instruction in self.instructions:
            if instruction.by_host:
                yield instruction.op
            for region in instruction.regions:
                yield from region.host_operators()

    def read_by_host(self) -> Iterator[str]:
        """All that is not read by segments alone."""
        yield from self.outputs
        for instruction in self.instructions:
            yield from instruction.inputs
            for region in instruction.regions:
                yield from region.read_by_host()


@dataclass(frozen=True)
class Text:
    """A constant of strings."""
    shape: tuple[int, ...]
    words: tuple[str, ...]
