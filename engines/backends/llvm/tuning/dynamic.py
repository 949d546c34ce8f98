"""Dynamic kernels: compiled once for problems that differ in some numbers only, which they take at run time.

The layers of a model at 77 tokens and at 78 are equal problems except for a few extents and strides. A dynamic
kernel is written with SymbolicInts in their place (engines/codegen/extents.py): it reads them from a table, the last of
its operands, and its guards tell for which numbers it is valid. So plans for other shapes need no compilation.

Numbers that a kernel takes at run time are those that are symbolic in its problem.
"""
from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple

from infer_server.engines.backends.llvm.codegen.isa import Isa
from infer_server.engines.backends.llvm.kernels.kernel import Kernel
from infer_server.engines.codegen.compiler_pool import CompilerPool
from infer_server.engines.codegen.extents import KernelTrace, operand_values
from infer_server.engines.codegen.ir_builder import Module
from infer_server.engines.ir.polynomials import value
from infer_server.engines.ir.symbolic import NotSymbolic, is_symbolic
from infer_server.engines.lowering.problems.problem import Problem
from infer_server.engines.plan.symbolic.plans import CompiledKernel, DynamicKernel
from infer_server.engines.version import COMPILER_VERSION

Numbers = tuple[int, ...]


class Spelling(NamedTuple):
    """Text of a kernel with blanks in place of its problem's numbers, and these numbers in order."""
    words: str
    numbers: Numbers


class KernelMatch(NamedTuple):
    """Dynamic kernel that is valid for a problem.

    tactic: the one it was compiled for.
    parameters: the values of its run-time parameters for this problem.
    """
    compiled: CompiledKernel
    tactic: Any
    parameters: Numbers


class DynamicKernels:
    """Dynamic kernels of one model, by their words."""

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._kernels: dict[str, list[CompiledKernel]] = {}
        self.by_symbol: dict[str, CompiledKernel] = {}

    @property
    def known(self) -> tuple[CompiledKernel, ...]:
        return tuple(self.by_symbol.values())

    def add(self, kernels: Iterable[CompiledKernel]) -> None:
        for one in kernels:
            self._kernels.setdefault(one.kernel.words, []).append(one)
            self.by_symbol[one.kernel.symbol] = one

    def find(self, kernel: Kernel[Any], tactics: Iterable[Any], dynamic: Set[int] = frozenset()) -> list[KernelMatch]:
        """Return the dynamic kernels that are valid for a problem, with tactics of the classes of `tactics`.

        dynamic: positions of the numbers that the kernel must take at run time.
        """
        words, numbers = spelling(kernel)
        fitting = [one for one in self._kernels.get(words, ()) if _fits(one.kernel, numbers)
                   and all(one.kernel.numbers[position] is None for position in dynamic)]
        if not fitting:
            return []
        by_text = {repr(tactic): tactic for tactic in tactics}
        classes = {type(tactic).__name__: type(tactic) for tactic in by_text.values()}
        return [KernelMatch(one, tactic, _parameters(one.kernel, numbers)) for one in fitting
                if (tactic := by_text.get(one.kernel.tactic) or _tactic(one.kernel.tactic, classes)) is not None]

    def make(self, candidates: Sequence[tuple[Kernel[Any], Any]], pool: CompilerPool,
             dynamic_numbers: Sequence[Set[int]]) -> list[KernelMatch]:
        """Compile a dynamic kernel for each kernel and tactic.

        dynamic_numbers: for each of them, positions of the numbers that it takes at run time.
        """
        traces: list[KernelTrace] = []
        symbols: list[str] = []
        made: list[KernelMatch] = []
        for (kernel, tactic), dynamic, code in zip(candidates, dynamic_numbers, pool.compile(
                self._texts(candidates, dynamic_numbers, traces, symbols)), strict=True):
            words, numbers = spelling(kernel)
            trace, symbol = traces[len(made)], symbols[len(made)]
            one = DynamicKernel(
                symbol, words, repr(tactic), tuple(None if i in dynamic else n for i, n in enumerate(numbers)),
                trace.operands, tuple((*guard, answer) for guard, answer in trace.guards.items()), tuple(trace.table))
            made.append(KernelMatch(CompiledKernel(one, code), tactic, _parameters(one, numbers)))
        self.add(match.compiled for match in made)
        return made

    def _texts(self, candidates: Iterable[tuple[Kernel[Any], Any]], dynamic_numbers: Sequence[Set[int]],
               traces: list[KernelTrace], symbols: list[str]) -> Iterator[str]:
        """Yield the module of each kernel, and append its trace and symbol to the lists."""
        for (kernel, tactic), dynamic in zip(candidates, dynamic_numbers, strict=True):
            key = repr((COMPILER_VERSION, self._isa.name, kernel, tactic, sorted(dynamic)))
            symbols.append(f"{kernel.problem.family}_dynamic_{hashlib.sha256(key.encode()).hexdigest()[:16]}")
            traces.append(KernelTrace())
            module = Module(trace=traces[-1])
            dynamic_kernel(kernel, traces[-1], dynamic).emit(module, symbols[-1], self._isa, tactic)
            yield module.text()


def _fits(one: DynamicKernel, numbers: Numbers) -> bool:
    if not all(known is None or known == number for known, number in zip(one.numbers, numbers, strict=True)):
        return False
    try:
        atoms = operand_values(one.operands, numbers)
    except ZeroDivisionError:       # a guard says that the divisor is not 0
        return False
    return all((value(number, atoms) == 0 if relation == "==" else value(number, atoms) < 0) == answer
               for relation, number, answer in one.guards)


def symbolic_numbers(problem: Problem) -> frozenset[int]:
    """Return the positions of the symbolic numbers of a problem."""
    return frozenset(position for position, number in enumerate(_numbers(problem)) if is_symbolic(number))


def parameters_of(one: DynamicKernel, kernel: Kernel[Any]) -> Numbers:
    """Return the table of a dynamic kernel for a problem with symbolic numbers, and guard that its own guards hold.

    Raises NotSymbolic if the kernel is not valid for the problem.
    """
    numbers = tuple(_numbers(kernel.problem))
    if not _fits(one, numbers):     # not an assert: the comparisons record guards, which python -O would drop
        raise NotSymbolic(f"{one.symbol} does not hold for what it was found for")
    return _parameters(one, numbers)


def _parameters(one: DynamicKernel, numbers: Numbers) -> Numbers:
    atoms = operand_values(one.operands, numbers)
    return tuple(value(number, atoms) for number in one.table)


def _tactic(text: str, classes: Mapping[str, type]) -> Any:
    """Parse the repr() of a tactic: Tile(rows=1, cols=6).

    None: its class is not in `classes`, or it has more than numbers.
    """
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    try:
        fields = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except ValueError:
        return None
    kind = classes.get(call.func.id)
    return kind and kind(**fields)


def dynamic_kernel(kernel: Kernel[Any], trace: KernelTrace, dynamic: Set[int]) -> Kernel[Any]:
    """Return the kernel with SymbolicInts in place of some of its problem's numbers; it can only be emitted."""
    numbers = iter(trace.extents(spelling(kernel).numbers, dynamic))
    return type(kernel)(_mapped(kernel.problem, lambda number: next(numbers)), kernel.items)


# ---- spelling
@lru_cache(1 << 12)
def spelling(kernel: Kernel[Any]) -> Spelling:
    """Return the spelling of a kernel."""
    problem = _mapped(kernel.problem, lambda number: _Blank())
    return Spelling(f"{type(kernel).__name__} {kernel.items} {problem!r}", tuple(_numbers(kernel.problem)))


def _numbers(problem: Problem) -> list[int]:
    """Return the numbers of a problem, in order."""
    numbers: list[int] = []
    _mapped(problem, numbers.append)
    return numbers


class _Blank:
    def __repr__(self) -> str:
        return "#"


def _mapped(value: Any, number: Callable[[int], Any]) -> Any:
    """Return a problem with each of its numbers replaced."""
    if isinstance(value, int) and not isinstance(value, bool):
        return number(value)
    if isinstance(value, tuple):
        return tuple(_mapped(one, number) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copy = object.__new__(type(value))      # skips __post_init__: the original's fields have been checked
        for field in dataclasses.fields(value):
            object.__setattr__(copy, field.name, _mapped(getattr(value, field.name), number))
        return copy
    return value
