"""Operators that are not of ONNX's default domain, written out as nodes that are: a rule for each.

    @extension("com.microsoft", "FusedMatMul", "A:T B:T", "alpha=1.0 transA=0 transB=0")
    def _fused_matmul(call: Call) -> list[Node]: ...

A rule gives nodes as a file of opset STANDARD would have them (axes and shapes are inputs), and the import takes each
as it takes a file's; a node of an operator that ONNX does not have is canonical as it is. Where the onnx package has no
schema, the two texts are one. Inputs: name:variable, with a ? if it may be left out and ... if it stands for several;
inputs of one variable have one type. Attributes: name=default, or name:kind where there is none, with a ! if it must be
given.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from engines.frontend.operators.normalise import Call, Rule
from engines.frontend.operators.parts import Parts
from engines.ir.counted import as_int, is_counted
from engines.ir.graph import Dim

STANDARD = 24           # the newest opset of the oldest onnx package that is supported

_EIGHT_BITS = ("tensor(uint8)", "tensor(int8)")
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")
# What a variable, which is a letter and perhaps a number, may be.
_TYPES: Mapping[str, tuple[str, ...]] = {
    "T": _FLOATS, "F": _FLOATS[:1], "Q": _EIGHT_BITS, "I": ("tensor(int32)",), "L": ("tensor(int64)",),
    "B": ("tensor(bool)",), "S": ("tensor(string)",), "N": ("tensor(int32)", "tensor(int64)"),
    "X": (*_FLOATS, *_EIGHT_BITS, "tensor(bool)",
          *(f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (4, 16, 32, 64)))}


@dataclass(frozen=True)
class Input:
    """As a signature has it."""
    name: str
    variable: str
    types: tuple[str, ...]
    optional: bool
    several: bool


@dataclass(frozen=True)
class Attribute:
    """As a signature has it. kind: int, float, string, ints, floats or strings; default None: there is none."""
    name: str
    kind: str
    default: int | float | str | None
    required: bool


@dataclass(frozen=True)
class Signature:
    """What a node may be: for operators of which the onnx package knows nothing."""
    inputs: Sequence[Input]
    attributes: Sequence[Attribute]
    outputs: int                        # the most


_rules: dict[tuple[str, str], Rule] = {}
_signatures: dict[tuple[str, str], Signature] = {}
EXTENSIONS: Mapping[tuple[str, str], Rule] = MappingProxyType(_rules)               # by domain and operator
SIGNATURES: Mapping[tuple[str, str], Signature] = MappingProxyType(_signatures)


def extension(domain: str, op: str, inputs: str = "", attributes: str = "",
              outputs: int = 1) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _rules[domain, op] = rule
        if inputs:
            _signatures[domain, op] = Signature(tuple(map(_input, inputs.split())),
                                                tuple(map(_attribute, attributes.split())), outputs)
        return rule
    return register


def contrib(op: str, inputs: str, attributes: str = "", outputs: int = 1) -> Callable[[Rule], Rule]:
    """One of ONNX Runtime's own operators."""
    return extension("com.microsoft", op, inputs, attributes, outputs)


def ml(op: str) -> Callable[[Rule], Rule]:
    """One of ONNX's operators of classical machine learning."""
    return extension("ai.onnx.ml", op)


def _input(text: str) -> Input:
    name, variable, mark = re.fullmatch(r"(\w+):(\w+)(\?|\.\.\.|)", text).groups()  # type: ignore[union-attr]  # ours
    return Input(name, variable, _TYPES[variable[0]], mark == "?", mark == "...")


def _attribute(text: str) -> Attribute:
    if ":" in text:
        name, _, kind = text.rstrip("!").partition(":")
        return Attribute(name, kind, None, text.endswith("!"))
    name, _, value = text.partition("=")
    if re.fullmatch(r"-?\d+", value):
        return Attribute(name, "int", int(value), False)
    if re.fullmatch(r"-?\d.*", value):
        return Attribute(name, "float", float(np.float32(value)), False)    # as files have it
    return Attribute(name, "string", value, False)


class StandardParts(Parts):
    """Parts, with what standard nodes take as constant inputs."""

    def number(self, value: float, dtype: np.dtype[np.generic]) -> str:
        return self.constant(np.array(value, dtype))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, object if is_counted(values) else np.int64))

    def reshape(self, x: str, *target: Dim) -> str:
        """`target` as Reshape takes it: 0 for an extent that stays, one -1."""
        return self("Reshape", x, self.ints(*map(as_int, target)))

    def cut(self, x: str, axis: int, start: int, end: int) -> str:
        return self("Slice", x, *(self.ints(number) for number in (start, end, axis)))

    def plus(self, x: str, call: Call, index: int) -> str:
        """x and an input of the call, if it has that."""
        return self("Add", x, call.node.inputs[index]) if call.has(index) else x
