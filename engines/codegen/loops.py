"""Loops over the elements of a strided array, and loops that a computed condition ends."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from infer_server.engines.codegen.ir_builder import Function, Value
from infer_server.engines.codegen.types import I1, lanes_of


def every_address(f: Function, address: Value, shape: Sequence[int | Value], strides: Sequence[int],
                  **carried: dict[Any, Value]) -> Iterator[Value]:
    """Emit nested loops over a strided array in row-major order, and yield the address of the element.

    strides are in bytes. carried: registers that the loops carry, as in Function.loop.
    """
    if not shape:
        yield address
        return
    for i in f.loop("pixel", shape[0], **carried):
        yield from every_address(f, address + i * strides[0], shape[1:], strides[1:], **carried)


def repeat(f: Function, name: str, state: dict[Any, Value]) -> Iterator[list[Value]]:
    """Emit a do-while loop: it runs again while one of its tests holds in any lane.

    The body appends the tests, i1 or vectors of i1, to the list that this yields. `state` holds the registers that the
    loop carries, as in Function.loop.
    """
    before, label = f.block, f.fresh(name)
    slots, first, phis = f.phis({name: state})
    f.write(f"; repeat {name}")
    f.write(f"br label %{label}")
    f.begin(label)
    f.depth += 1
    hole, tests = len(f.lines), list[Value]()
    yield tests
    f.lines[hole:hole] = f.phi_lines(phis, before, first, f.block, [group[key] for group, key in slots])
    more, *others = tests
    for test in others:
        more = more.binary("or", test)
    if more.type != I1:
        more = f.call(I1, f"llvm.vector.reduce.or.v{lanes_of(more.type)}i1", more, hint="any")
    # Without !unpredictable LLVM branches on each test separately, and those branches are mispredicted.
    f.write(f"br {more}, label %{label}, label %{label}.end, !unpredictable !{{}}")
    f.depth -= 1
    f.begin(f"{label}.end")
