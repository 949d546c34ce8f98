"""Loops over the elements of a strided array."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engines.codegen.ir_builder import Function, Value


def every_address(f: Function, address: Value, shape: Sequence[int | Value], strides: Sequence[int],
                  **carried: dict[Any, Value]) -> Iterator[Value]:
    """The address of every element in row-major order, in nested loops that carry registers as Function.loop does."""
    if not shape:
        yield address
        return
    for i in f.loop("pixel", shape[0], **carried):
        yield from every_address(f, address + i * strides[0], shape[1:], strides[1:], **carried)
