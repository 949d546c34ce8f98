"""Registry of rules that lower operators outside ONNX's default domain to operators of that domain.

    @extension("com.microsoft", "FusedMatMul", "A:T B:T", "alpha=1.0 transA=0 transB=0")
    def _fused_matmul(call: OperatorCall) -> list[Node]: ...

A rule returns nodes in the form of opset STANDARD (axes and shapes are inputs), which the importer normalises like
those of a file; nodes of operators that ONNX lacks are canonical already. The two strings are the schema of an operator
that the onnx package does not know. Inputs: name:variable, with a ? if optional and ... if variadic; inputs of one
variable have one type. Attributes: name=default, or name:kind without a default, with a ! if required.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from infer_server.engines.frontend.operators.normalise import OperatorCall, Rule
from infer_server.engines.frontend.operators.parts import NodeBuilder
from infer_server.engines.ir.graph import Dim
from infer_server.engines.ir.symbolic import as_int, is_symbolic

STANDARD = 24           # the newest opset of the oldest supported onnx package

_EIGHT_BITS = ("tensor(uint8)", "tensor(int8)")
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(double)", "tensor(bfloat16)")
# Types of a variable, which is a letter and perhaps a number, by the letter.
_TYPES: Mapping[str, tuple[str, ...]] = {
    "T": _FLOATS, "F": _FLOATS[:1], "Q": _EIGHT_BITS, "I": ("tensor(int32)",), "L": ("tensor(int64)",),
    "B": ("tensor(bool)",), "S": ("tensor(string)",), "N": ("tensor(int32)", "tensor(int64)"),
    "X": (*_FLOATS, *_EIGHT_BITS, "tensor(bool)",
          *(f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (4, 16, 32, 64)))}


@dataclass(frozen=True)
class SignatureInput:
    """Input of a signature."""
    name: str
    variable: str
    types: tuple[str, ...]
    optional: bool
    several: bool


@dataclass(frozen=True)
class SignatureAttribute:
    """Attribute of a signature. `kind`: int, float, string, ints, floats or strings; `default` may be None."""
    name: str
    kind: str
    default: int | float | str | None
    required: bool


@dataclass(frozen=True)
class Signature:
    """Schema of an operator that the onnx package does not know."""
    inputs: Sequence[SignatureInput]
    attributes: Sequence[SignatureAttribute]
    outputs: int                        # the most


_rules: dict[tuple[str, str], Rule] = {}
_signatures: dict[tuple[str, str], Signature] = {}
EXTENSIONS: Mapping[tuple[str, str], Rule] = MappingProxyType(_rules)               # by (domain, operator)
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
    """Register the rule of an ONNX Runtime contrib operator (com.microsoft)."""
    return extension("com.microsoft", op, inputs, attributes, outputs)


def ml(op: str) -> Callable[[Rule], Rule]:
    """Register the rule of an operator of ONNX's ai.onnx.ml domain."""
    return extension("ai.onnx.ml", op)


def _input(text: str) -> SignatureInput:
    name, variable, mark = re.fullmatch(r"(\w+):(\w+)(\?|\.\.\.|)", text).groups()  # type: ignore[union-attr]  # ours
    return SignatureInput(name, variable, _TYPES[variable[0]], mark == "?", mark == "...")


def _attribute(text: str) -> SignatureAttribute:
    if ":" in text:
        name, _, kind = text.rstrip("!").partition(":")
        return SignatureAttribute(name, kind, None, text.endswith("!"))
    name, _, value = text.partition("=")
    if re.fullmatch(r"-?\d+", value):
        return SignatureAttribute(name, "int", int(value), False)
    if re.fullmatch(r"-?\d.*", value):
        return SignatureAttribute(name, "float", float(np.float32(value)), False)    # float32, as in files
    return SignatureAttribute(name, "string", value, False)


class StandardNodeBuilder(NodeBuilder):
    """Node builder with helpers for constant inputs of standard nodes."""

    def number(self, value: float, dtype: np.dtype[np.generic]) -> str:
        return self.constant(np.array(value, dtype))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, object if is_symbolic(values) else np.int64))

    def reshape(self, x: str, *target: Dim) -> str:
        """Add a Reshape; in `target`, 0 keeps an extent and one -1 is inferred."""
        return self("Reshape", x, self.ints(*map(as_int, target)))

    def cut(self, x: str, axis: int, start: int, end: int) -> str:
        return self("Slice", x, *(self.ints(number) for number in (start, end, axis)))

    def plus(self, x: str, call: OperatorCall, index: int) -> str:
        """Return the sum of x and an input of the call, or x if the call lacks the input."""
        return self("Add", x, call.node.inputs[index]) if call.has(index) else x
