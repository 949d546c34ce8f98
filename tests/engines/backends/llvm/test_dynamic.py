"""Dynamic kernels: questions about their numbers while a kernel is written become guards."""
from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from infer_server.engines.backends.llvm.codegen.compile import compiler_pool
from infer_server.engines.backends.llvm.codegen.isa import PORTABLE
from infer_server.engines.backends.llvm.kernels.kernel import kernels_for
from infer_server.engines.backends.llvm.tuning.dynamic import DynamicKernels, spelling
from infer_server.engines.codegen.extents import KernelTrace, operand_values
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.codegen.types import I64, PTR
from infer_server.engines.ir.polynomials import Polynomial, atom, constant, plus, value
from infer_server.engines.ir.symbolic import SymbolicInt
from infer_server.engines.lowering.epilogue.program import EpilogueProgram
from infer_server.engines.lowering.problems.images import Pool
from infer_server.engines.lowering.problems.view import dense_view


def extent(number: int) -> tuple[KernelTrace, SymbolicInt]:
    trace = KernelTrace()
    (rows,) = trace.extents([number], {0})
    return trace, rows


def value_of(trace: KernelTrace, number: Polynomial, rows: int) -> int:
    found: int = value(number, operand_values(trace.operands, [rows]))
    return found


def holds(trace: KernelTrace, rows: int) -> bool:
    return all((value_of(trace, number, rows) == 0 if relation == "==" else value_of(trace, number, rows) < 0) == answer
               for (relation, number), answer in trace.guards.items())


def test_an_extent_is_counted_by_its_term_and_asks_for_nothing() -> None:
    trace, rows = extent(77)
    tiles = -(-rows * 4 // 6) + 1 - rows % 8
    assert not trace.guards
    for number in (77, 1, 64, 1000):
        assert value_of(trace, tiles.expr, number) == -(-number * 4 // 6) + 1 - number % 8
    assert rows * 384 % 32 == 0 and rows * 0 == 0 and rows - rows == 0 and not trace.guards


@pytest.mark.parametrize("asks", [
    lambda n: n == 77, lambda n: n < 100, lambda n: max(n, 9), lambda n: range(n), lambda n: f"[{n} x i8]",
    lambda n: n / 2, lambda n: bool(n % 8), lambda n: 0.5 * n])
def test_whoever_asks_for_the_number_itself_is_guarded(asks) -> None:
    trace, rows = extent(77)
    asks(rows)
    assert holds(trace, 77)
    assert not all(holds(trace, number) for number in (1, 8, 76, 78, 128, 1000))


def test_what_was_kept_of_another_kernel_is_guarded_for_this_one() -> None:
    seen = []

    @cache
    def order(count: int) -> tuple[int, ...]:
        seen.append(count)
        return tuple(range(count))

    (first, ours), (second, theirs) = extent(5), extent(5)
    assert order(ours) == order(theirs) == (0, 1, 2, 3, 4) and len(seen) == 1
    for trace in (first, second):
        assert holds(trace, 5) and not holds(trace, 7)


def test_a_dynamic_number_is_read_from_the_table_in_every_function() -> None:
    trace, rows = extent(77)
    module = Module(trace=trace)
    inner = module.function("inner", internal=True, x=PTR)
    inner.store(inner.constant(rows * 8, I64), inner.parameters["x"], 8)
    outer = module.function("outer", operands=PTR)
    outer.table.begin("%operands", 1)
    outer.run("inner", outer.parameters["operands"] + (rows + 1))
    assert trace.table == [(rows * 8).expr, (rows + 1).expr] and not trace.guards
    text = module.text()
    assert "i64 8\n" in text and "ptr %parameters)" in text and "77" not in text


def pool(height: int, width: int) -> Pool:
    x, y = (dense_view("float32", (h, w, 8)) for h, w in ((height, width), (height // 2, width // 2)))
    return Pool(x, y, (), EpilogueProgram(()), "max", (2, 2), (2, 2))


def test_a_general_kernel_is_found_for_the_numbers_that_its_guards_allow() -> None:
    kernels = DynamicKernels(PORTABLE)
    (small,), (large,) = kernels_for(pool(8, 10)), kernels_for(pool(16, 30))
    tactics = small.tactics(PORTABLE)
    pairs = zip(spelling(small).numbers, spelling(large).numbers, strict=True)
    dynamic = {position for position, (a, b) in enumerate(pairs) if a != b}
    with compiler_pool(PORTABLE) as workers:
        (made,) = kernels.make([(small, tactics[0])], workers, [dynamic])
    assert kernels.known == (made.compiled,)
    for height, width in ((16, 30), (8, 10), (32, 12)):
        (kernel,) = kernels_for(pool(height, width))
        (found,) = kernels.find(kernel, tactics)
        assert found.tactic == tactics[0] and found.compiled == made.compiled and height // 2 in found.parameters
    (other,) = kernels_for(Pool(dense_view("float32", (8, 10, 9)), dense_view("float32", (4, 5, 9)), (),
                                EpilogueProgram(()), "max", (2, 2), (2, 2)))
    assert not kernels.find(other, tactics)         # different channel counts
    guarded = DynamicKernels(PORTABLE)
    guard = "==", plus(atom(0), constant(-8)), True
    guarded.add([made.compiled._replace(kernel=replace(made.compiled.kernel, guards=(guard,)))])
    assert guarded.find(small, tactics) and not guarded.find(large, tactics)
